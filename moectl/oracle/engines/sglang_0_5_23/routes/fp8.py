"""FP8 and MXFP8 experts, and MXFP4 experts of checkpoints that are FP8 elsewhere."""

from __future__ import annotations

from dataclasses import replace

from .....problem.schemes import FULL
from ....backend import LOADING, EnvironmentSwitch, PackageNeed, RuntimeFailure, SupportQuery, but, only
from ....gpu_archs import ROCM, sm
from ....route import Condition, Order, Route
from ..runners import DEEP_GEMM_AUTO, NO_KERNEL, aiter, runner
from ..terms import JIT_DEEP_GEMM, SM90, SM100, SM120, exchange, uses_aiter
from .shared import LATE_FAILURES, TRTLLM_NAMES, RunnerNames, every, without_deepep_v2, without_hpc_ops

_FP8 = "Fp8MoEMethod"
_NEEDS_AMX = RuntimeFailure(
    lambda ask: (
        ask.device.platform == "cpu"
        and "amx" not in ask.device.features
        and FULL not in ask.problem.scheme.weight.block
    ),
    "needs a CPU with AMX",
    "AssertionError",
    LOADING,
)
_NEEDS_SM89 = RuntimeFailure(
    lambda ask: (
        ask.device.platform == "cuda"
        and ask.device.capability < 89
        and ask.problem.scheme.weight.name == "fp8"
    ),
    "multiplies FP8 in Triton, which compiles fp8e4nv for SM89 and newer only",
    "CompilationError",
)
_FP8_TRITON = runner("triton", _FP8, failures=(_NEEDS_AMX, _NEEDS_SM89))
_FP8_NAMES: RunnerNames = {
    "triton": (_FP8_TRITON,),
    **{name: (runner(name, _FP8),) for name in ("deep_gemm", "aiter", "flashinfer_megamoe")},
    **{name: (runner(name, _FP8),) for name in (*TRTLLM_NAMES, "flashinfer_trtllm_routed")},
    "hpc_ops": (runner("hpc_ops", _FP8, (SM90, ROCM)),),
    "cutlass": (runner("cutlass", _FP8, (SM90, SM100, SM120), checked=False),),
    "flashinfer_cutlass": (_FP8_TRITON,),
    "flashinfer_cutedsl": (_FP8_TRITON,),
    **{
        name: (runner(name, _FP8, failures=(NO_KERNEL,), checked=False),)
        for name in ("triton_kernel", "flashinfer_mxfp4", "marlin", "humming", "experimental_sgl_marlin")
    },
}
_PADS = frozenset({*TRTLLM_NAMES, "flashinfer_trtllm_routed"})


def _cut_blocks(ask: SupportQuery) -> bool:
    rows, columns = ask.problem.scheme.weight.block
    size = ask.problem.dims.intermediate
    size = -(-size // 128) * 128 if ask.request in _PADS else size
    return (
        FULL not in (rows, columns)
        and not uses_aiter(ask)
        and bool(size % rows or (ask.problem.parallel.tp_size > 1 and size % columns))
    )


_CUT = Condition(
    "weight blocks",
    _cut_blocks,
    lambda ask: (
        f"intermediate {ask.problem.dims.intermediate} per rank is not aligned with blocks of "
        f"{ask.problem.scheme.weight}"
    ),
)
_SCALES = Condition(
    "cutlass",
    lambda ask: ask.request == "cutlass" and FULL in ask.problem.scheme.weight.block,
    lambda ask: "cutlass with FP8 needs scales per block",
    kind="AssertionError",
)


def _not_blocks(ask: SupportQuery) -> bool:
    weight = ask.problem.scheme.weight
    return exchange(ask) == "deepep_v2" and weight.name == "fp8" and weight.block != (128, 128)


FP8 = Route(
    name="FP8",
    method=_FP8,
    storages=only("fp8"),
    weights=frozenset({"fp8"}),
    orders=(
        Order(
            (
                runner(
                    "deep_gemm",
                    _FP8,
                    (sm(90),),
                    rules=(DEEP_GEMM_AUTO,),
                    switches=(EnvironmentSwitch(JIT_DEEP_GEMM),),
                    needs=(PackageNeed("deep_gemm"),),
                ),
                aiter(_FP8),
                _FP8_TRITON,
            )
        ),
    ),
    names=_FP8_NAMES,
    minimum=80,
    refusals=(_SCALES, _CUT, replace(without_deepep_v2(_FP8), holds=_not_blocks)),
    late_failures=LATE_FAILURES,
    fails_by_name="NotImplementedError",
)
MXFP8 = replace(FP8, name="MXFP8", weights=frozenset({"mxfp8"}), minimum=100)

_FP4 = "Mxfp4Flashinfer{}MoEMethod"
FP4_EXPERTS = replace(
    FP8,
    name="MXFP4 experts of FP8 checkpoints",
    storages=only("mxfp4"),
    weights=frozenset({"mxfp4"}),
    names={
        **_FP8_NAMES,
        "marlin": (runner("marlin", "Mxfp4MarlinMoEMethod"),),
        "experimental_sgl_marlin": (runner("marlin", "Mxfp4MarlinMoEMethod"),),
        "humming": (runner("humming", "Mxfp4HummingMoEMethod"),),
        "flashinfer_mxfp4": (
            runner("flashinfer_mxfp4", _FP4.format("Cutlass"), (SM90, SM120)),
            runner("flashinfer_mxfp4", _FP4.format("Trtllm")),
        ),
    },
    refusals=(without_deepep_v2(_FP8),),
)

_M8 = "ModelOptFp8MoEMethod"
MODELOPT_FP8 = Route(
    name="FP8 of ModelOpt",
    method=_M8,
    storages=only("modelopt"),
    weights=frozenset({"fp8"}),
    orders=(Order((runner("triton", _M8),)),),
    names=every(
        runner("triton", _M8),
        {
            "flashinfer_cutlass": (runner("flashinfer_cutlass", _M8),),
            **{name: (runner(name, _M8, checked=False),) for name in TRTLLM_NAMES},
        },
    ),
    platforms=but("rocm", "cpu"),
    minimum=89,
    refusals=(without_hpc_ops(_M8), without_deepep_v2(_M8)),
    late_failures=LATE_FAILURES,
    fails_by_name="NotImplementedError",
)

"""Experts of compressed-tensors: FP8, integers and NVFP4."""

from __future__ import annotations

from dataclasses import replace

from ....backend import LOADING, RuntimeFailure, SupportQuery, but, only
from ....route import Condition, Order, Route
from ..runners import aiter, runner
from ..terms import BLACKWELL, SM100, on
from .shared import LATE_FAILURES, TRTLLM_NAMES, RunnerNames, every, without_deepep_v2, without_hpc_ops

_CT = "CompressedTensorsFusedMoEMethod"
_C8 = "CompressedTensorsW8A8Fp8MoE"
CT_FP8 = Route(
    name="FP8 of compressed-tensors",
    method=_CT,
    storages=only("compressed-tensors"),
    weights=frozenset({"fp8"}),
    orders=(
        Order(
            (
                replace(aiter(_C8), note="For scales per channel."),
                runner("triton", _C8),
            )
        ),
    ),
    names={
        name: (runner(name, _C8),) for name in ("aiter", "triton", "flashinfer_trtllm_routed", *TRTLLM_NAMES)
    },
    refusals=(without_hpc_ops(_CT), without_deepep_v2(_CT)),
    late_failures=LATE_FAILURES,
    fails_by_name="NotImplementedError",
    fails_unknown="AttributeError",
)

_WNA16, _WNA16_TRITON = "CompressedTensorsWNA16MoE", "CompressedTensorsWNA16TritonMoE"
_INT_MARLIN = runner("marlin", _WNA16)
_INT_TRITON = runner("triton", _WNA16_TRITON)


def _triton_int4(ask: SupportQuery) -> bool:
    weight = ask.problem.scheme.weight
    return (
        weight.name == "int4"
        and weight.group in (32, 128)
        and not weight.zero_point
        and not ask.problem.act_order
    )


CT_INTEGERS = Route(
    name="integers of compressed-tensors",
    method=_CT,
    storages=only("compressed-tensors"),
    weights=frozenset({"int4", "int8"}),
    acts=only("a16"),
    orders=(Order((_INT_MARLIN,)),),
    names=every(_INT_MARLIN, {"triton": (_INT_TRITON,)}),
    refusals=(
        without_hpc_ops(_CT),
        without_deepep_v2(_CT),
        Condition(
            "triton",
            lambda ask: ask.request == "triton" and ask.device.platform != "rocm" and not _triton_int4(ask),
            lambda ask: "triton needs symmetric int4 in groups of 32 or 128 without activation order",
        ),
    ),
    late_failures=LATE_FAILURES,
    fails_by_name="NotImplementedError",
)
_GROUPS_OF_32 = Condition(
    "groups of 32",
    lambda ask: (
        ask.problem.scheme.weight.name == "int4"
        and ask.problem.scheme.weight.group == 32
        and not ask.problem.scheme.weight.zero_point
    ),
    lambda ask: "int4 in groups of 32",
)
_TRITON_BY_DEFAULT = Condition(
    "Triton by default",
    lambda ask: on(ask.device, SM100) and _triton_int4(ask),
    lambda ask: "symmetric int4 in groups of 32 or 128 on SM100",
)
_MXINT4 = runner(
    "flashinfer_trtllm",
    "CompressedTensorsMxInt4MoE",
    checked=False,
    failures=(
        RuntimeFailure(
            lambda ask: not ask.packages.has("flashinfer"),
            "arranges weights by FlashInfer's functions, and FlashInfer is not installed",
            "NameError",
            LOADING,
        ),
    ),
)
_MXINT4_NAMES: RunnerNames = dict.fromkeys(TRTLLM_NAMES, (_MXINT4,))
CT_ROCM = replace(
    CT_INTEGERS,
    name="integers of compressed-tensors on ROCm",
    orders=(Order((_INT_TRITON,)),),
    names=every(_INT_TRITON, {}),
    when=Condition("ROCm", lambda ask: ask.device.platform == "rocm", lambda ask: "a ROCm device"),
)
CT_ROCM_GROUPS = replace(
    CT_ROCM,
    name="int4 of compressed-tensors in groups of 32 on ROCm",
    names={**CT_ROCM.names, **_MXINT4_NAMES},
    when=replace(_GROUPS_OF_32, holds=lambda ask: _GROUPS_OF_32.holds(ask) and ask.device.platform == "rocm"),
)
CT_GROUPS_TRITON = replace(
    CT_INTEGERS,
    name="int4 of compressed-tensors in groups of 32 on SM100",
    orders=(Order((_INT_TRITON,)),),
    names={**CT_INTEGERS.names, **_MXINT4_NAMES},
    when=replace(_GROUPS_OF_32, holds=lambda ask: _GROUPS_OF_32.holds(ask) and _TRITON_BY_DEFAULT.holds(ask)),
)
CT_GROUPS = replace(
    CT_INTEGERS,
    name="int4 of compressed-tensors in groups of 32",
    names={**CT_INTEGERS.names, **_MXINT4_NAMES},
    when=_GROUPS_OF_32,
)
CT_TRITON = replace(
    CT_INTEGERS,
    name="int4 of compressed-tensors on SM100",
    orders=(Order((_INT_TRITON,)),),
    when=_TRITON_BY_DEFAULT,
)

_C4 = "CompressedTensorsW4A4Nvfp4MoE"
_C4_MARLIN = runner("marlin", "CompressedTensorsW4A16Nvfp4MoE")
CT_NVFP4 = Route(
    name="NVFP4 of compressed-tensors",
    method=_CT,
    storages=only("compressed-tensors"),
    weights=frozenset({"nvfp4"}),
    acts=but("a16"),
    orders=(Order((runner("flashinfer_cutlass", _C4),), BLACKWELL), Order((_C4_MARLIN,))),
    names=every(
        runner("flashinfer_cutlass", _C4, BLACKWELL),
        {
            **dict.fromkeys(TRTLLM_NAMES, (runner("flashinfer_trtllm", _C4, BLACKWELL),)),
            "marlin": (runner("flashinfer_cutlass", _C4, BLACKWELL), _C4_MARLIN),
        },
    ),
    refusals=(without_hpc_ops(_CT), without_deepep_v2(_CT)),
    late_failures=LATE_FAILURES,
    fails_by_name="NotImplementedError",
)
CT_NVFP4_A16 = replace(
    CT_NVFP4,
    name="NVFP4 of compressed-tensors, 16-bit activations",
    acts=only("a16"),
    orders=(Order((_C4_MARLIN,)),),
    names=every(_C4_MARLIN, {}),
)

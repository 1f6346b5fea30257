"""The second stage: the quantization method of a layer of experts, and its runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....problem.schemes import FULL
from ...backend import Backend, SupportQuery, but, only
from ...decision import Candidate
from ...gpu_archs import ROCM, sm
from ...route import Condition, LateFailure, Order, Route
from .runners import AITER_SIZES, DEEP_GEMM_AUTO, DEEP_GEMM_HERE, NO_KERNEL, aiter, runner
from .terms import (
    AITER_EXCHANGES,
    BLACKWELL,
    DEEPEP_LIKE,
    SM90,
    SM100,
    SM120,
    exchange,
    has_deep_gemm,
    on,
    uses_aiter,
)

RunnerNames = Mapping[str, tuple[Backend, ...]]
_TRTLLM_NAMES = ("flashinfer_trtllm", "experimental_sgl_trtllm")
_ALL = (
    "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_trtllm_routed",
    "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl", "flashinfer_megamoe", "cutlass", "aiter",
    "marlin", "humming", "experimental_sgl_trtllm", "experimental_sgl_marlin",
)  # fmt: skip


def _every(backend: Backend, but_for: RunnerNames) -> RunnerNames:
    """Every request selects `backend`, except those in `but_for`."""
    return {**dict.fromkeys(_ALL, (backend,)), **but_for}


def _hpc_ops(method: str) -> Condition:
    return Condition(
        "hpc_ops",
        lambda ask: ask.request == "hpc_ops",
        lambda ask: f"hpc_ops is for FP8 blocks and tensors (Fp8MoEMethod); this layer uses {method}",
    )


def _v2(method: str) -> Condition:
    return Condition(
        "deepep_v2",
        lambda ask: exchange(ask) == "deepep_v2",
        lambda ask: f"DeepEP v2 needs FP8 blocks of 128x128, MXFP8 or unquantized experts; this is {method}",
    )


def _old_deepep(ask: SupportQuery, chosen: Candidate | None) -> bool:
    """True for layers whose older DeepEP path needs DeepGEMM on a device without it."""
    if exchange(ask) not in DEEPEP_LIKE or ask.device.platform == "rocm" or chosen is None:
        return False
    if chosen.engine_name == "humming" or has_deep_gemm(ask):
        return False
    if ask.problem.storage == "plain":
        return chosen.engine_name == "deep_gemm" and exchange(ask) in ("deepep", "pplx")
    modelopt_cutedsl = ask.problem.storage == "modelopt" and chosen.engine_name == "flashinfer_cutedsl"
    return not modelopt_cutedsl


_OLD_DEEPEP = LateFailure(
    "DeepEP",
    _old_deepep,
    lambda ask, chosen: f"{exchange(ask)} needs DeepGEMM, which needs SM90 or newer",
    kind="AssertionError",
)


def _uneven(ask: SupportQuery, chosen: Candidate | None) -> bool:
    problem = ask.problem
    return bool(problem.experts % problem.parallel.ep_size)


_UNEVEN = LateFailure(
    "experts per rank",
    _uneven,
    lambda ask, chosen: f"{ask.problem.experts} experts cannot be spread evenly over ranks",
    kind="AssertionError",
)
_LATE = (_OLD_DEEPEP, _UNEVEN)

# ------------------------------------------------------------------------------ unquantized

_BF16 = "UnquantizedFusedMoEMethod"
_BF16_TRITON, _BF16_TRTLLM = runner("triton", _BF16), runner("flashinfer_trtllm", _BF16)
_BF16_AITER = aiter(_BF16, AITER_SIZES)
PLAIN = Route(
    name="unquantized",
    method=_BF16,
    storages=only("plain"),
    weights=frozenset({"bf16", "fp16"}),
    orders=(Order((_BF16_AITER, _BF16_TRITON)),),
    names=_every(
        _BF16_TRITON,
        {
            **dict.fromkeys(_TRTLLM_NAMES, (_BF16_TRTLLM,)),
            "flashinfer_trtllm_routed": (runner("flashinfer_trtllm_routed", _BF16),),
            "flashinfer_cutlass": (runner("flashinfer_cutlass", _BF16),),
            "deep_gemm": (runner("deep_gemm", _BF16),),
            "triton_kernel": (runner("triton_kernel", _BF16),),
            "aiter": (_BF16_AITER, _BF16_TRITON),
        },
    ),
    refusals=(
        _hpc_ops(_BF16),
        Condition(
            "aiter",
            lambda ask: (
                ask.request == "aiter"
                and uses_aiter(ask)
                and exchange(ask) in AITER_EXCHANGES
                and not AITER_SIZES.holds(ask)
            ),
            lambda ask: f"aiter does not support this layer: it needs {AITER_SIZES.wanted(ask)}",
        ),
    ),
    late_failures=_LATE,
    fails="NotImplementedError",
    fails_by_name="NotImplementedError",
)

# -------------------------------------------------------------------------------------- FP8

_FP8 = "Fp8MoEMethod"
_FP8_TRITON = runner("triton", _FP8)
_FP8_NAMES: RunnerNames = {
    **{name: (runner(name, _FP8),) for name in ("deep_gemm", "triton", "aiter", "flashinfer_megamoe")},
    **{name: (runner(name, _FP8),) for name in (*_TRTLLM_NAMES, "flashinfer_trtllm_routed")},
    "hpc_ops": (runner("hpc_ops", _FP8, (SM90, ROCM)),),
    "cutlass": (runner("cutlass", _FP8, (SM90, SM100, SM120), checked=False),),
    "flashinfer_cutlass": (_FP8_TRITON,),
    "flashinfer_cutedsl": (_FP8_TRITON,),
    **{
        name: (runner(name, _FP8, failures=(NO_KERNEL,), checked=False),)
        for name in ("triton_kernel", "flashinfer_mxfp4", "marlin", "humming", "experimental_sgl_marlin")
    },
}
_PADS = frozenset({*_TRTLLM_NAMES, "flashinfer_trtllm_routed"})


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
                runner("deep_gemm", _FP8, rules=(DEEP_GEMM_AUTO, DEEP_GEMM_HERE)),
                aiter(_FP8),
                _FP8_TRITON,
            )
        ),
    ),
    names=_FP8_NAMES,
    minimum=80,
    refusals=(_SCALES, _CUT, replace(_v2(_FP8), holds=_not_blocks)),
    late_failures=_LATE,
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
    refusals=(_v2(_FP8),),
)

# ------------------------------------------------------------------------------------ MXFP4

_MX = "Mxfp4MoEMethod"
MXFP4 = Route(
    name="MXFP4",
    method=_MX,
    storages=only("gpt_oss", "compressed-tensors"),
    weights=frozenset({"mxfp4"}),
    orders=(Order((aiter(_MX), runner("triton", _MX))),),
    names={
        **{
            name: (runner(name, _MX),)
            for name in ("deep_gemm", "triton", "triton_kernel", "aiter", "experimental_sgl_marlin", "marlin")
        },
        "flashinfer_mxfp4": (runner("flashinfer_mxfp4", _MX, (SM90, SM100, SM120)),),
    },
    minimum=80,
    refusals=(
        _hpc_ops(_MX),
        _v2(_MX),
    ),
    late_failures=_LATE,
    fails_by_name="NotImplementedError",
)

# ------------------------------------------------------------------------------------ NVFP4

_NV = "ModelOptNvFp4FusedMoEMethod"
_NV_ALSO = ("megamoe",)
NVFP4 = Route(
    name="NVFP4 of ModelOpt",
    method=_NV,
    storages=only("modelopt"),
    weights=frozenset({"nvfp4"}),
    orders=(
        Order(
            (
                runner("marlin", _NV, (sm(80, 99),), _NV_ALSO),
                runner("flashinfer_trtllm", _NV, BLACKWELL, _NV_ALSO),
            )
        ),
    ),
    names={
        name: (runner(name, _NV, None if "marlin" in name else BLACKWELL, _NV_ALSO),)
        for name in _ALL
        if name not in ("cutlass",)
    },
    minimum=80,
    refusals=(_hpc_ops(_NV), _v2(_NV)),
    late_failures=_LATE,
    fails="ValueError",
    fails_by_name="ValueError",
    fails_unknown="NotImplementedError",
)

_M8 = "ModelOptFp8MoEMethod"
MODELOPT_FP8 = Route(
    name="FP8 of ModelOpt",
    method=_M8,
    storages=only("modelopt"),
    weights=frozenset({"fp8"}),
    orders=(Order((runner("triton", _M8),)),),
    names=_every(
        runner("triton", _M8),
        {
            "flashinfer_cutlass": (runner("flashinfer_cutlass", _M8),),
            **{name: (runner(name, _M8, checked=False),) for name in _TRTLLM_NAMES},
        },
    ),
    platforms=but("rocm", "cpu"),
    minimum=89,
    refusals=(_hpc_ops(_M8), _v2(_M8)),
    late_failures=_LATE,
    fails_by_name="NotImplementedError",
)

# ------------------------------------------------------------------------ compressed-tensors

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
        name: (runner(name, _C8),) for name in ("aiter", "triton", "flashinfer_trtllm_routed", *_TRTLLM_NAMES)
    },
    refusals=(_hpc_ops(_CT), _v2(_CT)),
    late_failures=_LATE,
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
    names=_every(_INT_MARLIN, {"triton": (_INT_TRITON,)}),
    refusals=(
        _hpc_ops(_CT),
        _v2(_CT),
        Condition(
            "triton",
            lambda ask: ask.request == "triton" and ask.device.platform != "rocm" and not _triton_int4(ask),
            lambda ask: "triton needs symmetric int4 in groups of 32 or 128 without activation order",
        ),
    ),
    late_failures=_LATE,
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
_MXINT4 = runner("flashinfer_trtllm", "CompressedTensorsMxInt4MoE", checked=False)
_MXINT4_NAMES: RunnerNames = dict.fromkeys(_TRTLLM_NAMES, (_MXINT4,))
CT_ROCM = replace(
    CT_INTEGERS,
    name="integers of compressed-tensors on ROCm",
    orders=(Order((_INT_TRITON,)),),
    names=_every(_INT_TRITON, {}),
    when=Condition("ROCm", lambda ask: ask.device.platform == "rocm", lambda ask: "a ROCm device"),
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
    names=_every(
        runner("flashinfer_cutlass", _C4, BLACKWELL),
        {
            **dict.fromkeys(_TRTLLM_NAMES, (runner("flashinfer_trtllm", _C4, BLACKWELL),)),
            "marlin": (runner("flashinfer_cutlass", _C4, BLACKWELL), _C4_MARLIN),
        },
    ),
    refusals=(_hpc_ops(_CT), _v2(_CT)),
    late_failures=_LATE,
    fails_by_name="NotImplementedError",
)
CT_NVFP4_A16 = replace(
    CT_NVFP4,
    name="NVFP4 of compressed-tensors, 16-bit activations",
    acts=only("a16"),
    orders=(Order((_C4_MARLIN,)),),
    names=_every(_C4_MARLIN, {}),
)

# --------------------------------------------------------------------------- GPTQ, AWQ, Quark


def _only_auto(method: str) -> Condition:
    return Condition(
        "runner",
        lambda ask: bool(ask.request),
        lambda ask: f"{method} takes no runner by name; leave --moe-runner-backend at auto",
        kind="AssertionError",
    )


_GPTQ, _AWQ = "GPTQMarlinMoEScheme", "AWQMoEScheme"
GPTQ = Route(
    name="GPTQ",
    method="GPTQMarlinMoEMethod",
    storages=only("gptq"),
    weights=frozenset({"int4", "int8"}),
    orders=(Order((runner("marlin", _GPTQ),)),),
    names=_every(runner("marlin", _GPTQ), {}),
    platforms=only("cuda"),
    minimum=80,
    refusals=(_hpc_ops("GPTQMarlinMoEMethod"), _v2("GPTQMarlinMoEMethod"), _only_auto("GPTQMarlinMoEMethod")),
    late_failures=_LATE,
)


def _marlin_sizes(ask: SupportQuery) -> bool:
    dims, group = ask.problem.dims, ask.problem.scheme.weight.group
    return (
        dims.hidden % 128 == 0
        and dims.intermediate % max(64, group) == 0
        and group in (FULL, 32, 64, 128)
        and ask.activation in ("silu", "situ")
        and not ask.problem.routing.weight_on_input
    )


AWQ = replace(
    GPTQ,
    name="AWQ",
    method="AWQMoEMethod",
    storages=only("awq"),
    orders=(Order((runner("marlin", _AWQ),)),),
    names=_every(runner("marlin", _AWQ), {}),
    refusals=(_hpc_ops("AWQMoEMethod"), _v2("AWQMoEMethod"), _only_auto("AWQMoEMethod")),
)
_WNA = "MoeWNA16Method"
AWQ_TRITON = replace(
    AWQ,
    name="AWQ in sizes without Marlin tiles",
    method=_WNA,
    orders=(Order((runner("triton", _WNA),)),),
    names=_every(runner("triton", _WNA), {}),
    when=Condition(
        "sizes", lambda ask: not _marlin_sizes(ask), lambda ask: "sizes that Marlin's tiles do not divide"
    ),
    refusals=(_hpc_ops(_WNA), _v2(_WNA)),
)

AWQ_ELSEWHERE = replace(
    PLAIN,
    name="AWQ outside of CUDA, as unquantized experts",
    storages=only("awq"),
    weights=frozenset({"int4"}),
    when=Condition("not CUDA", lambda ask: ask.device.platform != "cuda", lambda ask: "no CUDA device"),
)
"""SGLang has no method for AWQ experts there: it creates unquantized ones, and fails on the weights."""

_Q = "QuarkFusedMoEMethod"
QUARK_MXFP4 = Route(
    name="MXFP4 of Quark",
    method=_Q,
    storages=only("quark"),
    weights=frozenset({"mxfp4"}),
    orders=(
        Order((runner("aiter", "QuarkW4A4MXFp4MoE", rules=(aiter(_Q).variants[0].capability.rules[1],)),)),
    ),
    names={"aiter": (runner("aiter", "QuarkW4A4MXFp4MoE"),)},
    minimum=70,
    refusals=(_hpc_ops(_Q), _v2(_Q)),
    late_failures=_LATE,
    fails_by_name="NotImplementedError",
)
_Q8 = "QuarkW8A8FP8MoE"
QUARK_FP8 = replace(
    QUARK_MXFP4,
    name="FP8 of Quark",
    weights=frozenset({"fp8"}),
    orders=(Order((aiter(_Q8), runner("triton", _Q8))),),
    names=_every(runner("triton", _Q8), {"aiter": (aiter(_Q8), runner("triton", _Q8))}),
)

ROUTES = (
    PLAIN,
    FP8,
    MXFP8,
    FP4_EXPERTS,
    MXFP4,
    NVFP4,
    MODELOPT_FP8,
    CT_FP8,
    CT_ROCM,
    CT_GROUPS_TRITON,
    CT_GROUPS,
    CT_TRITON,
    CT_INTEGERS,
    CT_NVFP4,
    CT_NVFP4_A16,
    GPTQ,
    AWQ_ELSEWHERE,
    AWQ_TRITON,
    AWQ,
    QUARK_MXFP4,
    QUARK_FP8,
)

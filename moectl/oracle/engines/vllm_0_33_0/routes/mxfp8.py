"""MXFP8: the routes of ModelOpt, ``mxfp8``, compressed-tensors and Quark checkpoints."""

from dataclasses import replace

from .....problem.moe_problem import MoEProblem
from .....problem.schemes import MXFP8_ACT, ActFormat
from ....backend import SupportQuery, but, only
from ....decision import Candidate
from ....route import DECLARED_ACT, LateFailure, Order, Route
from ..backends import aiter, deep_gemm, emulation, triton, trtllm_fp8, xpu
from ..backends.humming import HUMMING
from ..backends.marlin import MARLIN
from .order import HUMMING_FIRST

_GROUP = 32


def _mxfp8(problem: MoEProblem, invariant: bool) -> ActFormat:
    """MXFP8, which the method requests whatever the checkpoint declares."""
    return MXFP8_ACT


def _crosses(ask: SupportQuery, chosen: Candidate | None) -> bool:
    dims = chosen.dims if chosen else ask.problem.dims
    return bool(dims.padded_hidden % _GROUP or dims.padded_intermediate % _GROUP)


_WHOLE_GROUPS = LateFailure(
    "scale groups",
    _crosses,
    lambda ask, chosen: (
        f"MXFP8 needs hidden and intermediate sizes in multiples of {_GROUP}; "
        f"one rank has {ask.problem.dims.hidden} and {ask.problem.dims.intermediate}"
    ),
    kind="ValueError",
    sized=True,
)
_MODELOPT = Route(
    name="MXFP8 of ModelOpt",
    method="ModelOptMxFp8FusedMoE",
    storages=only("modelopt"),
    weights=frozenset({"mxfp8"}),
    act=DECLARED_ACT,
    declares=_mxfp8,
    orders=(
        Order(
            (
                trtllm_fp8.TRTLLM_FP8,
                deep_gemm.DEEP_GEMM_MXFP8,
                MARLIN,
                xpu.XPU_FP8,
                aiter.AITER_MXFP8,
                HUMMING,
                triton.TRITON_MXFP8,
                emulation.EMULATION_MXFP8,
            )
        ),
    ),
    moves=(HUMMING_FIRST,),
    names={
        "flashinfer_trtllm": (trtllm_fp8.TRTLLM_FP8,),
        "deep_gemm": (deep_gemm.DEEP_GEMM_MXFP8,),
        "marlin": (MARLIN,),
        "xpu": (xpu.XPU_FP8,),
        "aiter": (aiter.AITER_MXFP8,),
        "triton": (triton.TRITON_MXFP8,),
        "humming": (HUMMING,),
    },
    platforms=but("xpu"),
    minimum=80,
    dtypes=only("bf16"),
    late_failures=(_WHOLE_GROUPS,),
    fails="ValueError",
)
_NAMED = replace(
    _MODELOPT,
    name="MXFP8 under its own name",
    storages=only("fp8", "mxfp8"),
    platforms=but(),
)
_COMPRESSED = replace(
    _MODELOPT,
    name="MXFP8 of compressed-tensors",
    method="CompressedTensorsW8A8Mxfp8MoEMethod",
    storages=only("compressed-tensors"),
    platforms=but(),
    minimum=70,
    dtypes=but(),
    late_failures=(),
)
_QUARK = replace(
    _MODELOPT,
    name="MXFP8 of Quark",
    method="QuarkW8A8Mxfp8MoEMethod",
    storages=only("quark"),
    minimum=70,
    dtypes=only("bf16", "fp16"),
)

ROUTES = (_MODELOPT, _NAMED, _COMPRESSED, _QUARK)

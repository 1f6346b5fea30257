"""What the engine assumes of a backend that says nothing else: activations, exchanges, sizes for MXFP4.

Activation functions are in the engine's spelling: ``swigluoai`` is the gpt-oss function over interleaved
gate and up rows, ``swigluoai_uninterleave`` the same over concatenated ones; ``_no_mul`` marks functions
without a gate.
"""

from .....problem.moe_problem import Align
from ....backend import ParallelSupport, WeightForm, but, only
from ....gpu_archs import ROCM

SHARED = only(
    "silu",
    "gelu",
    "gelu_tanh",
    "situ",
    "swigluoai",
    "swigluoai_uninterleave",
    "swiglustep",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
)
"""Activation functions of the separate activation kernel between the two GEMMs."""


NO_NVLINK_EXCHANGE = ParallelSupport(
    exchange=but("flashinfer_nvlink_two_sided", "flashinfer_all2allv", "flashinfer_nvlink_one_sided")
)
NO_TWO_SIDED_EXCHANGE = ParallelSupport(exchange=but("flashinfer_nvlink_two_sided", "flashinfer_all2allv"))


def mxfp4_forms(layout: str) -> tuple[WeightForm, ...]:
    """What MXFP4 weights are padded to, for layouts without their own padding rule."""
    mxfp4 = frozenset({"mxfp4"})
    return (
        WeightForm(layout, Align(256, 256), where=(ROCM,), weights=mxfp4),
        WeightForm(layout, Align(1, 64), weights=mxfp4),
    )

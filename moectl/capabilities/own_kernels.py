"""What moectl's own kernels support."""

from __future__ import annotations

from ..problem.moe_problem import MoEProblem
from ..problem.schemes import (
    A16,
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    INT8_ACT_TOKEN,
    MXFP4,
    MXFP8,
    NVFP4,
    ActFormat,
    int_format,
)
from .kernel_support import KernelSupport, WeightSupport, integers

GATED = ("silu", "swigluoai", "swiglustep", "gelu_tanh", "situ")
UNGATED = ("relu2",)
"""Activation functions of moectl's device code, which is also used with the GEMMs of other projects."""

TILES = "moectl-mtile64"
"""The layout of formats that kernels decode in tiles; weights of the others are read in rows."""

ROW_FORMATS = ("bf16", "fp8")
"""Names of weight formats that are always read in rows; those of 16 bits are of the model's dtype."""

TRITON = KernelSupport(
    (
        WeightSupport((int_format(8, FULL),), "moectl-int8", acts=(INT8_ACT_TOKEN,), own_scales=True),
        WeightSupport((int_format(4, 128),), "moectl-int4", acts=(INT8_ACT_TOKEN,), own_scales=True),
        WeightSupport((MXFP4, NVFP4, MXFP8, *integers(4), *integers(8)), TILES, any_act=True),
        WeightSupport((BF16,), "moectl-bf16"),
        WeightSupport(
            (FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR),
            "moectl-fp8",
            acts=(A16, FP8_ACT_GROUP_128, FP8_ACT_TOKEN, FP8_ACT_TENSOR, FP8_ACT_TENSOR_STATIC),
            own_scales=True,
        ),
    ),
    gated=GATED,
    ungated=UNGATED,
    scales=frozenset(("E8M0", "BF16", "F16")),
)


def in_rows(problem: MoEProblem) -> bool:
    """Whether the kernels of `TRITON` read a layer's weights in rows; else in tiles.

    Integers are if tokens are INT8.
    """
    return problem.scheme.weight.name in ROW_FORMATS or token_format(problem) == INT8_ACT_TOKEN


def token_format(problem: MoEProblem) -> ActFormat | None:
    """The format to which the kernels of `TRITON` quantize what enters each GEMM of a layer; None for 16-bit
    tokens."""
    act = TRITON.act_of(problem.scheme)
    return act if act is not None and act.bits == 8 else None


def act_used(problem: MoEProblem) -> str:
    """`token_format` as text: ``fp8 dynamic``, or ``a16`` if tokens stay in 16 bits, whatever is declared."""
    return str(token_format(problem) or A16)


TRITON_MARLIN = KernelSupport(
    (WeightSupport(integers(4), "marlin-int4"),),
    gated=GATED,
    ungated=UNGATED,
    scales=frozenset(("BF16", "F16")),
)
TORCH_PLATFORMS = {"cuda": "cuda", "rocm": "cuda", "cpu": "cpu"}
"""Platforms of the plain torch backends, by torch's device type. They support every weight format."""

"""OpenAI's triton_kernels on Hopper: MXFP4 with 16-bit activations.

Stored per expert, with N rows and K columns, row-major (the kernel sees the transposed view):

- weights ``[Np / 4, 2 * K']`` bytes: Np is N rounded up to a multiple of 16, K' is K to one of 64;
- scales ``[Np / 32, 32 * Gp]`` E8M0 bytes: Np is N rounded up to a multiple of 32 * warps, Gp is K / 32
  to one of 4;
- biases ``[N]`` F32.

`w13` rows are gate0, up0, gate1, ... Padding inside the tiles is zero.
"""

from __future__ import annotations

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import MXFP4
from ..canonical import in_pairs, padded
from ..steps.transforms import Pad, Rearrange, Step, Widen
from .weight_layout import WeightLayout, by_role, round_up
from .word_orders import BYTES, E2M1_SHIFTED, WORDS

WARPS = 8
"""Warps of the kernel, on which the order of the scales depends; engines use 8."""


def value_steps(rows: int, columns: int) -> tuple[Step, ...]:
    """Steps for weights ``[e, rows, columns]`` bytes."""
    return (
        Pad(1, round_up(rows, 16)),
        Pad(2, round_up(columns, 32)),
        Rearrange(
            "e (n wn tn sn) (k kt wk tk) -> e (n tn) (k sn tk kt wk wn)",
            {"wn": 2, "tn": 4, "sn": 2, "kt": 4, "wk": 2, "tk": 4},
        ),
        WORDS,
        E2M1_SHIFTED,
        BYTES,
    )


def scale_steps(rows: int, groups: int, warps: int = WARPS) -> tuple[Step, ...]:
    """Steps for scales ``[e, rows, groups]`` that kernels of `warps` warps read."""
    return (
        Pad(1, round_up(rows, 32 * warps)),
        Pad(2, round_up(groups, 4)),
        Rearrange("e (m a w b c) (k d) -> e (m w) (k a c d b)", {"a": 2, "w": warps, "b": 2, "c": 8, "d": 2}),
    )


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    dims = problem.dims
    rows, k = (
        (2 * dims.padded_intermediate, dims.padded_hidden)
        if role.startswith("w13")
        else (dims.padded_hidden, dims.padded_intermediate)
    )
    start = (*padded(problem, role), *in_pairs(problem, role))
    if role.endswith("_bias"):
        return (*start, Widen(MODEL_DTYPES[problem.dtype]))
    if role.endswith("_scale"):
        return (*start, *scale_steps(rows, k // 32))
    return (*start, *value_steps(rows, k // 2))


TRITON_HOPPER = WeightLayout(
    name="triton-hopper",
    version=1,
    weights=(MXFP4,),
    build=by_role(_mxfp4),
    logical_dtypes={"w13": "F4", "w2": "F4", "w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"},
    scale_dtypes=("U8",),
    ungated=False,
)

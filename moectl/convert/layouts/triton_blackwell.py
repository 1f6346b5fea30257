"""OpenAI's triton_kernels on Blackwell: MXFP4 with 16-bit activations.

Stored per expert, with N rows and K columns, row-major (the kernel sees the transposed weights):

- weights ``[N, Kp]`` bytes: Kp is K / 2 rounded up to a multiple of 128;
- scales ``[Np / 128, Gp / 4, 2, 256]`` E8M0 bytes in 128 x 4 tiles: Np is N rounded up to a multiple of
  128, Gp is K / 32 to one of 8; the kernel reads those of all experts as one matrix of tiles;
- biases ``[N]`` F32.

`w13` rows are gate0, up0, gate1, ... Padding inside the tiles is zero.
"""

from __future__ import annotations

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import MXFP4
from ..canonical import halves, in_pairs, padded
from ..steps.transforms import Pad, Rearrange, Step, Widen
from .weight_layout import WeightLayout, by_role, round_up


def value_steps(columns: int) -> tuple[Step, ...]:
    """Steps for weights ``[e, rows, columns]`` bytes."""
    return (Pad(2, round_up(columns, 128)),)


def scale_steps(rows: int, groups: int) -> tuple[Step, ...]:
    """Steps for scales ``[e, rows, groups]``."""
    return (
        Pad(1, round_up(rows, 128)),
        Pad(2, round_up(groups, 8)),
        Rearrange("e (nb i a j) (kb k) -> e nb kb a (j i k)", {"i": 4, "a": 2, "j": 16, "k": 4}),
    )


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    dims = problem.dims
    sizes = (dims.padded_intermediate, dims.padded_hidden)
    n, k = sizes if role.startswith("w13") else sizes[::-1]
    start = (*padded(problem, role), *in_pairs(problem, role))
    if role.endswith("_bias"):
        return (*start, Widen(MODEL_DTYPES[problem.dtype]))
    if role.endswith("_scale"):
        return (*start, *scale_steps(halves(problem, role) * n, k // 32))
    return (*start, *value_steps(k // 2))


TRITON_BLACKWELL = WeightLayout(
    name="triton-blackwell",
    version=1,
    weights=(MXFP4,),
    build=by_role(_mxfp4),
    logical_dtypes={"w13": "F4", "w2": "F4", "w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"},
    scale_dtypes=("U8",),
    ungated=False,
)

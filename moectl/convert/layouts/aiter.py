"""AITER's layouts for AMD GPUs, which its CK and FlyDSL kernels read: BF16, FP8, MXFP4 and MXFP8.

From vLLM's and AITER's source code; never run on an AMD GPU by moectl. Stored per expert, with N rows and K
columns of the padded matrix:

- weights with the shape that they had, in tiles of 16 rows by 32 elements (of packed MXFP4: bytes), and a
  tile in pieces of 16 bytes, all rows of the first piece first. MXFP8, and MXFP4 with 16-bit activations, in
  tiles of 16 rows by 64 bytes, of `w13` one of gates and one of ups in turn;
- MX scales ``[N, groups]``, groups filled up to 8, in tiles of 32 rows by 8 groups, where two rows and two
  groups 4 apart are together. The rows are 16 apart, or a gate and its up where tiles are in turn. What is
  added is one in the second case, and zero in the first, where AITER leaves it undefined;
- FP8 scales unchanged; per tensor ``[e]`` F32;
- biases of MXFP4 in F32.

`w13` is all gates, then all ups; with MXFP4 activations rows keep the checkpoint's order.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, MXFP8
from ..canonical import gates_first, groups, halves, padded
from ..recipe.recipe import StoredOutput
from ..steps.transforms import Pad, Rearrange, Step, Widen
from ..steps.value_steps import Shapes
from .marlin import reduction
from .scaled_tensors import E4M3_WEIGHTS, E8M0_SCALES, F4_WEIGHTS, FLOAT_DTYPES, fp8_tensor
from .weight_layout import WeightLayout, by_role, round_up

_ONE = 127


def _row_of_bytes(problem: MoEProblem, role: str) -> int:
    """Elements of a stored row of weights: packed codes count as bytes."""
    return reduction(problem, role) * min(problem.scheme.weight.bits, 8) // 8


def _kept_shape(steps: Rearrange, columns: int) -> tuple[Step, ...]:
    return (steps, Rearrange("e (n k) -> e n k", {"k": columns}))


def _tiles(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """``shuffle_weight(layout=(16, 16))``."""
    piece = 8 if problem.scheme.weight.bits == 16 else 16
    tiles = Rearrange("e (n r) (k c b) -> e (n k c r b)", {"r": 16, "c": 32 // piece, "b": piece})
    return _kept_shape(tiles, _row_of_bytes(problem, role))


def _tiles_in_turn(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """``shuffle_weight(is_guinterleave=True)``: gates and ups alternate by tiles."""
    sizes = {"s": halves(problem, role), "r": 16, "c": 4, "b": 16}
    return _kept_shape(Rearrange("e (s n r) (k c b) -> e (n s k c r b)", sizes), _row_of_bytes(problem, role))


def _scales(problem: MoEProblem, role: str, *, in_turn: bool) -> tuple[Step, ...]:
    """``shuffle_scale``; `in_turn`: a gate and its up are together (``is_guinterleave``)."""
    columns = groups(problem.scheme.weight, reduction(problem, role))
    full = round_up(columns, 8)
    fill: tuple[Step, ...] = (Pad(2, full, _ONE if in_turn else 0),) if full > columns else ()
    of_gate = in_turn and halves(problem, role) == 2
    rows = "(s n r)" if of_gate else "(n s r)"
    tiles = Rearrange(f"e {rows} (k p c) -> e (n k c r p s)", {"s": 2, "r": 16, "p": 2, "c": 4})
    return (*fill, *_kept_shape(tiles, full))


def _bf16(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    tiles = () if role.endswith("_bias") else _tiles(problem, role)
    return (*gates_first(problem, role), *tiles)


def _fp8_steps(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    tiles = _tiles(problem, role) if role in ("w13", "w2") else ()
    return (*gates_first(problem, role), *tiles)


def _fp8(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    if problem.scheme.weight == FP8_TENSOR:
        return fp8_tensor(_fp8_steps)(problem, shapes, requantize)
    return by_role(_fp8_steps)(problem, shapes, requantize)


def _wide_bias(problem: MoEProblem) -> tuple[Step, ...]:
    return (Widen(MODEL_DTYPES[problem.dtype]),)


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    start = gates_first(problem, role)
    if role.endswith("_bias"):
        return (*start, *_wide_bias(problem))
    steps = _scales(problem, role, in_turn=True) if role.endswith("_scale") else _tiles_in_turn(problem, role)
    return (*start, *steps)


def _mxfp4_by_mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    start = padded(problem, role)
    if role.endswith("_bias"):
        return (*start, *_wide_bias(problem))
    steps = _scales(problem, role, in_turn=False) if role.endswith("_scale") else _tiles(problem, role)
    return (*start, *steps)


def _mxfp8(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    start = gates_first(problem, role)
    if role.endswith("_scale"):
        return (*start, *_scales(problem, role, in_turn=role.startswith("w13")))
    return (*start, *_tiles_in_turn(problem, role))


AITER: tuple[WeightLayout, ...] = (
    WeightLayout("aiter-bf16", 1, (BF16,), by_role(_bf16), ungated=False),
    WeightLayout(
        "aiter-fp8",
        1,
        (FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK),
        _fp8,
        E4M3_WEIGHTS,
        FLOAT_DTYPES,
        bias=False,
        ungated=False,
    ),
    WeightLayout(
        "aiter-mxfp4", 1, (MXFP4,), by_role(_mxfp4), F4_WEIGHTS | E8M0_SCALES, ("U8",), ungated=False
    ),
    WeightLayout(
        "aiter-mxfp4-act-mxfp4",
        1,
        (MXFP4,),
        by_role(_mxfp4_by_mxfp4),
        F4_WEIGHTS | E8M0_SCALES,
        ("U8",),
        ungated=False,
    ),
    WeightLayout(
        "aiter-mxfp8",
        1,
        (MXFP8,),
        by_role(_mxfp8),
        E4M3_WEIGHTS | E8M0_SCALES,
        ("U8",),
        bias=False,
        ungated=False,
    ),
)

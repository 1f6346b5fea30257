"""Canonical expert tensors: the common form of all checkpoint formats and weight layouts.

Each role is one tensor of a batch of experts, experts first:

- ``w13``, ``w2``: gate and up rows in the order of `MoEProblem.rows`, and the down projection. 4-bit codes
  are packed in pairs along the last axis, element 2j in the low nibble of byte j; 8-bit codes and E4M3
  numbers are bytes; 16-bit weights are floats. Integer codes are offset codes ``q + 2**(bits - 1)``.
- ``*_scale`` ``[e, rows, columns]``: one value per block of the format. Blocks of several rows, or a block of
  the whole matrix, do not span gate and up, and gate's come first: per tensor, `w13` has two scales.
  E8M0 and E4M3 scales are bytes.
- ``*_zero`` like ``*_scale``: zero points as codes, one per byte.
- ``*_global`` F32 ``[e, halves, 1]``: the factor on two-level scales (NVFP4), one for gate and one for up.
- ``*_input`` F32 ``[e, halves, 1]``: static scales of the input activations.
- ``*_bias`` ``[e, rows]``.
"""

from __future__ import annotations

import math

from ..dtypes import MODEL_DTYPES
from ..errors import NoBackend
from ..files.tensor_table import TensorType
from ..problem.moe_problem import MoEProblem
from ..problem.schemes import FULL, WeightFormat
from .steps.transforms import Flip, Pad, Rearrange, Step

INTERLEAVED, CONCATENATED = "interleaved", "concatenated"


def halves(problem: MoEProblem, role: str) -> int:
    """Number of matrices stacked in `role`: 2 (gate and up) for ``w13`` of gated experts, otherwise 1."""
    return 2 if role.startswith("w13") and problem.activation.gated else 1


def scale_dtype(problem: MoEProblem) -> str:
    """Storage dtype of canonical scales: U8 for E8M0 and E4M3, otherwise the format's, or the model's."""
    weight = problem.scheme.weight
    if weight.number.byte_scale or weight.scale_dtype == "E8M0":
        return "U8"
    return weight.scale_dtype or MODEL_DTYPES[problem.dtype]


def byte_scales(problem: MoEProblem) -> str:
    """The number format of canonical scales that are bytes: ``E8M0`` or ``F8_E4M3``."""
    return problem.scheme.weight.number.byte_scale or "E8M0"


def groups(weight: WeightFormat, k: int) -> int:
    """Number of scales along a reduction axis of `k` weights."""
    return 1 if weight.group == FULL else math.ceil(k / weight.group)


def scale_rows(weight: WeightFormat, n: int) -> int:
    """Number of scales along `n` rows of one matrix."""
    return 1 if weight.block[0] == FULL else math.ceil(n / weight.block[0])


def has_input_scales(problem: MoEProblem) -> bool:
    """True when the scheme's activations have static scales."""
    act = problem.scheme.act
    return act.number.global_scale or (act.bits < 16 and not act.dynamic)


def canonical_shapes(problem: MoEProblem, experts: int, inputs: bool | None = None) -> dict[str, TensorType]:
    """Storage dtype and shape of every canonical role of `problem`, for a batch of `experts`.

    Sizes are the logical ones. `inputs` says whether there are static activation scales; by default the
    scheme decides. Raises NoBackend when sizes are not whole groups.

    Example:
        >>> from moectl.problem.moe_problem import Dims, MoEProblem
        >>> from moectl.problem.schemes import MXFP4, Scheme
        >>> problem = MoEProblem(Dims(128, 64), 4, 2, Scheme(MXFP4))
        >>> for role, (dtype, shape) in canonical_shapes(problem, 4).items():
        ...     print(role, dtype, shape)
        w13 U8 (4, 128, 64)
        w13_scale U8 (4, 128, 4)
        w2 U8 (4, 128, 32)
        w2_scale U8 (4, 128, 2)
    """
    hidden, inter, weight = problem.dims.hidden, problem.dims.intermediate, problem.scheme.weight
    _check_groups(problem)
    with_inputs = has_input_scales(problem) if inputs is None else inputs
    dtype = "U8" if weight.bits <= 8 else MODEL_DTYPES[problem.dtype]
    shapes: dict[str, TensorType] = {}
    for role, n, k in (("w13", inter, hidden), ("w2", hidden, inter)):
        stacked = halves(problem, role)
        shapes[role] = TensorType(dtype, (experts, stacked * n, k * min(weight.bits, 8) // 8))
        if weight.block != (0, 0):
            blocks = (experts, stacked * scale_rows(weight, n), groups(weight, k))
            shapes[f"{role}_scale"] = TensorType(scale_dtype(problem), blocks)
            if weight.zero_point:
                shapes[f"{role}_zero"] = TensorType("U8", blocks)
        if weight.number.global_scale:
            shapes[f"{role}_global"] = TensorType("F32", (experts, stacked, 1))
        if with_inputs:
            shapes[f"{role}_input"] = TensorType("F32", (experts, stacked, 1))
        if problem.bias:
            shapes[f"{role}_bias"] = TensorType(MODEL_DTYPES[problem.dtype], (experts, stacked * n))
    return shapes


def _check_groups(problem: MoEProblem) -> None:
    weight = problem.scheme.weight
    grouped = weight.block[0] == 1 and weight.group > 0
    unit = math.lcm(8 // weight.bits if weight.bits < 8 else 1, weight.group if grouped else 1)
    for name, size in (("hidden", problem.dims.hidden), ("intermediate", problem.dims.intermediate)):
        if size % unit:
            raise NoBackend(
                f"{name} size {size} is not a whole number of groups of {unit} weights, as {weight} needs.",
                hint="Slice the layer in whole groups: choose another --tp.",
            )


def padded(problem: MoEProblem, role: str, fill: int = 0, every_row: bool = False) -> tuple[Step, ...]:
    """Steps that pad canonical `role` with `fill` to the padded sizes, in the same row order.

    Each half of concatenated `w13` is padded at its end; interleaved `w13` at the end of the pairs. Roles
    with one value per matrix need no padding. `every_row`: scales of blocks of rows have been repeated
    for every row.
    """
    dims, weight = problem.dims, problem.scheme.weight
    kind = role.partition("_")[2]
    if kind in ("global", "input"):
        return ()
    n, k = (dims.intermediate, dims.hidden), (dims.padded_intermediate, dims.padded_hidden)
    (rows, columns), (full_rows, full_columns) = (n, k) if role.startswith("w13") else (n[::-1], k[::-1])
    steps: list[Step] = []
    if kind in ("scale", "zero") and not every_row:
        rows, full_rows = (scale_rows(weight, size) for size in (rows, full_rows))
    tail = "" if kind == "bias" else " k"
    order = row_order(problem, role)
    if every_row and halves(problem, role) == 2 and order != problem.rows:
        steps.append(Rearrange(f"e (s n){tail} -> e (n s){tail}", {"s": 2}))
        order = problem.rows
    if full_rows > rows:
        if halves(problem, role) == 2 and order == CONCATENATED:
            steps += [
                Rearrange(f"e (s n){tail} -> e s n{tail}", {"s": 2}),
                Pad(2, full_rows, fill),
                Rearrange(f"e s n{tail} -> e (s n){tail}"),
            ]
        else:
            steps.append(Pad(1, halves(problem, role) * full_rows, fill))
    if kind != "bias":
        before, after = (_columns(weight, kind, size) for size in (columns, full_columns))
        if after > before:
            steps.append(Pad(2, after, fill))
    return tuple(steps)


def row_order(problem: MoEProblem, role: str) -> str:
    """The order of a canonical role's rows; scales of blocks of rows are always concatenated, gate first."""
    of_blocks = role.endswith(("_scale", "_zero")) and problem.scheme.weight.block[0] != 1
    return CONCATENATED if of_blocks or halves(problem, role) == 1 else problem.rows


def _columns(weight: WeightFormat, kind: str, k: int) -> int:
    """Elements of a row of `k` weights in a canonical role of `kind`."""
    if kind:
        if weight.block[0] == 1 and weight.group > 0 and k % weight.group:
            raise NoBackend(f"padded size {k} is not a whole number of groups of {weight.group} weights.")
        return groups(weight, k)
    if k * weight.bits % 8:
        raise NoBackend(f"padded size {k} is not a whole number of bytes.")
    return k * weight.bits // 8 if weight.bits < 8 else k


def gate_then_up(problem: MoEProblem, role: str) -> tuple[Rearrange, ...]:
    """Steps that order padded `w13` rows all gates, then all ups; none for other roles."""
    if row_order(problem, role) == CONCATENATED:
        return ()
    tail = "" if role.endswith("_bias") else " k"
    return (Rearrange(f"e (n s){tail} -> e (s n){tail}", {"s": 2}),)


def gates_first(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Steps that pad a canonical tensor and order rows of `w13` all gates, then all ups."""
    return (*padded(problem, role), *gate_then_up(problem, role))


def up_then_gate(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Steps that order padded `w13` rows all ups, then all gates; none for other roles."""
    if halves(problem, role) == 1:
        return ()
    return (*gate_then_up(problem, role), Flip(1))


def in_pairs(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Steps that order padded `w13` rows gate0, up0, gate1, up1, ...; none for other roles."""
    if halves(problem, role) == 1 or row_order(problem, role) == INTERLEAVED:
        return ()
    tail = "" if role.endswith("_bias") else " k"
    return (Rearrange(f"e (s n){tail} -> e (n s){tail}", {"s": 2}),)

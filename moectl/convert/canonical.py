"""Canonical expert tensors: the form between every checkpoint format and every weight layout.

One role is one tensor of a batch of experts, experts first:

- ``w13``, ``w2``: gate and up rows in the order of `MoEProblem.rows`, and the down projection. 4-bit codes
  lie two to a byte along the last axis, element 2j in the low nibble of byte j; 8-bit codes and E4M3
  numbers are bytes; 16-bit weights are what they are. Int codes are offset codes ``q + 2**(bits - 1)``.
- ``*_scale`` ``[e, rows, columns]``: one value per block of the format. Blocks of several rows, or one for
  the whole matrix, are counted in gate and in up by themselves, gate first: per tensor, `w13` has two.
  E8M0 scales and E4M3 ones are bytes.
- ``*_zero`` like ``*_scale``: codes of zero, one to a byte.
- ``*_global`` F32 ``[e, halves, 1]``: the factor on two-level scales (NVFP4's), one for gate and one for up.
- ``*_input`` F32 ``[e, halves, 1]``: static scales of the activations that enter.
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
    """Matrices that are stacked in `role`: gate and up in that of gated experts, else one."""
    return 2 if role.startswith("w13") and problem.activation.gated else 1


def scale_dtype(problem: MoEProblem) -> str:
    """Storage dtype of the canonical scales: bytes for E8M0 and E4M3 ones, else stated or the model's."""
    weight = problem.scheme.weight
    if weight.number.byte_scale or weight.scale_dtype == "E8M0":
        return "U8"
    return weight.scale_dtype or MODEL_DTYPES[problem.dtype]


def byte_scales(problem: MoEProblem) -> str:
    """What canonical scales that are bytes mean, as codecs spell it."""
    return problem.scheme.weight.number.byte_scale or "E8M0"


def groups(weight: WeightFormat, k: int) -> int:
    """Scales along a reduction axis of `k` weights."""
    return 1 if weight.group == FULL else math.ceil(k / weight.group)


def scale_rows(weight: WeightFormat, n: int) -> int:
    """Scales along `n` rows of one matrix."""
    return 1 if weight.block[0] == FULL else math.ceil(n / weight.block[0])


def has_input_scales(problem: MoEProblem) -> bool:
    """True when the scheme's activations have scales that are known ahead."""
    act = problem.scheme.act
    return act.number.global_scale or (act.bits < 16 and not act.dynamic)


def canonical_shapes(problem: MoEProblem, experts: int, inputs: bool | None = None) -> dict[str, TensorType]:
    """Shape and storage dtype of every canonical role of `problem`, for a batch of `experts`.

    Sizes are the logical ones; `inputs` says whether there are static scales of activations, where the
    scheme alone does not decide. Raises NoBackend when sizes are not whole groups.
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
    """Steps that pad canonical `role` with `fill` to the padded sizes; row order and meaning stay.

    Of concatenated `w13` each half is padded by itself; of interleaved only the end, so that pairs
    stay pairs. Roles of one value per matrix have nothing to pad. `every_row`: scales of blocks of rows
    were repeated before, so that there is one for each row.
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
    """The order of a canonical role's rows: scales of blocks of rows have all of gate's first."""
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
    """Padded `w13` rows with all gates first, then all ups; nothing to do for other roles."""
    if row_order(problem, role) == CONCATENATED:
        return ()
    tail = "" if role.endswith("_bias") else " k"
    return (Rearrange(f"e (n s){tail} -> e (s n){tail}", {"s": 2}),)


def up_then_gate(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded `w13` rows with all ups first, then all gates; nothing to do for other roles."""
    if halves(problem, role) == 1:
        return ()
    return (*gate_then_up(problem, role), Flip(1))


def in_pairs(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded `w13` rows as gate0, up0, gate1, up1, ...; nothing to do for other roles."""
    if halves(problem, role) == 1 or row_order(problem, role) == INTERLEAVED:
        return ()
    tail = "" if role.endswith("_bias") else " k"
    return (Rearrange(f"e (s n){tail} -> e (n s){tail}", {"s": 2}),)

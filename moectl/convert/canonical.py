"""Canonical expert tensors: the form between every checkpoint format and every weight layout.

One role is one tensor of a batch of experts, experts first: `w13` holds the gate and up rows in the
order of `MoEProblem.rows`, `w2` the down projection. 4-bit codes lie two to a byte along the last
axis, element 2j in the low nibble of byte j; int codes are offset codes ``q + 2**(bits - 1)``.
"""

from __future__ import annotations

import math

from ..errors import NoBackend
from ..problem import MoEProblem
from ..schemes import FULL, WeightFormat
from .transforms import Pad, Rearrange, Shape, Step

INTERLEAVED, CONCATENATED = "interleaved", "concatenated"

MODEL_DTYPE = {"bf16": "BF16", "fp16": "F16"}


def scale_dtype(problem: MoEProblem) -> str:
    """The storage dtype of the canonical scales: bytes for MX formats, else as stated, else the model's."""
    weight = problem.scheme.weight
    if weight.name.startswith("mx"):
        return "U8"
    return weight.scale_dtype or MODEL_DTYPE[problem.dtype]


def groups(weight: WeightFormat, k: int) -> int:
    """Scales along a reduction axis of `k` weights."""
    return 1 if weight.group == FULL else k // weight.group


def canonical_shapes(problem: MoEProblem, experts: int) -> dict[str, tuple[Shape, str]]:
    """Shape and storage dtype of every canonical role of `problem`, for a batch of `experts`.

    Sizes are the logical ones. Raises NoBackend when they are not whole groups.
    """
    hidden, inter, weight = problem.dims.hidden, problem.dims.intermediate, problem.scheme.weight
    unit = math.lcm(8 // weight.bits if weight.bits < 8 else 1, 1 if weight.group == FULL else weight.group)
    for name, size in (("hidden", hidden), ("intermediate", inter)):
        if size % unit:
            raise NoBackend(
                f"{name} size {size} is not a whole number of groups of {unit} weights, as {weight} needs.",
                hint="Slice the layer in whole groups: choose another --tp.",
            )
    scales = scale_dtype(problem)
    rows = inter * (2 if problem.activation.gated else 1)
    shapes: dict[str, tuple[Shape, str]] = {}
    for role, n, k in (("w13", rows, hidden), ("w2", hidden, inter)):
        shapes[role] = ((experts, n, k * weight.bits // 8), "U8")
        shapes[f"{role}_scale"] = ((experts, n, groups(weight, k)), scales)
        if problem.bias:
            shapes[f"{role}_bias"] = ((experts, n), MODEL_DTYPE[problem.dtype])
    return shapes


def padded(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Steps that pad canonical `role` with zeros to the padded sizes; row order and meaning stay.

    Of concatenated `w13` each half is padded by itself; of interleaved only the end, so that pairs
    stay pairs.
    """
    steps: list[Step] = []
    dims, weight = problem.dims, problem.scheme.weight
    tail = "" if role.endswith("_bias") else " k"
    if role.startswith("w13"):
        columns, padded_columns = dims.hidden, dims.padded_hidden
        if dims.padded_intermediate > dims.intermediate:
            if problem.rows == CONCATENATED:
                steps += [
                    Rearrange(f"e (s n){tail} -> e s n{tail}", {"s": 2}),
                    Pad(2, dims.padded_intermediate),
                    Rearrange(f"e s n{tail} -> e (s n){tail}"),
                ]
            else:
                steps.append(Pad(1, 2 * dims.padded_intermediate))
    else:
        columns, padded_columns = dims.intermediate, dims.padded_intermediate
        if dims.padded_hidden > dims.hidden:
            steps.append(Pad(1, dims.padded_hidden))
    if tail and padded_columns > columns:
        per = _per_column(role, weight)
        if per and padded_columns % per:
            raise NoBackend(f"padded size {padded_columns} is not a whole number of groups of {per} weights.")
        if role.endswith("_scale"):
            if per:
                steps.append(Pad(2, padded_columns // per))
        else:
            steps.append(Pad(2, padded_columns * weight.bits // 8))
    return tuple(steps)


def _per_column(role: str, weight: WeightFormat) -> int:
    """Weights per column of a scale tensor; 0 when one scale holds for the whole axis."""
    if not role.endswith("_scale"):
        return 8 // weight.bits if weight.bits < 8 else 1
    return 0 if weight.group == FULL else weight.group


def gate_then_up(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded `w13` rows with all gates first, then all ups; nothing to do for other roles."""
    if not role.startswith("w13") or problem.rows == CONCATENATED:
        return ()
    tail = "" if role.endswith("_bias") else " k"
    return (Rearrange(f"e (n s){tail} -> e (s n){tail}", {"s": 2}),)


def in_pairs(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded `w13` rows as gate0, up0, gate1, up1, ...; nothing to do for other roles."""
    if not role.startswith("w13") or problem.rows == INTERLEAVED:
        return ()
    tail = "" if role.endswith("_bias") else " k"
    return (Rearrange(f"e (s n){tail} -> e (n s){tail}", {"s": 2}),)

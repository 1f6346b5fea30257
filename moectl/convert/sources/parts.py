"""The part that one stored tensor is: where its rows go and which steps lead there."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...checkpoint.tensors.storage import Storage
from ...problem import MoEProblem
from ...schemes import FULL
from ..canonical import MODEL_DTYPE, halves
from ..chain import Chain
from ..transforms import Shape, Step, Widen
from ..values import Value
from .forms import TRANSPOSED
from .numbers import Repeated, Rounded
from .packings import Packing
from .part import Part

PLACES: Mapping[str, tuple[str, int | None]] = {
    "w1": ("w13", 0),
    "w3": ("w13", 1),
    "w13": ("w13", None),
    "w2": ("w2", None),
}
"""Canonical role and half of its rows, by stored matrix."""

EXTRA_KINDS = frozenset(("shape", "order"))
"""Kinds of tensors that carry no weights."""

NUMBERS = frozenset(("global", "input"))
"""Kinds of one number a matrix, F32 in canonical form."""


def part_of(
    stored: str,
    dtype: str,
    shape: Shape,
    storage: Storage,
    packing: Packing,
    problem: MoEProblem,
    zeros_less_one: bool,
) -> Part:
    """The part of the tensors with role `stored`; `dtype` and `shape` are one expert's, as it is read."""
    matrix, _, kind = stored.partition("_")
    if _is_extra(kind, problem):
        return Part(stored, "")
    role, half = PLACES[matrix]
    role = f"{role}_{kind}" if kind else role
    weight = problem.scheme.weight
    steps = packing.steps(weight.bits, zeros_less_one).get(kind, ())
    if _is_transposed(storage, matrix, shape):
        steps = TRANSPOSED + steps
    dtype_steps, values = _dtype_change(kind, dtype, problem)
    values += packing.values.get(kind, ())
    single = kind in NUMBERS or (kind == "scale" and weight.block == (FULL, FULL))
    if single and half is None and halves(problem, role) == 2 and math.prod(shape) == 1:
        values += (Repeated(2),)
    return Part(stored, role, half, Chain((*steps, *dtype_steps)), values)


def _is_extra(kind: str, problem: MoEProblem) -> bool:
    """True for tensors that say nothing about the weights that the problem does not say."""
    zeros, bias = problem.scheme.weight.zero_point, problem.bias
    return kind in EXTRA_KINDS or (kind == "zero" and not zeros) or (kind == "bias" and not bias)


def _is_transposed(storage: Storage, matrix: str, shape: Shape) -> bool:
    """True for tensors of two axes with the reduction axis first where the usual form has it last."""
    if storage.arrangement == "flat":
        return matrix == "w2"
    return storage.arrangement == "fused_transposed" and len(shape) == 2


def _dtype_change(kind: str, dtype: str, problem: MoEProblem) -> tuple[tuple[Step, ...], tuple[Value, ...]]:
    """Steps and values from a float dtype to the one that the kind's canonical role has."""
    if kind in NUMBERS:
        target = "F32"
    elif kind == "bias" or (kind == "" and problem.scheme.weight.bits == 16):
        target = MODEL_DTYPE[problem.dtype]
    else:
        return (), ()
    if dtype == target:
        return (), ()
    if target == "F32":
        return (Widen(dtype),), ()
    return (), (Rounded(dtype, target),)

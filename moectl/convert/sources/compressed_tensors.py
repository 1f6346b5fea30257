"""compressed-tensors pack-quantized: one set of tensors per expert and projection, codes in I32 words.

A word holds 32 / bits consecutive codes of one row, the first in the low bits, so that the words of a
row, little-endian, are the bytes of the canonical packed row. `weight_shape` says ``[rows, columns]``
of the weights; it is checked and kept for the way back.
"""

from __future__ import annotations

from ...checkpoint.model import LayerGroup
from ...problem import MoEProblem
from ..chain import Chain
from ..transforms import View
from .part import Part
from .source import Source


def _refuse(problem: MoEProblem) -> str:
    weight = problem.scheme.weight
    if weight.name not in ("int4", "int8") or weight.zero_point:
        return f"pack-quantized experts are converted when they are symmetric int4 or int8, got {weight}"
    if problem.scheme.act.name == "int8":
        return "experts of int8 weights for int8 activations are stored unpacked and cannot be converted"
    if problem.act_order == "group":
        return "experts with activation order by group (g_idx) cannot be converted, only its static form"
    per_word = 32 // weight.bits
    if problem.dims.hidden % per_word or problem.dims.intermediate % per_word:
        return (
            f"{weight.name} words hold {per_word} codes, so hidden and intermediate sizes must be multiples "
            f"of {per_word}, got {problem.dims.hidden} and {problem.dims.intermediate}"
        )
    return ""


def _check_shape(part: Part, problem: MoEProblem, values: tuple[int, ...]) -> str:
    hidden, inter = problem.dims.hidden, problem.dims.intermediate
    expected = (hidden, inter) if part.stored == "w2_shape" else (inter, hidden)
    return "" if values == expected else f"says {list(values)}, but its weight is {list(expected)}"


_WORDS = Chain((View("I32", "U8"),))


def _parts(group: LayerGroup) -> tuple[Part, ...]:
    places = (("w1", "w13", 0), ("w3", "w13", 1), ("w2", "w2", None))
    return tuple(
        part
        for name, role, half in places
        if name in group.names.experts
        for part in (
            Part(name, role, half, _WORDS),
            Part(f"{name}_scale", f"{role}_scale", half),
            Part(f"{name}_shape", ""),
        )
    )


PACK_QUANTIZED = Source("compressed-tensors", _parts, _refuse, _check_shape)

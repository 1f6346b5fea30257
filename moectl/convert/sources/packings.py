"""How numbers lie in stored tensors, for every packing of `moectl.checkpoint.tensors.stored_formats`.

A packing is a row: the moving steps of each kind of tensor, for matrices whose reduction axis is last
unless the packing says otherwise, value steps, and what it cannot hold. Kinds are what a stored role
adds to its matrix: ``""`` (weights), ``scale``, ``zero``, ``global``, ``input``, ``bias``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...problem import MoEProblem
from ..transforms import Step, Xor
from ..values import Value
from .forms import (
    TRANSPOSED,
    WORDS_ALONG_K,
    WORDS_OF_K,
    awq_weights,
    awq_zeros,
    gptq_zeros,
    zeros_along_n,
)
from .numbers import Reciprocal

Steps = Mapping[str, tuple[Step, ...]]


@dataclass(frozen=True)
class Packing:
    """One row of `PACKINGS`.

    Attributes:
        steps: from the bits of a weight and whether zero points are stored less one, to the moving
            steps by kind of tensor.
        values: value steps by kind of tensor.
        whole_words: sizes must fill 32-bit words of codes.
        refuse: why a problem cannot be read; empty when it can.
    """

    steps: Callable[[int, bool], Steps] = lambda bits, less: {}
    values: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    whole_words: bool = False
    refuse: Callable[[MoEProblem], str] = lambda problem: ""


def _words(bits: int, less: bool) -> Steps:
    return {"": WORDS_ALONG_K, "zero": zeros_along_n(bits)}


def _gptq(bits: int, less: bool) -> Steps:
    return {"": WORDS_OF_K, "scale": TRANSPOSED, "zero": gptq_zeros(bits, less)}


def _awq(bits: int, less: bool) -> Steps:
    return {"": awq_weights(), "scale": TRANSPOSED, "zero": awq_zeros()}


def _only_four_bits(problem: MoEProblem) -> str:
    bits = problem.scheme.weight.bits
    return (
        "" if bits == 4 else f"AWQ orders words of 4-bit codes, and no order of {bits}-bit codes is published"
    )


def _two_level(problem: MoEProblem) -> str:
    return (
        "int4 experts with a scale per channel below one for the whole matrix (Quark int4-fp8) are made for "
        "one kernel on AMD GPUs, and no canonical form holds both scales"
    )


PACKINGS: Mapping[str, Packing] = {
    "rows": Packing(),
    "words": Packing(_words, whole_words=True),
    "gptq": Packing(_gptq, whole_words=True),
    "awq": Packing(_awq, whole_words=True, refuse=_only_four_bits),
    "signed": Packing(lambda bits, less: {"": (Xor(0x80),)}),
    "divisors": Packing(values={"global": (Reciprocal(),), "input": (Reciprocal(),)}),
    "two_level": Packing(refuse=_two_level),
}
"""Every packing by its name in `Format.packing`."""

"""Steps from the packed forms of checkpoints to canonical roles, for tensors with the experts first.

Undoing the same steps packs again. Words are int32, little endian, 32 / bits codes to a word. Sizes are
whole words; a checkpoint that fills up its last word has sizes that its source refuses.
"""

from __future__ import annotations

from ..transforms import Add, Codes, Rearrange, Step, View

_BYTES = View("I32", "U8")
_AWQ_COLUMNS = {"p": 2, "q": 4}
"""Nibble 4p + q of an AWQ word is column 2q + p of its eight."""

TRANSPOSED: tuple[Step, ...] = (Rearrange("e k n -> e n k"),)
"""``[e, k, n]`` with the reduction axis first, and scales ``[e, groups, n]``, as ``[e, n, k]``."""

WORDS_ALONG_K: tuple[Step, ...] = (_BYTES,)
"""Words ``[e, n, k / per word]``, first code in the low bits, as packed rows."""

WORDS_OF_K: tuple[Step, ...] = (Rearrange("e w n -> e n w"), _BYTES)
"""GPTQ ``qweight``: words ``[e, k / per word, n]``, each of consecutive k of one column, as packed rows."""


def zeros_along_n(bits: int) -> tuple[Step, ...]:
    """compressed-tensors zero points: words ``[e, n / per word, groups]`` to codes ``[e, n, groups]``."""
    return (Rearrange("e w g -> e g w"), *gptq_zeros(bits))


def gptq_zeros(bits: int, one_less: bool = False) -> tuple[Step, ...]:
    """GPTQ ``qzeros``: words ``[e, groups, n / per word]`` to codes ``[e, n, groups]``.

    `one_less`: the first version of the format, which stores a zero point less one.
    """
    shift = (Add(1),) if one_less else ()
    return (_BYTES, *_codes(bits), Rearrange("e g n -> e n g"), *shift)


def awq_weights() -> tuple[Step, ...]:
    """AWQ ``qweight``: words ``[e, k, n / 8]`` in AWQ's nibble order to packed rows ``[e, n, k / 2]``."""
    columns = Rearrange("e k (j p q) -> e (j q p) k", _AWQ_COLUMNS)
    return (_BYTES, Codes(4, True), columns, Codes(4, False))


def awq_zeros() -> tuple[Step, ...]:
    """AWQ ``qzeros``: words ``[e, groups, n / 8]`` in AWQ's nibble order to codes ``[e, n, groups]``."""
    return (_BYTES, Codes(4, True), Rearrange("e g (j p q) -> e (j q p) g", _AWQ_COLUMNS))


def _codes(bits: int) -> tuple[Step, ...]:
    return () if bits == 8 else (Codes(bits, True),)

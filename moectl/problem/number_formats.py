"""Number formats of expert weights and activations, one record each.

A record has only the properties that hold for a format everywhere. How an engine, layout or kernel uses a
format is described there; how file formats and configs spell it, in `moectl.checkpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..dtypes import DTYPE_BITS
from ..errors import NoBackend


@dataclass(frozen=True, slots=True)
class CodeGrid:
    """The values that codes represent before scaling; `moectl.convert.codecs` encodes and decodes them.

    Attributes:
        name: ``E4M3`` or ``E2M1`` for small floats, ``INT8`` or ``INT4`` for offset integers, and ``BF16``
            for unquantized 16-bit numbers.
        bits: bits per code.
        dtype: safetensors dtype of codes that have one; ``U8`` for all others.
        largest: largest magnitude of a quantized activation's code.
        rms: root mean square of the values of uniformly random codes; 0 if some of them are NaN.
        matrix_unit: the narrowest matrix unit that multiplies such activations, ``fp4``, ``fp8`` or
            ``bf16``; empty if no rate is known.
    """

    name: str
    bits: int
    dtype: str
    largest: float
    rms: float = 0.0
    matrix_unit: str = ""

    @property
    def integer(self) -> bool:
        """True for integer grids."""
        return self.name.startswith("INT")


class TokenTolerance(NamedTuple):
    """Error allowed for quantized activations, relative to the RMS of the reference result.

    Attributes:
        max: maximum error of any element.
        rms: RMS error of the whole result.
        reason: derivation of the numbers.
    """

    max: float
    rms: float
    reason: str


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One number format.

    Attributes:
        name: as `WeightFormat.name` and `ActFormat.name`.
        grid: the values of its codes.
        scale: default dtype of the scales: ``E8M0`` (powers of two), ``F8_E4M3``, ``F32``, or ``BF16`` for
            the model's dtype; empty for formats without scales.
        block: rows and columns that share a scale, if the format fixes them; None if checkpoints choose.
        within_row: blocks never span several rows.
        global_scale: block scales are multiplied by a float32 scale per matrix, which checkpoints also
            store for activations.
        token_tolerance: error allowed for activations in this format; None if activations do not use it.
        compressed_tensors: ``format`` in a config of compressed-tensors; empty if unsupported there.
    """

    name: str
    grid: CodeGrid
    scale: str = ""
    block: tuple[int, int] | None = None
    within_row: bool = True
    global_scale: bool = False
    token_tolerance: TokenTolerance | None = None
    compressed_tensors: str = ""

    @property
    def bits(self) -> int:
        """Bits per weight or activation, without scales."""
        return self.grid.bits

    @property
    def byte_scale(self) -> str:
        """``E8M0`` or ``F8_E4M3`` for formats defined with 8-bit scales; empty for all others."""
        return self.scale if self.scale in ("E8M0", "F8_E4M3") else ""

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return DTYPE_BITS["F8_E8M0" if self.scale == "E8M0" else self.scale] // 8

    @property
    def decoding(self) -> str:
        """How decoding rounds to bf16: not at all for ``plain`` and ``exact``, once for ``rounded``.

        Unquantized numbers are ``plain``; codes of few bits times a power of two are ``exact``.
        """
        return "plain" if not self.scale else "exact" if self.scale == "E8M0" else "rounded"

    @property
    def input_largest(self) -> float:
        """The largest activation with a static scale of 1; 0 for formats without static scales."""
        if self.byte_scale == "E8M0" or not self.scale:
            return 0.0
        return self.grid.largest * (E4M3.largest if self.global_scale else 1.0)

    @property
    def input_smallest(self) -> float:
        """The smallest RMS of activations that a static scale of 1 resolves; 0 without static scales.

        Integers need many steps, floats their normal numbers: those of the codes, or of the scales of blocks
        whose largest code is that of the grid.
        """
        if not self.input_largest:
            return 0.0
        if self.grid.integer:
            return self.grid.largest / 8
        return _NORMAL_E4M3 * (self.grid.largest if self.global_scale else 2.0)


PLAIN = CodeGrid("BF16", 16, "BF16", 3.3895313892515355e38, matrix_unit="bf16")
E4M3 = CodeGrid("E4M3", 8, "F8_E4M3", 448.0, matrix_unit="fp8")
E2M1 = CodeGrid("E2M1", 4, "U8", 6.0, 2.9, "fp4")
_NORMAL_E4M3 = 2.0**-6
"""The smallest normal number of E4M3."""
INT8 = CodeGrid("INT8", 8, "U8", 127.0, 74.0)
INT4 = CodeGrid("INT4", 4, "U8", 7.0, 4.6)

_ROUNDED_ONCE = "what enters each GEMM is rounded once, with normal tokens and weights:"
_THREE_BITS = TokenTolerance(0.8, 0.1, f"{_ROUNDED_ONCE} 3 bits of mantissa cost 5.0e-2 RMS at most, doubled")

NUMBER_FORMATS: dict[str, NumberFormat] = {
    number.name: number
    for number in (
        NumberFormat("bf16", PLAIN, within_row=False),
        NumberFormat(
            "fp8",
            E4M3,
            "F32",
            within_row=False,
            token_tolerance=_THREE_BITS,
            compressed_tensors="float-quantized",
        ),
        NumberFormat(
            "mxfp8", E4M3, "E8M0", (1, 32), token_tolerance=_THREE_BITS, compressed_tensors="mxfp8-quantized"
        ),
        NumberFormat(
            "mxfp4",
            E2M1,
            "E8M0",
            (1, 32),
            token_tolerance=TokenTolerance(
                2.0, 0.43, f"{_ROUNDED_ONCE} 1 bit of mantissa in blocks of 32 costs 2.1e-1 RMS, doubled"
            ),
            compressed_tensors="mxfp4-pack-quantized",
        ),
        NumberFormat(
            "nvfp4",
            E2M1,
            "F8_E4M3",
            (1, 16),
            global_scale=True,
            token_tolerance=TokenTolerance(
                1.6, 0.34, f"{_ROUNDED_ONCE} 1 bit of mantissa in blocks of 16 costs 1.7e-1 RMS, doubled"
            ),
            compressed_tensors="nvfp4-pack-quantized",
        ),
        NumberFormat(
            "int8",
            INT8,
            "BF16",
            token_tolerance=TokenTolerance(
                0.6,
                0.1,
                f"{_ROUNDED_ONCE} 127 steps to a token's largest cost 5.2e-2 RMS at most where 14336 "
                "products of gate and up share them, doubled",
            ),
            compressed_tensors="pack-quantized",
        ),
        NumberFormat("int4", INT4, "BF16", compressed_tensors="pack-quantized"),
    )
}
"""Every number format by name. A new one is a row here; CONTRIBUTING lists what else it may need."""


def number_format(name: str) -> NumberFormat:
    """The number format `name`; ``a16`` (activations in the model's dtype) is the format of 16-bit weights.

    Raises NoBackend for an unknown name.

    Example:
        >>> number_format("nvfp4").block, number_format("nvfp4").scale
        ((1, 16), 'F8_E4M3')
    """
    number = NUMBER_FORMATS.get("bf16" if name == "a16" else name)
    if number is None:
        raise NoBackend(f"number format {name!r} is unknown; known are {', '.join(NUMBER_FORMATS)}.")
    return number

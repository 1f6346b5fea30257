"""Weight and activation formats, and schemes that combine them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .number_formats import NUMBER_FORMATS, NumberFormat, number_format

FULL = -1
"""In a block shape: one scale for the whole axis."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How an expert weight matrix `[out, in]` is stored.

    Attributes:
        name: one of `NUMBER_FORMATS`.
        bits: bits per weight, without scales.
        block: (rows, columns) that share one scale; `FULL` is the whole axis, so ``(1, 32)`` is
            group 32 along the reduction axis, ``(1, FULL)`` per output channel, ``(FULL, FULL)``
            per tensor; ``(0, 0)`` means no scales.
        scale_dtype: safetensors dtype of the scales (``E8M0`` for MX formats). Ignored when formats are
            compared, as engines cast scales to the model's dtype.
        zero_point: True when codes are unsigned with a stored zero per block (asymmetric).
    """

    name: str
    bits: int
    block: tuple[int, int] = (0, 0)
    scale_dtype: str = field(default="", compare=False)
    zero_point: bool = False

    @property
    def number(self) -> NumberFormat:
        """The number format's record."""
        return number_format(self.name)

    @property
    def group(self) -> int:
        """Weights along the reduction axis that share a scale; `FULL` for the whole axis."""
        return self.block[1]

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix `[rows, columns]` with its scales and zero points.

        Scales are counted with the number format's default dtype, whatever the checkpoint's is.
        """
        total = rows * columns * self.bits // 8
        if self.block != (0, 0):
            high, wide = (
                full if b == FULL else b for b, full in zip(self.block, (rows, columns), strict=True)
            )
            scales = math.ceil(rows / high) * math.ceil(columns / wide)
            total += scales * self.number.scale_bytes
            if self.zero_point:
                total += scales * self.bits // 8
        return total

    def __str__(self) -> str:
        rows, columns = self.block
        if self.block == (0, 0):
            shape = ""
        elif self.block == (FULL, FULL):
            shape = " per tensor"
        elif columns == FULL:
            shape = " per channel"
        elif rows == 1:
            shape = f" group {columns}"
        else:
            shape = f" block {rows}x{columns}"
        return f"{self.name}{shape}{' with zero points' if self.zero_point else ''}"


@dataclass(frozen=True, slots=True)
class ActFormat:
    """How activations enter the expert GEMMs.

    Attributes:
        name: ``a16`` (the model's 16-bit dtype), or one of `NUMBER_FORMATS`.
        bits: bits per value.
        block: as in `WeightFormat`, over ``[tokens, features]``.
        dynamic: True when scales are computed at run time.
        scale_dtype: ``E8M0`` where the dynamic scales of ``fp8`` are rounded up to powers of two (UE8M0);
            kernels keep them in fp32 all the same. Ignored when formats are compared, as engines choose the
            same kernels for both.
    """

    name: str = "a16"
    bits: int = 16
    block: tuple[int, int] = (0, 0)
    dynamic: bool = True
    scale_dtype: str = field(default="", compare=False)

    @property
    def number(self) -> NumberFormat:
        """The number format's record."""
        return number_format(self.name)

    @property
    def rounds_scales(self) -> bool:
        """Whether dynamic scales, which are floats, are rounded up to powers of two."""
        floats = self.number.grid.name == "E4M3" and not self.number.byte_scale
        return floats and self.dynamic and self.scale_dtype == "E8M0"

    def __str__(self) -> str:
        return self.name if self.name == "a16" else f"{self.name} {'dynamic' if self.dynamic else 'static'}"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight format with the activation format that the checkpoint declares for it.

    Example:
        >>> str(Scheme(MXFP4)), str(Scheme(FP8_BLOCK, act_format("fp8", (1, 128))))
        ('mxfp4 group 32, a16 activations', 'fp8 block 128x128, fp8 dynamic activations')
    """

    weight: WeightFormat
    act: ActFormat = ActFormat()

    def __str__(self) -> str:
        return f"{self.weight}, {self.act} activations"

    @property
    def words(self) -> str:
        """`str` for people: ``mxfp4 group 32, 16-bit activations``."""
        return scheme_words(str(self))


def scheme_words(scheme: str) -> str:
    """What a `Scheme` prints, for people.

    Example:
        >>> scheme_words("mxfp4 group 32, a16 activations")
        'mxfp4 group 32, 16-bit activations'
    """
    return scheme.replace("a16 activations", "16-bit activations")


def weight_format(name: str, block: tuple[int, int] | None = None) -> WeightFormat:
    """The weight format `name`; `block` is required for formats without a fixed block."""
    number = number_format(name)
    return WeightFormat(name, number.bits, block or number.block or (0, 0), number.scale)


def act_format(name: str, block: tuple[int, int] | None = None, dynamic: bool = True) -> ActFormat:
    """The activation format `name`; `block` is required for formats without a fixed block."""
    number = number_format(name)
    return ActFormat(name, number.bits, block or number.block or (0, 0), dynamic)


A16 = ActFormat()
FP8_ACT_TENSOR = act_format("fp8", (FULL, FULL))
FP8_ACT_TENSOR_STATIC = act_format("fp8", (FULL, FULL), dynamic=False)
FP8_ACT_TOKEN = act_format("fp8", (1, FULL))
FP8_ACT_GROUP_128 = act_format("fp8", (1, 128))
INT8_ACT_TOKEN = act_format("int8", (1, FULL))
BF16 = weight_format("bf16")
MXFP4 = weight_format("mxfp4")
NVFP4 = weight_format("nvfp4")
MXFP8 = weight_format("mxfp8")
FP8_TENSOR = weight_format("fp8", (FULL, FULL))
FP8_CHANNEL = weight_format("fp8", (1, FULL))
FP8_BLOCK = weight_format("fp8", (128, 128))
MXFP8_ACT = act_format("mxfp8")
MXFP4_ACT = act_format("mxfp4")
NVFP4_ACT = act_format("nvfp4")


def int_format(bits: int, group: int, scale_dtype: str = "BF16", zero_point: bool = False) -> WeightFormat:
    """The `bits`-bit integer format with one scale per `group` weights (`FULL`: per channel)."""
    return WeightFormat(f"int{bits}", bits, (1, group), scale_dtype, zero_point)


def block_formats() -> tuple[NumberFormat, ...]:
    """Number formats with a fixed block; the block and the bits identify them."""
    return tuple(number for number in NUMBER_FORMATS.values() if number.block)


def float_format(bits: int, block: tuple[int, int]) -> WeightFormat | None:
    """The float format with `bits` bits and `block`; None if there is none."""
    for number in block_formats():
        if (number.bits, number.block) == (bits, block) and not number.grid.integer:
            return weight_format(number.name)
    return weight_format("fp8", block) if bits == 8 else None

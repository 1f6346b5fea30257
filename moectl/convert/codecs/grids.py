"""The values of codes before scaling, and the code nearest to a number."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from ...lazy_torch import Tensor, torch

_MANTISSA = 23
_EXPONENT_BITS = 0x7F800000


class Rounding(NamedTuple):
    """Constants of a loop that rounds float32 numbers to a grid.

    A number is clamped to `low` and `high`. Its bits under `mask` (the exponent, or none) are a power of two,
    raised to at least `least`; adding and subtracting `magic` times that rounds.
    """

    low: float
    high: float
    mask: int
    least: float
    magic: float


class ValueGrid(Hashable, Protocol):
    """The values of codes of `bits` bits; `largest` is the largest magnitude of either sign."""

    @property
    def bits(self) -> int: ...

    @property
    def largest(self) -> float: ...

    @property
    def rounding(self) -> Rounding: ...

    def value(self, code: int) -> float:
        """The value of one code."""

    def round(self, x: Tensor) -> Tensor:
        """`x` (float32, overwritten) rounded to the nearest value, ties to the even code, saturating."""

    def codes(self, x: Tensor) -> Tensor:
        """The uint8 codes of `round(x)`; `x` (float32) is overwritten."""


@dataclass(frozen=True)
class Minifloat:
    """Small floats with sign, exponent, mantissa and subnormals, without infinities (OCP MX 1.0, 5.3).

    Attributes:
        bits: bits of a code.
        mantissa: bits of the mantissa.
        exponent: exponent of the smallest normal number.
        largest: the largest finite magnitude; codes above it are NaN.
    """

    bits: int
    mantissa: int
    exponent: int
    largest: float

    def value(self, code: int) -> float:
        """The value of sign, exponent field and mantissa field; exponent field 0 means subnormal."""
        size = code & ((1 << (self.bits - 1)) - 1)
        field, fraction = size >> self.mantissa, (size & ((1 << self.mantissa) - 1)) / 2.0**self.mantissa
        power = 2.0 ** (self.exponent + max(field, 1) - 1)
        magnitude = (fraction + (field > 0)) * power
        if magnitude > self.largest:
            return float("nan")
        return -magnitude if code >> (self.bits - 1) else magnitude

    @property
    def rounding(self) -> Rounding:
        # Adding 1.5 x 2**23 steps leaves no bit below a step: the addition itself rounds to even.
        magic = 1.5 * 2.0 ** (_MANTISSA - self.mantissa)
        return Rounding(-self.largest, self.largest, _EXPONENT_BITS, 2.0**self.exponent, magic)

    def round(self, x: Tensor) -> Tensor:
        low, high, mask, least, magic = self.rounding
        steps = (x.clamp_(low, high).view(torch.int32) & mask).view(torch.float32)
        steps.clamp_(min=least).mul_(magic)
        return x.add_(steps).sub_(steps)

    def codes(self, x: Tensor) -> Tensor:
        negative = torch.signbit(x).to(torch.uint8) << (self.bits - 1)
        # With the smallest normal at 1, float32's exponent and first mantissa bits count the normal codes.
        size = self.round(x).abs_().mul_(2.0**-self.exponent)
        small = size < 1
        code = size.view(torch.int32).bitwise_right_shift(_MANTISSA - self.mantissa)
        code.sub_((127 << self.mantissa) - (1 << self.mantissa))
        code = torch.where(small, size.mul(2.0**self.mantissa).to(torch.int32), code)
        return code.to(torch.uint8).bitwise_or_(negative)


@dataclass(frozen=True)
class IntegerGrid:
    """Integers in offset codes: ``q + 2**(bits - 1)``.

    `largest` is half a step beyond the positive end, so that with a scale of largest magnitude / `largest`
    both ends are off by at most half a step.
    """

    bits: int

    @property
    def offset(self) -> int:
        """The code of zero."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> float:
        return self.offset - 0.5

    def value(self, code: int) -> float:
        return float(code - self.offset)

    @property
    def rounding(self) -> Rounding:
        return Rounding(-self.offset, self.offset - 1, 0, 1.0, 1.5 * 2.0**_MANTISSA)

    def round(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(-self.offset, self.offset - 1)

    def codes(self, x: Tensor) -> Tensor:
        return self.round(x).add_(self.offset).to(torch.uint8)


E2M1 = Minifloat(4, 1, 0, 6.0)
E4M3 = Minifloat(8, 3, -6, 448.0)
INT4 = IntegerGrid(4)
INT8 = IntegerGrid(8)

GRIDS: Mapping[str, ValueGrid] = {"E2M1": E2M1, "E4M3": E4M3, "INT4": INT4, "INT8": INT8}
"""Grids by `CodeGrid.name`."""


@lru_cache(maxsize=32)
def _table(grid: ValueGrid, device: torch.device) -> Tensor:
    """``[256, 8 / bits]`` float32: the values of the codes in each byte, low bits first."""
    values = torch.tensor([grid.value(code) for code in range(1 << grid.bits)], device=device)
    byte = torch.arange(256, device=device)
    last = (1 << grid.bits) - 1
    return torch.stack([values[byte >> shift & last] for shift in range(0, 8, grid.bits)], -1)


def unpacked(grid: ValueGrid, packed: Tensor) -> Tensor:
    """``[..., m * 8 / bits]`` float32: the values of `packed` uint8 codes ``[..., m]``."""
    values = _table(grid, packed.device).index_select(0, packed.reshape(-1).int())
    return values.reshape(*packed.shape[:-1], -1)


def values_of(grid: ValueGrid, codes: Tensor) -> Tensor:
    """Float32 values of `codes`, one per byte, in their shape."""
    first = _table(grid, codes.device)[:, 0]
    return first.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def packed(grid: ValueGrid, codes: Tensor) -> Tensor:
    """Codes ``[..., m]``, one per byte, packed into bytes ``[..., m * bits / 8]``, low bits first."""
    if grid.bits == 8:
        return codes
    pairs = codes.contiguous().view(torch.int16)  # the even code in the low byte
    return pairs.bitwise_or(pairs >> 4).to(torch.uint8)

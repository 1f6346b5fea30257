"""Value steps to other number systems: sign and distance, sign and magnitude, E5M0, MXFP4 for FP8 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor, torch
from .transforms import Shape
from .value_steps import ExactStep, RowByRow, SourceKept, Statistics, Tensors, named, need, some_rows

_BIAS = 127
"""Exponent bias of E8M0."""

E5M0_OF_ONE = 15 << 3
"""2**0 as E5M0 in a byte's upper five bits."""


def _each_code(t: Tensor, bits: int, change: Tensor) -> Tensor:
    """Packed codes of `bits` bits looked up in `change`, ``[2**bits]`` bytes."""
    table = change.to(t.device)
    if bits == 8:
        return table[t.int()]
    pairs = torch.arange(256, device=t.device)
    return (table[pairs & 15] | table[pairs >> 4] << 4)[t.int()]


@named("distance_bytes")
@dataclass(frozen=True)
class DistanceBytes(RowByRow):
    """8-bit codes u with zero point z as sign and distance: u - z for u >= z, else 255 - u.

    `zero` is the role with the zero points; without one, z is 128.
    """

    zero: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.zero,) if self.zero else ()

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8", f"{self} needs bytes, got {dtype}.")
        return TensorType(dtype, shape)

    def _zeros(self, others: Tensors) -> Tensor | int:
        return others[self.zero].unsqueeze(-1) if self.zero else 128

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        zero = self._zeros(others)
        codes = t if isinstance(zero, int) else t.reshape(*zero.shape[:-1], -1)
        return torch.where(codes >= zero, codes - zero, 255 - codes).reshape(t.shape)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        zero = self._zeros(others)
        codes = t if isinstance(zero, int) else t.reshape(*zero.shape[:-1], -1)
        return torch.where(codes <= 255 - zero, codes + zero, 255 - codes).reshape(t.shape)


@named("sign_magnitude")
@dataclass(frozen=True)
class SignMagnitude(RowByRow):
    """Offset codes ``q + 2**(bits - 1)`` as sign and magnitude; refused where a q has no opposite."""

    bits: int

    def __post_init__(self) -> None:
        need(self.bits in (4, 8), f"{self}: codes have 4 or 8 bits.")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8", f"{self} needs packed codes, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        middle = 1 << (self.bits - 1)
        lowest = t == 0 if self.bits == 8 else (t & 15 == 0) | (t >> 4 == 0)
        need(
            not bool(lowest.any()),
            f"a weight is -{middle}, which int{self.bits} in sign and magnitude lacks; "
            "store it as an offset: --to humming.",
        )
        values = torch.arange(1 << self.bits) - middle
        table = torch.where(values < 0, -values | middle, values).to(torch.uint8)
        table[0] = 0
        return _each_code(t, self.bits, table)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        middle = 1 << (self.bits - 1)
        codes = torch.arange(1 << self.bits)
        table = torch.where(codes >= middle, 2 * middle - codes, codes + middle).to(torch.uint8)
        return _each_code(t, self.bits, table)


@named("e5m0")
@dataclass(frozen=True)
class E5M0(SourceKept):
    """E8M0 bytes as 5-bit exponents in the upper bits of a byte: 0 below 2**-14, and at most 2**15."""

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        exponents: Tensor = (t.to(torch.int16) - (_BIAS - 15)).clamp(0, 30)
        return (exponents << 3).to(torch.uint8)


@named("one_of_halves")
@dataclass(frozen=True)
class OneOfHalves(ExactStep):
    """One number per expert, ``[e]``, from equal ones of its halves, ``[e, halves, 1]``; others are refused.

    `instead` says in a clause what holds different ones.
    """

    instead: str

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(len(shape) == 3 and shape[1] in (1, 2) and shape[2] == 1, f"{self} does not fit {shape}.")
        return TensorType(dtype, shape[:1])

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        numbers = t.flatten(1)
        need(
            bool((numbers == numbers[:, :1]).all()),
            f"gate and up have different global scales, and this layout holds one for both; {self.instead}.",
        )
        return numbers[:, 0].clone()

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t.unsqueeze(1).expand(-1, shape[1]).reshape(shape)


def _smallest(scales: Tensor, octaves: int) -> Tensor:
    """The least exponent of each expert that is stored, ``[e, 1, 1]`` int16: `octaves` below its largest."""
    exponents = scales.to(torch.int16).flatten(1)
    least = torch.maximum(exponents.amin(1), exponents.amax(1) - octaves)
    return least.view(-1, *(1,) * (scales.ndim - 1))


class _OfFusedScales(SourceKept):
    """A part of MXFP4 weights with scales of at most `octaves` below an expert's largest."""

    octaves: int


@named("fused_scales")
@dataclass(frozen=True)
class FusedScales(_OfFusedScales):
    """E8M0 bytes as exponents above the expert's least, from 1."""

    octaves: int

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        least = _smallest(t, self.octaves)
        exponents: Tensor = t.to(torch.int16).maximum(least) - least + 1
        return exponents.to(torch.uint8)


@named("fused_global")
@dataclass(frozen=True)
class FusedGlobal(_OfFusedScales):
    """Half of 2 to the expert's least exponent, ``[e]`` F32, from its E8M0 bytes."""

    octaves: int

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8", f"{self} needs E8M0 bytes, got {dtype}.")
        return TensorType("F32", shape[:1])

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        exponents = _smallest(t, self.octaves).flatten() - _BIAS - 1
        one = torch.ones(len(exponents), dtype=torch.float32, device=t.device)
        return torch.ldexp(torch.ldexp(one, exponents // 2), exponents - exponents // 2)


@named("fused_codes")
@dataclass(frozen=True)
class FusedCodes(_OfFusedScales):
    """E2M1 codes for the scales of `FusedScales`: rounded where a scale was raised, and without -0."""

    scale: str
    octaves: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.scale,)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8", f"{self} needs packed codes, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        every, result = others[self.scale], torch.empty_like(t)
        least = _smallest(every, self.octaves)
        table = torch.tensor(_raised_codes(), dtype=torch.uint8, device=t.device).flatten()
        for rows in some_rows(t):
            scale = every[:, rows].to(torch.int16)
            raised = (least - scale).clamp(0, _SMALL).unsqueeze(-1).int()
            grouped = t[:, rows].reshape(*scale.shape, -1)
            low, high = (table[(raised << 4) + code.int()] for code in (grouped & 15, grouped >> 4))
            result[:, rows] = (low | high << 4).flatten(2)
        return result


_SMALL = 8
"""Octaves from which every code becomes zero."""


@lru_cache(maxsize=1)
def _raised_codes() -> list[list[int]]:
    """E2M1 codes times 2**-r for r = 0 to `_SMALL`, rounded to nearest with halves away from zero."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

    def nearest(value: float) -> int:
        distances = [abs(value - other) for other in values]
        return max(code for code, distance in enumerate(distances) if distance == min(distances))

    rows = []
    for raised in range(_SMALL + 1):
        codes = [code & 8 | nearest(values[code & 7] * 2.0**-raised) for code in range(16)]
        codes[8] = 0
        rows.append(codes)
    return rows

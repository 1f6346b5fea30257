"""Storage of scales: E8M0 bytes, E4M3 bytes, or floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from ...errors import UsageError
from ...lazy_torch import Tensor, torch
from ...problem.schemes import WeightFormat
from ..steps.transforms import DTYPES
from .grids import E4M3, Minifloat, ValueGrid, unpacked

E8M0_BIAS = 127
E8M0_NAN = 255
TINY = 2.0**-126
"""The smallest normal float32."""


class ScaleStore(Protocol):
    """One way to store positive scales."""

    @property
    def dtype(self) -> torch.dtype: ...

    def load(self, stored: Tensor) -> Tensor:
        """Float32 values of stored scales."""

    def store(self, scale: Tensor) -> Tensor:
        """The stored scales nearest to positive float32 ones, neither zero nor infinite."""

    def covering(self, largest: Tensor, grid: ValueGrid) -> Tensor:
        """Stored scales by the format's usual rule, for blocks with `largest` magnitudes (float32)."""

    def near(self, stored: Tensor, step: float) -> Tensor:
        """Stored scales one `step` away from `stored`: for bytes an offset, for floats a factor."""


@lru_cache(maxsize=8)
def _powers(device: torch.device) -> Tensor:
    """``[256]`` float32: 2**(byte - 127), exact; byte 255 is NaN."""
    values = [2.0 ** (byte - E8M0_BIAS) for byte in range(E8M0_NAN)]
    return torch.tensor([*values, float("nan")], device=device)


def quotient(x: Tensor, number: float) -> Tensor:
    """`x` / `number`, rounded once: for a scalar divisor GPUs multiply by its rounded reciprocal."""
    return x / torch.full_like(x, number)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2(x)) of non-negative float32 `x`, exact; for zero far below any scale."""
    return torch.where(x == 0, -1024, torch.frexp(x)[1] - 1)


def _floor(largest: Tensor, grid: Minifloat) -> Tensor:
    return _exponent(largest) - _exponent(torch.tensor(grid.largest))


def _even(largest: Tensor, grid: Minifloat) -> Tensor:
    # Rounds the largest weight to the grid's mantissa first, ties up, so that it saturates less.
    half = 1 << (22 - grid.mantissa)
    bits = largest.clamp(max=2.0**127).view(torch.int32) + half
    return _exponent(bits.view(torch.float32)) - _exponent(torch.tensor(grid.largest))


def _up(largest: Tensor, grid: Minifloat) -> Tensor:
    scale = quotient(largest, grid.largest)
    return _exponent(scale) + (torch.frexp(scale)[0] > 0.5)


E8M0_RULES: Mapping[str, Callable[[Tensor, Minifloat], Tensor]] = {
    "floor": _floor,
    "even": _even,
    "up": _up,
}
"""Exponent of a block's scale as a function of its largest magnitude.

``floor`` is OCP MX 1.0, 6.3: 2**(floor(log2(largest)) - exponent of the grid's largest value), which may
saturate; ``even`` rounds the largest magnitude to the grid's mantissa first (Quark, llm-compressor);
``up`` takes the smallest power of two with which nothing saturates (NVIDIA, cuBLAS).
"""


@dataclass(frozen=True)
class E8M0:
    """Bytes b for 2**(b - 127); 255 is NaN."""

    rule: str = "floor"

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def load(self, stored: Tensor) -> Tensor:
        return _powers(stored.device).index_select(0, stored.reshape(-1).int()).reshape(stored.shape)

    def store(self, scale: Tensor) -> Tensor:
        # Nearest logarithm: the next power starts at sqrt(2).
        fraction, exponent = torch.frexp(scale)
        return self._bytes(exponent - (fraction < 2.0**-0.5).int())

    def covering(self, largest: Tensor, grid: ValueGrid) -> Tensor:
        if not isinstance(grid, Minifloat):
            raise UsageError("power-of-two scales are supported for floating-point codes only.")
        return self._bytes(E8M0_RULES[self.rule](largest, grid))

    def near(self, stored: Tensor, step: float) -> Tensor:
        return stored.int().add_(int(step)).clamp_(0, E8M0_NAN - 1).to(torch.uint8)

    def _bytes(self, exponent: Tensor) -> Tensor:
        return exponent.clamp(-E8M0_BIAS, E8M0_BIAS).add_(E8M0_BIAS).to(torch.uint8)


@dataclass(frozen=True)
class E4M3Scale:
    """E4M3 bytes, at least the smallest subnormal, 2**-9: a scale of zero would erase its block."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def load(self, stored: Tensor) -> Tensor:
        return unpacked(E4M3, stored)

    def store(self, scale: Tensor) -> Tensor:
        return E4M3.codes(scale.clamp(2.0**-9, E4M3.largest))

    def covering(self, largest: Tensor, grid: ValueGrid) -> Tensor:
        return self.store(quotient(largest, grid.largest))

    def near(self, stored: Tensor, step: float) -> Tensor:
        return stored.int().add_(int(step)).clamp_(1, 0x7E).to(torch.uint8)


@dataclass(frozen=True)
class FloatScale:
    """Floats of `dtype`, clamped to its smallest normal and largest finite number."""

    dtype: torch.dtype

    def load(self, stored: Tensor) -> Tensor:
        return stored.float()

    def store(self, scale: Tensor) -> Tensor:
        limits = torch.finfo(self.dtype)
        return scale.clamp(limits.tiny, limits.max).to(self.dtype)

    def covering(self, largest: Tensor, grid: ValueGrid) -> Tensor:
        return self.store(quotient(largest, grid.largest))

    def near(self, stored: Tensor, step: float) -> Tensor:
        return self.store(stored.float() * step)


def scale_store(weight: WeightFormat, default: str, rule: str = "floor") -> ScaleStore:
    """How `weight` stores its scales; `default` is the dtype if the format does not state one."""
    dtype = weight.scale_dtype or default
    if dtype == "E8M0":
        return E8M0(rule)
    if dtype == "F8_E4M3":
        return E4M3Scale()
    if dtype not in DTYPES or not DTYPES[dtype].is_floating_point:
        raise UsageError(f"no codec stores scales of {weight} as {dtype}.")
    return FloatScale(DTYPES[dtype])

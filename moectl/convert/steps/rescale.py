"""The value steps: scales, zero points and codes in the numbers that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...files.tensor_table import TensorType
from .transforms import DTYPES, Shape
from .value_steps import ExactStep, ExpertStatistic, Facts, SourceKept, Tensors, named, need

E4M3_MOST = 448.0
_INT16_UNIT = 4096
_SMALLEST_HALF, _LARGEST_HALF, _NAN = 103, 142, 255
"""E8M0 bytes of the smallest and largest powers of two that fp16 holds, and the one that is no number."""


def _known(dtype: str) -> None:
    need(dtype in DTYPES, f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}.")


def _grid(shape: Shape, halves: int, what: object) -> int:
    """Rows of each half of ``[e, halves * rows, ...]``."""
    need(
        len(shape) > 1 and halves in (1, 2) and shape[1] % halves == 0,
        f"{what} does not fit a tensor {shape}.",
    )
    return shape[1] // halves


@named("times")
@dataclass(frozen=True)
class Times(ExactStep):
    """Floats times a power of two, which changes their exponents only."""

    exponent: int

    def __post_init__(self) -> None:
        need(abs(self.exponent) <= 120, f"2**{self.exponent} is no factor on 16-bit scales.")

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        made = t * 2.0**self.exponent
        need(
            bool(made.isfinite().all()),
            f"a scale of {t.abs().max():g} times 2**{self.exponent} is beyond {t.dtype}, as kernels read it.",
        )
        return made

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t * 2.0**-self.exponent


@named("round")
@dataclass(frozen=True)
class Round(SourceKept):
    """Floats rounded to the nearest of another dtype."""

    to: str

    def __post_init__(self) -> None:
        _known(self.to)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(self.to, shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        made = t.to(DTYPES[self.to])
        need(bool((made.isfinite() | ~t.isfinite()).all()), f"{t.abs().max():g} is too large for {self.to}.")
        return made


@named("repeat_rows")
@dataclass(frozen=True)
class RepeatRows(ExactStep):
    """Each block's scale for each of its `times` rows; the last of a half may have fewer of `rows`."""

    times: int
    rows: int
    halves: int

    def __post_init__(self) -> None:
        need(self.times > 0 and self.rows > 0, f"{self} repeats nothing.")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        blocks = _grid(shape, self.halves, self)
        need(blocks == -(-self.rows // self.times), f"{self} does not fit {blocks} blocks.")
        return TensorType(dtype, (shape[0], self.halves * self.rows, *shape[2:]))

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        blocks = t.reshape(t.shape[0], self.halves, -1, *t.shape[2:])
        rows: Tensor = blocks.repeat_interleave(self.times, 2)[:, :, : self.rows]
        return rows.flatten(1, 2)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        rows = t.reshape(t.shape[0], self.halves, -1, *t.shape[2:])
        return rows[:, :, :: self.times].reshape(shape)


@named("fp16_e8m0")
@dataclass(frozen=True)
class HalfE8M0(SourceKept):
    """E8M0 bytes as they come through fp16: below its range byte 0, above it refused."""

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        large = (t > _LARGEST_HALF) & (t != _NAN)
        need(
            not bool(large.any()),
            "a scale of 2**16 or more is infinite in fp16, through which these kernels read MX scales; "
            "convert with a bf16 model.",
        )
        return torch.where(t < _SMALLEST_HALF, torch.zeros_like(t), t)


@named("at_most")
@dataclass(frozen=True)
class AtMost(ExactStep):
    """Bytes as they are, refused above `most`."""

    most: int
    why: str

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        largest = int(t.max()) if t.numel() else 0
        need(largest <= self.most, f"{self.why}: at most {self.most} has a place, got {largest}.")
        return t

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t


@named("at_least")
@dataclass(frozen=True)
class AtLeast(SourceKept):
    """Floats, raised to `least` where they are below."""

    least: float

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        return t.clamp(min=self.least)


@named("int16_of_largest")
@dataclass(frozen=True)
class Int16OfLargest(SourceKept):
    """16-bit scales as whole 4096ths of the layer's largest, int16 bits in the scales' own dtype."""

    role: str

    @property
    def facts(self) -> tuple[ExpertStatistic, ...]:
        return (ExpertStatistic(self.role, "max"),)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype in ("BF16", "F16"), f"{self} needs 16-bit scales, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        largest = facts[self.facts[0]].to(t.device)
        need(bool(largest > 0), f"the largest scale of {self.role} must be above zero, got {largest:g}.")
        whole = (t / largest * _INT16_UNIT).round()
        need(
            bool((whole.abs() < 2**15).all()),
            f"scales of {self.role} differ too much for int16: the largest is {largest:g}.",
        )
        return whole.to(torch.int16).view(t.dtype)


@named("largest_4096th")
@dataclass(frozen=True)
class Largest4096th(SourceKept):
    """A 4096th of the layer's largest scale, for every expert: ``[e]`` F32."""

    role: str

    @property
    def facts(self) -> tuple[ExpertStatistic, ...]:
        return (ExpertStatistic(self.role, "max"),)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType("F32", shape[:1])

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        return (facts[self.facts[0]].float() / _INT16_UNIT).to(t.device).repeat(t.shape[0])


@named("distance_codes")
@dataclass(frozen=True)
class DistanceCodes(ExactStep):
    """4-bit codes u around a zero z as u - z from z up and 15 - u below: sign and distance of u - z.

    `zero` is the role with the codes of zero; without one, z is 8.
    """

    zero: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.zero,) if self.zero else ()

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8", f"{self} needs packed codes, got {dtype}.")
        return TensorType(dtype, shape)

    def _zeros(self, t: Tensor, others: Tensors) -> Tensor | int:
        if not self.zero:
            return 8
        zero = others[self.zero]
        need(bool((zero < 16).all()), f"a zero point of {self.zero} has more than 4 bits.")
        return zero.unsqueeze(-1)

    def _mapped(self, t: Tensor, others: Tensors, there: bool) -> Tensor:
        zero = self._zeros(t, others)
        grouped = t if isinstance(zero, int) else t.reshape(*zero.shape[:-1], -1)
        made = _distance(grouped & 15, zero, there) | _distance(grouped >> 4, zero, there) << 4
        return made.reshape(t.shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        return self._mapped(t, others, True)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return self._mapped(t, others, False)


def _distance(code: Tensor, zero: Tensor | int, there: bool) -> Tensor:
    if there:
        return torch.where(code >= zero, code - zero, 15 - code)
    return torch.where(code <= 15 - zero, code + zero, 15 - code)


def _factor(largest: Tensor) -> Tensor:
    """The power of two that brings the largest scale of a layer just under E4M3's largest number."""
    scaled = largest.float() * 2**7
    found = (E4M3_MOST * 2**7 / scaled).log2().floor().exp2()
    return torch.where((scaled > 0) & (scaled < E4M3_MOST * 2**7), found, torch.ones_like(found))


class _OfScales(SourceKept):
    """A step whose numbers depend on the largest E4M3 scale of the layer; not for fp16 models."""

    role: str
    half: bool

    @property
    def facts(self) -> tuple[ExpertStatistic, ...]:
        return () if self.half else (ExpertStatistic(self.role, "max_e4m3"),)

    def factor(self, facts: Facts, device: torch.device) -> Tensor:
        """The factor on the scales, by which the global scale is divided."""
        return torch.ones((), device=device) if self.half else _factor(facts[self.facts[0]].to(device))


@named("s0e5m3")
@dataclass(frozen=True)
class S0E5M3(_OfScales):
    """E4M3 bytes, which must not be negative, as bytes of 5 exponent and 3 mantissa bits without a sign.

    The number is 128 times the scale times a power of two that the layer shares; below 2 it is 0.
    """

    role: str
    half: bool

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8", f"{self} needs E4M3 bytes, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        scale = t.view(torch.float8_e4m3fn).float()
        need(
            bool((scale >= 0).all()),
            f"{self.role} has negative scales or ones that are no numbers, which this layout cannot hold.",
        )
        half = (scale * self.factor(facts, t.device)).half() * 2**7
        bits = torch.where(half < 2, torch.zeros_like(half), half).view(torch.int16)
        return (bits >> 7).to(torch.uint8)


@named("global_of_s0e5m3")
@dataclass(frozen=True)
class GlobalOfS0E5M3(_OfScales):
    """The global scale of E4M3 scales that `S0E5M3` changed, with the exponent bias of the model's dtype."""

    role: str
    half: bool

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        bias = 14 if self.half else 126
        return t * 2.0 ** (bias - 7) / self.factor(facts, t.device)


_TAKES = ("first", "largest", "same", "requantized")


@named("per_expert")
@dataclass(frozen=True)
class PerExpert(ExactStep):
    """One number of an expert, ``[e]``, from those of its halves, ``[e, halves, 1]``.

    `take`: the ``first`` (gate's), the ``largest``, the ``same`` (refused where they differ), or
    ``requantized``: the largest, to which the weights of the other half are quantized again.
    """

    take: str
    halves: int

    def __post_init__(self) -> None:
        need(self.take in _TAKES and self.halves in (1, 2), f"{self} is none of {', '.join(_TAKES)}.")

    @property
    def exact(self) -> bool:
        return self.halves == 1 or self.take in ("same", "requantized")

    @property
    def lossy(self) -> bool:
        return self.halves == 2 and self.take == "requantized"

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(shape[1:] == (self.halves, 1), f"{self} does not fit a tensor {shape}.")
        return TensorType(dtype, shape[:1])

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        numbers = t.flatten(1)
        if self.take == "same" and self.halves == 2:
            need(
                bool((numbers[:, 0] == numbers[:, 1]).all()),
                "gate and up have different scales per tensor and this layout holds one for both; allow "
                "quantizing them again (--requantize), or choose a layout with a scale per channel.",
            )
        return numbers.amax(1) if self.take in ("largest", "requantized") else numbers[:, 0].clone()

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t.unsqueeze(1).expand(-1, self.halves).reshape(shape)


@named("of_layer")
@dataclass(frozen=True)
class OfLayer(SourceKept):
    """The largest of the layer for every expert: ``[e]``, from ``[e, halves, 1]``."""

    role: str

    @property
    def facts(self) -> tuple[ExpertStatistic, ...]:
        return (ExpertStatistic(self.role, "max"),)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(dtype, shape[:1])

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        return facts[self.facts[0]].to(t.device).repeat(t.shape[0])


@named("requantize")
@dataclass(frozen=True)
class Requantize(ExactStep):
    """E4M3 weights of two halves, each with its own scale, as multiples of the larger of both.

    They come back as these multiples: what they were is not kept.
    """

    scale: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.scale,)

    @property
    def lossy(self) -> bool:
        return True

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8" and _grid(shape, 2, self) > 0, f"{self} needs E4M3 bytes, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        scale = others[self.scale].float()
        made = torch.empty_like(t)
        for expert, (weights, own) in enumerate(zip(t, scale.reshape(-1, 2), strict=True)):
            factors = torch.where(own < own.max(), own / own.max(), torch.ones_like(own))
            for half, out, factor in zip(weights.chunk(2), made[expert].chunk(2), factors, strict=True):
                numbers = half.view(torch.float8_e4m3fn).float() * factor
                out.copy_(numbers.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8))
        return made

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t

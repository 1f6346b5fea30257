"""Value steps that turn scales, zero points and codes into the numbers that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor, torch
from .transforms import DTYPES, Shape
from .value_steps import ExactStep, ExpertStatistic, RowByRow, SourceKept, Statistics, Tensors, named, need

E4M3_LARGEST = 448.0
_INT16_UNIT = 4096
"""The int16 scale that stands for the layer's largest."""

_SMALLEST_HALF, _LARGEST_HALF, _NAN = 103, 142, 255
"""E8M0 bytes of the smallest and largest powers of two that fp16 represents, and of NaN."""


def _check_dtype(dtype: str) -> None:
    need(dtype in DTYPES, f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}.")


def _rows_of_half(shape: Shape, halves: int, step: object) -> int:
    """Rows of each half of ``[e, halves * rows, ...]``; CheckpointError when `step` does not fit."""
    need(
        len(shape) > 1 and halves in (1, 2) and shape[1] % halves == 0,
        f"{step} does not fit a tensor {shape}.",
    )
    return shape[1] // halves


@named("times")
@dataclass(frozen=True)
class Times(ExactStep):
    """Floats times ``2**exponent``, which changes nothing but their exponents."""

    exponent: int

    def __post_init__(self) -> None:
        need(abs(self.exponent) <= 120, f"2**{self.exponent} is no factor on 16-bit scales.")

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        scaled = t * 2.0**self.exponent
        need(
            bool(scaled.isfinite().all()),
            f"a scale of {t.abs().max():g} times 2**{self.exponent} is beyond {t.dtype}, as kernels read it.",
        )
        return scaled

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t * 2.0**-self.exponent


@named("round")
@dataclass(frozen=True)
class Round(SourceKept):
    """Floats rounded to the nearest of another dtype."""

    to: str

    def __post_init__(self) -> None:
        _check_dtype(self.to)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(self.to, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        rounded = t.to(DTYPES[self.to])
        need(
            bool((rounded.isfinite() | ~t.isfinite()).all()), f"{t.abs().max():g} is too large for {self.to}."
        )
        return rounded


@named("repeat_rows")
@dataclass(frozen=True)
class RepeatRows(ExactStep):
    """The scale of each block of `times` rows repeated for each row; a half has `rows` rows.

    The last block of a half may have fewer rows.
    """

    times: int
    rows: int
    halves: int

    def __post_init__(self) -> None:
        need(self.times > 0 and self.rows > 0, f"{self} repeats nothing.")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        blocks = _rows_of_half(shape, self.halves, self)
        need(blocks == -(-self.rows // self.times), f"{self} does not fit {blocks} blocks.")
        return TensorType(dtype, (shape[0], self.halves * self.rows, *shape[2:]))

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        blocks = t.reshape(t.shape[0], self.halves, -1, *t.shape[2:])
        rows: Tensor = blocks.repeat_interleave(self.times, 2)[:, :, : self.rows]
        return rows.flatten(1, 2)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        rows = t.reshape(t.shape[0], self.halves, -1, *t.shape[2:])
        return rows[:, :, :: self.times].reshape(shape)


@named("fp16_e8m0")
@dataclass(frozen=True)
class HalfE8M0(SourceKept):
    """E8M0 bytes after a trip through fp16: byte 0 below its range, refused above it."""

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
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
    """Bytes unchanged, refused above `most`."""

    most: int
    why: str

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        largest = int(t.max()) if t.numel() else 0
        need(largest <= self.most, f"{self.why}: at most {self.most} is supported, got {largest}.")
        return t

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t


@named("at_least")
@dataclass(frozen=True)
class AtLeast(SourceKept):
    """Floats clamped to at least `least`."""

    least: float

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        return t.clamp(min=self.least)


@named("int16_of_largest")
@dataclass(frozen=True)
class Int16OfLargest(SourceKept):
    """16-bit scales in units of 1/4096 of the layer's largest: int16 bits in the scales' own dtype."""

    role: str

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        return (ExpertStatistic(self.role, "max"),)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype in ("BF16", "F16"), f"{self} needs 16-bit scales, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        largest = statistics[self.statistics[0]].to(t.device)
        need(bool(largest > 0), f"the largest scale of {self.role} must be above zero, got {largest:g}.")
        multiples = (t / largest * _INT16_UNIT).round()
        need(
            bool((multiples.abs() < 2**15).all()),
            f"scales of {self.role} differ too much for int16: the largest is {largest:g}.",
        )
        return multiples.to(torch.int16).view(t.dtype)


@named("largest_4096th")
@dataclass(frozen=True)
class Largest4096th(SourceKept):
    """1/4096 of the layer's largest scale, repeated for every expert: ``[e]`` F32."""

    role: str

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        return (ExpertStatistic(self.role, "max"),)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType("F32", shape[:1])

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        return (statistics[self.statistics[0]].float() / _INT16_UNIT).to(t.device).repeat(t.shape[0])


@named("distance_codes")
@dataclass(frozen=True)
class DistanceCodes(RowByRow):
    """4-bit codes u with zero point z in sign-magnitude form: u - z for u >= z, else 15 - u.

    `zero` is the role with the zero points; without one, z is 8.
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

    def _map_codes(self, t: Tensor, others: Tensors, forward: bool) -> Tensor:
        zero = self._zeros(t, others)
        grouped = t if isinstance(zero, int) else t.reshape(*zero.shape[:-1], -1)
        low, high = (_distance(code, zero, forward) for code in (grouped & 15, grouped >> 4))
        return (low | high << 4).reshape(t.shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        return self._map_codes(t, others, True)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return self._map_codes(t, others, False)


def _distance(code: Tensor, zero: Tensor | int, forward: bool) -> Tensor:
    if forward:
        return torch.where(code >= zero, code - zero, 15 - code)
    return torch.where(code <= 15 - zero, code + zero, 15 - code)


def _factor(largest: Tensor) -> Tensor:
    """The power of two that scales the layer's largest scale to just under E4M3's largest number."""
    scaled = largest.float() * 2**7
    power = (E4M3_LARGEST * 2**7 / scaled).log2().floor().exp2()
    return torch.where((scaled > 0) & (scaled < E4M3_LARGEST * 2**7), power, torch.ones_like(power))


class _RescaledByMaximum(SourceKept):
    """A step that rescales by the largest E4M3 scale of the layer, except for fp16 models (`half`)."""

    role: str
    half: bool

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        return () if self.half else (ExpertStatistic(self.role, "max_e4m3"),)

    def factor(self, statistics: Statistics, device: torch.device) -> Tensor:
        """The factor on the scales; the global scale is divided by it."""
        return (
            torch.ones((), device=device) if self.half else _factor(statistics[self.statistics[0]].to(device))
        )


@named("s0e5m3")
@dataclass(frozen=True)
class S0E5M3(_RescaledByMaximum):
    """Non-negative E4M3 bytes as bytes of 5 exponent and 3 mantissa bits without a sign.

    The value is 128 times the scale times a power of two shared by the layer; values below 2 become 0.
    """

    role: str
    half: bool

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8", f"{self} needs E4M3 bytes, got {dtype}.")
        return TensorType(dtype, shape)

    @property
    def by_rows(self) -> bool:
        return True

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        scale = t.view(torch.float8_e4m3fn).float()
        need(
            bool((scale >= 0).all()),
            f"{self.role} has negative or NaN scales, which this layout cannot hold.",
        )
        half = (scale * self.factor(statistics, t.device)).half() * 2**7
        bits = torch.where(half < 2, torch.zeros_like(half), half).view(torch.int16)
        return (bits >> 7).to(torch.uint8)


@named("global_of_s0e5m3")
@dataclass(frozen=True)
class GlobalOfS0E5M3(_RescaledByMaximum):
    """The global scale for E4M3 scales that `S0E5M3` changed, with the exponent bias of the model's dtype."""

    role: str
    half: bool

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        bias = 14 if self.half else 126
        return t * 2.0 ** (bias - 7) / self.factor(statistics, t.device)


_TAKES = ("first", "largest", "same", "requantized")


@named("per_expert")
@dataclass(frozen=True)
class PerExpert(ExactStep):
    """One number per expert, ``[e]``, from those of its halves, ``[e, halves, 1]``.

    `take`: the ``first`` (gate's), the ``largest``, the ``same`` (refused where they differ), or
    ``requantized``: the largest, at which the weights of the other half are quantized again.
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

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
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
class LayerMaximum(SourceKept):
    """The layer's largest number, repeated for every expert: ``[e]``, from ``[e, halves, 1]``."""

    role: str

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        return (ExpertStatistic(self.role, "max"),)

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(dtype, shape[:1])

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        return statistics[self.statistics[0]].to(t.device).repeat(t.shape[0])


@named("requantize")
@dataclass(frozen=True)
class Requantize(ExactStep):
    """E4M3 weights of two halves, each with its own scale, as multiples of the larger scale.

    Lossy: `undo` returns these multiples, and the original weights are not kept.
    """

    scale: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.scale,)

    @property
    def lossy(self) -> bool:
        return True

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(dtype == "U8" and _rows_of_half(shape, 2, self) > 0, f"{self} needs E4M3 bytes, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        scale = others[self.scale].float()
        requantized = torch.empty_like(t)
        for weights, out, own in zip(t, requantized, scale.reshape(-1, 2), strict=True):
            factors = torch.where(own < own.max(), own / own.max(), torch.ones_like(own))
            for half, target, factor in zip(weights.chunk(2), out.chunk(2), factors, strict=True):
                multiples = half.view(torch.float8_e4m3fn).float() * factor
                multiples.clamp_(-E4M3_LARGEST, E4M3_LARGEST)
                target.copy_(multiples.to(torch.float8_e4m3fn).view(torch.uint8))
        return requantized

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t

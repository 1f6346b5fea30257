"""How far quantized weights are from the weights they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError


@dataclass(frozen=True, slots=True)
class WorstBlock:
    """The block of weights with the largest error relative to its own size.

    Attributes:
        expert, row, column: where the block begins.
        relative: root of its squared error over the sum of its squared weights.
    """

    expert: int
    row: int
    column: int
    relative: float


@dataclass(frozen=True, slots=True)
class SquaredErrors:
    """Squared errors of all weights of a tensor.

    Attributes:
        squared: their sum.
        worst: the worst block.
        output: the sum of squared errors of the outputs for the calibration tokens, per token; None
            without a Hessian.
    """

    squared: float
    worst: WorstBlock
    output: float | None = None

    def merge(self, other: SquaredErrors) -> SquaredErrors:
        """The errors of both tensors together."""
        worst = self.worst if self.worst.relative >= other.worst.relative else other.worst
        return SquaredErrors(self.squared + other.squared, worst, _sum(self.output, other.output))


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What quantizing one role of a batch of experts cost.

    Attributes:
        role: canonical role.
        format: the weight format, in words.
        method: how scales and codes were found.
        weights: how many.
        signal: the sum of squared weights.
        errors: of the codes and scales taken.
        nearest: of rounding to nearest with the format's usual scales.
        output: the sum of squared outputs for the calibration tokens, per token; None without a Hessian.
    """

    role: str
    format: str
    method: str
    weights: int
    signal: float
    errors: SquaredErrors
    nearest: SquaredErrors
    output: float | None = None

    def merge(self, other: QuantizationReport) -> QuantizationReport:
        """The report of both batches together; UsageError when they are of different kinds."""
        ours, theirs = (self.role, self.format, self.method), (other.role, other.format, other.method)
        if ours != theirs:
            raise UsageError(f"reports of {', '.join(ours)} and {', '.join(theirs)} do not add up.")
        return QuantizationReport(
            *ours,
            self.weights + other.weights,
            self.signal + other.signal,
            self.errors.merge(other.errors),
            self.nearest.merge(other.nearest),
            _sum(self.output, other.output),
        )

    def summary(self) -> dict[str, Any]:
        """JSON data: RMS error, signal to noise in dB (None when nothing is lost) and the worst block."""
        return {
            "role": self.role,
            "format": self.format,
            "method": self.method,
            "weights": self.weights,
            **self._measures(self.errors),
            "rtn": self._measures(self.nearest),
        }

    def _measures(self, errors: SquaredErrors) -> dict[str, Any]:
        worst = errors.worst
        found: dict[str, Any] = {
            "rms_error": math.sqrt(errors.squared / self.weights) if self.weights else 0.0,
            "snr_db": _decibels(self.signal, errors.squared),
            "worst_block": {
                "expert": worst.expert,
                "row": worst.row,
                "column": worst.column,
                "relative_error": worst.relative,
            },
        }
        if errors.output is not None and self.output is not None:
            found["output_snr_db"] = _decibels(self.output, errors.output)
        return found


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _decibels(signal: float, noise: float) -> float | None:
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None

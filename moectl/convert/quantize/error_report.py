"""Reports of the errors of quantized weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError


@dataclass(frozen=True, slots=True)
class WorstBlock:
    """The block of weights with the largest relative error.

    Attributes:
        expert, row, column: of its first weight.
        relative: square root of its squared error over the sum of its squared weights.
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
        """The errors of both tensors combined."""
        worst = self.worst if self.worst.relative >= other.worst.relative else other.worst
        return SquaredErrors(self.squared + other.squared, worst, _sum(self.output, other.output))


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The errors of quantizing one role of a batch of experts.

    Attributes:
        role: canonical role.
        format: the weight format, in words.
        method: how scales and codes were chosen.
        weights: number of weights.
        signal: the sum of squared weights.
        errors: errors of the chosen codes and scales.
        nearest: errors of rounding to nearest with the format's usual scales.
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
        """The report of both batches combined; UsageError when role, format or method differ."""
        ours, theirs = (self.role, self.format, self.method), (other.role, other.format, other.method)
        if ours != theirs:
            raise UsageError(f"reports of {', '.join(ours)} and {', '.join(theirs)} cannot be merged.")
        return QuantizationReport(
            *ours,
            self.weights + other.weights,
            self.signal + other.signal,
            self.errors.merge(other.errors),
            self.nearest.merge(other.nearest),
            _sum(self.output, other.output),
        )

    def summary(self) -> dict[str, Any]:
        """JSON data: RMS error, signal-to-noise ratio in dB (None without errors) and the worst block."""
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
        measures: dict[str, Any] = {
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
            measures["output_snr_db"] = _decibels(self.output, errors.output)
        return measures


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _decibels(signal: float, noise: float) -> float | None:
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None

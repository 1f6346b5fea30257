"""The error of a format change: counted per tensor, accumulated over batches of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..quantize import QuantizationReport


@dataclass(frozen=True)
class Cost:
    """The effect of a format change on one matrix of a batch of experts.

    Attributes:
        kind: ``repacked``, ``decoded`` or ``quantized``.
        unit: what is counted: ``weights`` or ``blocks``.
        count: number of units.
        exact: number of units whose values are unchanged.
        report: errors, if weights were quantized.
    """

    kind: str
    unit: str
    count: int
    exact: int
    report: QuantizationReport | None = None

    def merge(self, other: Cost) -> Cost:
        """The sum of two costs of the same kind."""
        report = self.report.merge(other.report) if self.report and other.report else None
        return Cost(self.kind, self.unit, self.count + other.count, self.exact + other.exact, report)

    def to_json(self) -> dict[str, Any]:
        """JSON data; ``lossless`` counts the units whose values are unchanged."""
        if self.report is not None:
            return {"kind": self.kind, **self.report.summary()}
        return {"kind": self.kind, self.unit: self.count, "lossless": self.exact}

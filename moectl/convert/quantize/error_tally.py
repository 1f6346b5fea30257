"""Accumulation of errors, piece by piece, into a report."""

from __future__ import annotations

from dataclasses import dataclass

from ...lazy_torch import Tensor
from ..codecs.blocks import WITHIN, ScaleBlocks
from .error_report import QuantizationReport, SquaredErrors, WorstBlock
from .quantizer_options import Quantizer


def block_sums(blocks: ScaleBlocks, t: Tensor) -> Tensor:
    """``[1, block rows, block columns]``: sums of squares of `t` ``[1, n, k]``."""
    return blocks.split(t).square().sum(WITHIN)


@dataclass(frozen=True)
class ErrorSums:
    """Sums of squares of a piece of a matrix.

    Attributes:
        weights: number of weights.
        signal, errors, nearest: ``[1, block rows, block columns]``: of the weights, of the errors of the
            chosen codes and scales, and of those of rounding to nearest.
        blocks: the blocks of the piece.
        first: its first row.
        outputs: the same three for the outputs, by row, or None.
    """

    weights: int
    signal: Tensor
    errors: Tensor
    nearest: Tensor
    blocks: ScaleBlocks
    first: int
    outputs: list[Tensor] | None = None


class ErrorTally:
    """Accumulates the errors of one role. `begin` sets the expert and the row that come next."""

    def __init__(self, options: Quantizer, role: str) -> None:
        self._options, self._role = options, role
        self._expert = self._row = 0
        self._report: QuantizationReport | None = None

    def begin(self, expert: int, row: int) -> None:
        """The rows added next are those of `expert` from `row` on."""
        self._expert, self._row = expert, row

    def add(self, sums: ErrorSums) -> None:
        """Adds a piece, whose rows are relative to the row of the last `begin`."""
        signal, outputs = sums.signal, sums.outputs
        totals = [None] * 3 if outputs is None else [float(t.double().sum()) for t in outputs]
        self._add(
            QuantizationReport(
                self._role,
                str(self._options.weight),
                self._options.method,
                sums.weights,
                float(signal.double().sum()),
                self._errors(sums.errors, signal, sums.blocks, sums.first, totals[1]),
                self._errors(sums.nearest, signal, sums.blocks, sums.first, totals[2]),
                totals[0],
            )
        )

    def _add(self, report: QuantizationReport) -> None:
        self._report = report if self._report is None else self._report.merge(report)

    def report(self) -> QuantizationReport:
        """The report of everything added so far."""
        assert self._report is not None
        return self._report

    def _errors(
        self, squared: Tensor, signal: Tensor, blocks: ScaleBlocks, first: int, output: float | None
    ) -> SquaredErrors:
        relative = (squared / signal).nan_to_num_(0.0, 0.0, 0.0).sqrt_()
        index = int(relative.argmax())
        row, column = divmod(index, relative.shape[-1])
        worst = WorstBlock(
            self._expert,
            self._row + first + row * blocks.rows,
            column * blocks.columns,
            float(relative.flatten()[index]),
        )
        return SquaredErrors(float(squared.double().sum()), worst, output)

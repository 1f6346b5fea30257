"""Errors added up, piece by piece, into a report."""

from __future__ import annotations

from torch import Tensor

from ..codecs.blocks import WITHIN, Blocks
from .gptq import output_errors
from .options import Quantizer
from .report import Errors, Report, Worst


class Tally:
    """The errors of one role so far. `begin` says which expert, and which of its rows, come next."""

    def __init__(self, options: Quantizer, role: str) -> None:
        self._options, self._role = options, role
        self._expert = self._row = 0
        self._report: Report | None = None

    def begin(self, expert: int, row: int) -> None:
        """The next rows added are those of `expert` from `row` on."""
        self._expert, self._row = expert, row

    def add(
        self, w: Tensor, taken: Tensor, nearest: Tensor, blocks: Blocks, first: int, hessian: Tensor | None
    ) -> None:
        """Adds `taken` - the errors ``[1, n, k]`` of what was taken for `w` - and those of the `nearest`.

        `first` is the first row, counted from the last `begin`; the errors are overwritten.
        """
        outputs = None
        if hessian is not None:
            outputs = [float(output_errors(t[0], hessian).double().sum()) for t in (w, taken, nearest)]
        count, signal = w.numel(), blocks.split(w).square().sum(WITHIN)
        own, theirs = (
            self._errors(t, signal, blocks, first, None if outputs is None else outputs[i + 1])
            for i, t in enumerate((taken, nearest))
        )
        report = Report(
            self._role,
            str(self._options.weight),
            self._options.method,
            count,
            float(signal.double().sum()),
            own,
            theirs,
            None if outputs is None else outputs[0],
        )
        self._report = report if self._report is None else self._report.merge(report)

    def report(self) -> Report:
        """What was added so far."""
        assert self._report is not None
        return self._report

    def _errors(
        self, difference: Tensor, signal: Tensor, blocks: Blocks, first: int, output: float | None
    ) -> Errors:
        squared = blocks.split(difference).square_().sum(WITHIN)
        relative = (squared / signal).nan_to_num_(0.0, 0.0, 0.0).sqrt_()
        at = int(relative.argmax())
        row, column = divmod(at, relative.shape[-1])
        worst = Worst(
            self._expert,
            self._row + first + row * blocks.rows,
            column * blocks.columns,
            float(relative.flatten()[at]),
        )
        return Errors(float(squared.double().sum()), worst, output)

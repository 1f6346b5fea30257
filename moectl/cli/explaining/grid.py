"""A matrix of decisions as blocks: a table, and what its marks mean, each said once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...explain.explanation import GroupExplanation
from ...explain.matrix import Cell, Matrix
from ...problem import Parallel
from ...ranges import ranges
from ..blocks import Block, Entry, Grid, Heading, Line, Listing
from .sections import layers_line
from .standing import fallback_words


class _Notes:
    """Footnotes by their text, numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    def listing(self) -> Iterator[Block]:
        if self.numbers:
            yield Listing(tuple(Entry(f"[{number}]", text) for text, number in self.numbers.items()))


def matrix_blocks(matrix: Matrix, width: int) -> Iterator[Block]:
    """Every layer group's table; groups with the same cells share one."""
    yield Heading(f"{matrix.origin.name} under {matrix.question.policy.name}", 1)
    notes, legend = _Notes(), set[str]()
    size = len(matrix.machines) * len(matrix.parallels)
    tables: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for start in range(0, len(matrix.cells), size):
        cells = matrix.cells[start : start + size]
        rows = _rows(matrix, cells, notes, legend)
        tables.setdefault(rows, []).extend(cells[0].layers)
    for rows, layers in tables.items():
        yield Heading(f"layers {layers_line(tuple(layers))}", 3)
        yield from _table(matrix, rows, width)
    for mark, meaning in _LEGEND.items():
        if mark in legend:
            yield Line(f"{mark}: {meaning}.")
    yield from notes.listing()


_LEGEND = {
    "mono": "takes router logits; the others take top-k ids and weights",
    "!": "the expert weights alone exceed the memory of one GPU",
    "none": "no backend serves",
}


def _rows(
    matrix: Matrix, cells: Sequence[Cell], notes: _Notes, legend: set[str]
) -> tuple[tuple[str, ...], ...]:
    """GPUs with a cell for each deployment; neighbours that agree in all of them share a row."""
    wide = len(matrix.parallels)
    found = []
    for number, machine in enumerate(matrix.machines):
        row = tuple(_cell(matrix, cell, notes, legend) for cell in cells[number * wide : (number + 1) * wide])
        found.append((machine.device.arch, row, machine.key or machine.device.name))
    return tuple(
        (", ".join(name for _, _, name in same), arch, *row)
        for (arch, row), same in groupby(found, key=lambda item: (item[0], item[1]))
    )


def _cell(matrix: Matrix, cell: Cell, notes: _Notes, legend: set[str]) -> str:
    over = matrix.fits(cell.machine, cell.parallel) is False
    marks = ["!"] if over else []
    if cell.answer is None:
        text, reason = "none", cell.refusal
    else:
        text, reason = (
            _said(cell.answer),
            ". ".join(filter(None, (fallback_words(cell.answer), *cell.answer.decision.cut))),
        )
    legend |= {mark for mark in (*marks, *text.split(" ")) if mark in _LEGEND}
    return " ".join([text, *marks, *([notes.mark(reason)] if reason else [])])


def _said(answer: GroupExplanation) -> str:
    chosen = answer.decision.chosen
    if chosen is None or not answer.decision.usable:
        return "none"
    return f"{chosen.backend.name}{' mono' if chosen.variant.monolithic else ''}"


def parallel_name(parallel: Parallel) -> str:
    """``TP 4``, ``TP 1 DP 8 EP``."""
    dp = f" DP {parallel.dp}" if parallel.dp > 1 else ""
    return f"TP {parallel.tp}{dp}{' EP' if parallel.ep else ''}"


def _table(matrix: Matrix, rows: Sequence[tuple[str, ...]], width: int) -> Iterator[Block]:
    """A table where it fits into `width`; else a list, deployments that agree together."""
    names = tuple(parallel_name(parallel) for parallel in matrix.parallels)
    columns = ("GPU", "arch", *names)
    needed = 2 + sum(2 + max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns)))
    if needed <= width:
        yield Grid(columns, tuple(rows))
        return
    yield Listing(tuple(Entry("", f"{arch}: {gpus}", _agreeing(names, cells)) for gpus, arch, *cells in rows))


def _agreeing(names: Sequence[str], cells: Sequence[str]) -> tuple[tuple[str, str], ...]:
    found = []
    for text, same in groupby(zip(names, cells, strict=True), key=lambda pair: pair[1]):
        labels = [name for name, _ in same]
        found.append((labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}", text))
    return tuple(found)


def matrix_lines(matrix: Matrix) -> list[str]:
    """One line a cell: GPU, deployment, layers, backend."""
    return [
        "\t".join(
            (
                cell.machine.key or cell.machine.device.name,
                parallel_name(cell.parallel),
                ranges(cell.layers),
                _said(cell.answer).split(" ")[0] if cell.answer else "none",
            )
        )
        for cell in matrix.cells
    ]

"""The text of matrices: tables, footnotes, lines; of one checkpoint or of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...explain import GroupExplanation
from ...explain.decision_matrix import DecisionMatrix, MatrixCell
from ...explain.decision_words import remark
from ...oracle.registry import versioned
from ...problem.layer_ranges import ranges
from ...problem.moe_problem import Parallel
from ..output import gib
from ..text_blocks import Block, Heading, Listing, ListingEntry, TableBlock, TextLine
from .text import lacking, layers_words, next_higher


class _Footnotes:
    """Footnotes by text, numbered in order of use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    def listing(self) -> Iterator[Block]:
        if self.numbers:
            yield Listing(tuple(ListingEntry(f"[{number}]", text) for text, number in self.numbers.items()))


class _Legend:
    """The marks in a table; `kinds`: whether kernels with fused routing are marked."""

    def __init__(self, kinds: bool) -> None:
        self.kinds, self.marks = kinds, set[str]()


def matrix_blocks(matrix: DecisionMatrix, width: int, verbose: bool = False) -> Iterator[Block]:
    """A table per layer group; groups with the same cells share one. `verbose`: with kinds of kernels."""
    yield Heading(f"{matrix.origin.name}   {versioned(matrix.question.policy.name)}", 1)
    notes, legend = _Footnotes(), _Legend(verbose)
    tables: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for cells in _layer_groups(matrix):
        rows = _rows(matrix, cells, notes, legend)
        tables.setdefault(rows, []).extend(cells[0].layers)
    for rows, layers in tables.items():
        yield Heading(layers_words(tuple(layers)) if len(tables) > 1 else f"all {len(layers)} MoE layers", 3)
        yield from _table(matrix, rows, width)
    yield from _explained(legend, notes)


def _layer_groups(matrix: DecisionMatrix) -> Iterator[tuple[MatrixCell, ...]]:
    """The cells of each layer group."""
    for start in range(0, len(matrix.cells), matrix.columns):
        yield matrix.cells[start : start + matrix.columns]


def _explained(legend: _Legend, notes: _Footnotes) -> Iterator[Block]:
    """What the marks of a table mean, then its footnotes."""
    for mark, meaning in _LEGEND.items():
        if mark in legend.marks:
            yield TextLine(f"{mark}: {meaning}.")
    yield from notes.listing()


_LEGEND = {
    "mono": "routing fused in the kernel; the others take top-k ids and weights",
    "!": "the weights exceed the memory that the engine uses of one GPU",
    "none": "no backend supports this",
}


def _rows(
    matrix: DecisionMatrix, cells: Sequence[MatrixCell], notes: _Footnotes, legend: _Legend
) -> tuple[tuple[str, ...], ...]:
    """GPUs with a cell for each deployment; adjacent GPUs with equal cells share a row."""
    deployments = len(matrix.parallels)
    texts = _cells(matrix, cells, notes, legend)
    rows = []
    for number, machine in enumerate(matrix.machines):
        row = texts[number * deployments : (number + 1) * deployments]
        rows.append((machine.device.arch, row, machine.key or machine.device.name))
    return tuple(
        (", ".join(name for _, _, name in same), arch, *row)
        for (arch, row), same in groupby(rows, key=lambda item: (item[0], item[1]))
    )


def _cells(
    matrix: DecisionMatrix, cells: Sequence[MatrixCell], notes: _Footnotes, legend: _Legend
) -> tuple[str, ...]:
    """A layer group's cell for every GPU and deployment."""
    return tuple(
        _cell(cell, memory is not None and memory.fits is False, notes, legend)
        for cell, memory in zip(cells, matrix.memories, strict=True)
    )


def _cell(cell: MatrixCell, over: bool, notes: _Footnotes, legend: _Legend) -> str:
    marks = ["!"] if over else []
    text = _backend_name(cell.answer)
    reason = remark(cell.answer) if cell.answer else cell.refusal
    chosen = cell.answer.decision.chosen if cell.answer and cell.usable else None
    if legend.kinds and chosen is not None and chosen.variant.monolithic:
        marks.insert(0, "mono")
    legend.marks |= {mark for mark in (*marks, text) if mark in _LEGEND}
    return " ".join([text, *marks, *([notes.mark(reason)] if reason else [])])


def _backend_name(answer: GroupExplanation | None) -> str:
    chosen = answer.decision.chosen if answer and answer.decision.usable else None
    return "none" if chosen is None else chosen.backend.name


def parallel_name(parallel: Parallel) -> str:
    """``TP 4``, ``TP 8 PP 2``, ``TP 1 DP 8 EP``."""
    dp = f" DP {parallel.dp}" if parallel.dp > 1 else ""
    pp = f" PP {parallel.pp}" if parallel.pp > 1 else ""
    return f"TP {parallel.tp}{pp}{dp}{' EP' if parallel.ep else ''}"


def _fits_into(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """True if a table of `rows` below `columns` fits into `width`."""
    return 2 + sum(2 + max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))) <= width


def _table(matrix: DecisionMatrix, rows: Sequence[tuple[str, ...]], width: int) -> Iterator[Block]:
    """A table if it fits into `width`, otherwise a list with equal deployments merged."""
    names = tuple(parallel_name(parallel) for parallel in matrix.parallels)
    columns = ("GPU", "arch", *names)
    if _fits_into(columns, rows, width):
        yield TableBlock(columns, tuple(rows))
        return
    yield Listing(
        tuple(
            ListingEntry("", f"{arch}: {gpus}", _merged_deployments(names, cells))
            for gpus, arch, *cells in rows
        )
    )


def _merged_deployments(names: Sequence[str], cells: Sequence[str]) -> tuple[tuple[str, str], ...]:
    merged = []
    for text, same in groupby(zip(names, cells, strict=True), key=lambda pair: pair[1]):
        labels = [name for name, _ in same]
        merged.append((labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}", text))
    return tuple(merged)


def several_blocks(matrices: Sequence[DecisionMatrix], width: int, verbose: bool = False) -> Iterator[Block]:
    """A row for each checkpoint, or for each of its layer groups that differ.

    Of one GPU and one deployment: backend, with the rejected one of higher priority in a footnote, and
    memory. Of more: a column for each.
    """
    if not matrices:
        return
    first, notes, legend = matrices[0], _Footnotes(), _Legend(verbose)
    alone = first.columns == 1
    gpus = [machine.key or machine.device.name for machine in first.machines]
    deployments = [parallel_name(parallel) for parallel in first.parallels]
    shared = [*(gpus if len(gpus) == 1 else []), *(deployments if len(deployments) == 1 else [])]
    head = f"{len(matrices)} checkpoint{'s' if len(matrices) > 1 else ''}"
    yield Heading(
        "   ".join([head, *([", ".join(shared)] if shared else []), versioned(first.question.policy.name)]), 1
    )
    table: list[tuple[str, str, tuple[str, ...]]] = []
    for matrix in matrices:
        merged: dict[tuple[str, ...], list[int]] = {}
        for cells in _layer_groups(matrix):
            texts = _alone(matrix, cells[0], notes) if alone else _cells(matrix, cells, notes, legend)
            merged.setdefault(texts, []).extend(cells[0].layers)
        for texts, layers in merged.items():
            table.append((matrix.origin.name, ranges(layers) if len(merged) > 1 else "all", texts))
    if alone:
        names: tuple[str, ...] = ("backend", "experts/GPU", "fits")
    else:
        names = tuple(
            " ".join([*([gpu] if len(gpus) > 1 else []), *([tp] if len(deployments) > 1 else [])])
            for gpu in gpus
            for tp in deployments
        )
    by_layers = any(layers != "all" for _, layers, _ in table)
    columns = ("checkpoint", *(("layers",) if by_layers else ()), *names)
    rows = tuple((name, *((layers,) if by_layers else ()), *texts) for name, layers, texts in table)
    if _fits_into(columns, rows, width):
        yield TableBlock(columns, rows, right=frozenset({"experts/GPU"}))
    else:
        yield Listing(
            tuple(
                ListingEntry(
                    "",
                    name if layers == "all" else f"{name}, layers {layers}",
                    tuple(zip(names, texts, strict=True)) if alone else _same_answers(names, texts),
                )
                for name, layers, texts in table
            )
        )
    yield from _explained(legend, notes)


def _alone(matrix: DecisionMatrix, cell: MatrixCell, notes: _Footnotes) -> tuple[str, ...]:
    """Columns of one GPU and one deployment: backend, bytes of experts, whether the weights fit."""
    (memory,) = matrix.memories
    answer = cell.answer
    chosen = answer.decision.chosen if answer and answer.decision.usable else None
    reason = remark(answer) if answer else cell.refusal
    if answer and chosen and not reason and (rejected := next_higher(answer.decision, chosen)):
        reason = f"{rejected.backend.name} has higher priority, but {lacking(rejected)}"
    name = chosen.backend.name if chosen else "none"
    return (
        f"{name} {notes.mark(reason)}" if reason else name,
        gib(memory.experts) if memory else "-",
        {True: "yes", False: "no", None: "unknown"}[memory.fits if memory else None],
    )


def _same_answers(names: Sequence[str], cells: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Each distinct cell with the columns that have it."""
    same: dict[str, list[str]] = {}
    for name, cell in zip(names, cells, strict=True):
        same.setdefault(cell, []).append(name)
    return tuple((cell, ", ".join(labels)) for cell, labels in same.items())


def matrix_lines(matrix: DecisionMatrix) -> list[str]:
    """One line per cell: GPU, deployment, layers, backend."""
    return [
        "\t".join(
            (
                cell.machine.key or cell.machine.device.name,
                parallel_name(cell.parallel),
                ranges(cell.layers),
                _backend_name(cell.answer),
            )
        )
        for cell in matrix.cells
    ]


def several_lines(matrices: Sequence[DecisionMatrix]) -> list[str]:
    """One line per cell: checkpoint, GPU and deployment unless there is one of each, layers, backend."""
    skipped = 2 if matrices and matrices[0].columns == 1 else 0
    return [
        "\t".join((matrix.origin.name, *line.split("\t")[skipped:]))
        for matrix in matrices
        for line in matrix_lines(matrix)
    ]

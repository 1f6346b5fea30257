"""The text of explanations, matrices, differences and counterfactuals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ...explain import GroupExplanation
from ...explain.counterfactual import Counterfactual, Counterfactuals
from ...explain.decision_matrix import DecisionMatrix, MatrixCell
from ...explain.explanation_diff import ChoiceCause, ExplanationDiff, GroupDifference
from ...oracle.backend import UNTRIED
from ...oracle.checks import Verdict
from ...oracle.decision import Candidate, Decision
from ...oracle.registry import policy_named
from ...oracle.verdict_sentences import reasons, sentence
from ...problem.layer_ranges import ranges
from ...problem.moe_problem import Parallel
from ..text_blocks import Block, Heading, LabelledValues, Listing, ListingEntry, TableBlock, TextLine
from .command_line import ExplainCommand


def layers_line(layers: tuple[int, ...]) -> str:
    """``(0-27, 29-47): 47 x``, as engines print models."""
    return f"({ranges(layers)}): {len(layers)} x"


CLOSEST = 3
"""Candidates to name if no backend is supported."""


def fallback_words(answer: GroupExplanation) -> str:
    """Why there is no backend, or what the choice is a fallback from; empty if it is not a fallback."""
    fallback, decision = answer.fallback, answer.decision
    if fallback is None:
        return ""
    if fallback.kind == "none":
        return failure(decision)
    if fallback.kind == "request":
        name = str(decision.inputs.requested)
        requested = policy_named(decision.inputs.policy).requested_backends(name)
        failing = [c for c in decision.candidates if c.failed and c.backend.name in requested]
        nearest = min(failing, key=lambda c: len(c.failed), default=None)
        return f"{name} was requested, but {_lacks(nearest) if nearest else 'is not what runs'}"
    if fallback.kind == "emulation":
        return "emulation dequantizes the weights and multiplies in 16 bits: slow"
    assert fallback.candidate is not None
    missing = ", and ".join(dict.fromkeys(sentence(verdict) for verdict in fallback.verdicts))
    if fallback.kind == "method":
        return (
            f"{decision.method} replaces {fallback.method}, whose {fallback.candidate.backend.name} has "
            f"higher priority and fits this GPU. {missing}"
        )
    return f"{fallback.candidate.backend.name} has higher priority and fits, but {missing}"


def refusals(decision: Decision) -> Iterator[str]:
    """Why `decision` has no backend, in sentences; for a request, the failed checks of its nearest class."""
    yield from map(str, decision.gates)
    requested = decision.inputs.requested if decision.chosen is None and not decision.gates else None
    if requested and decision.candidates:
        nearest = min(decision.candidates, key=lambda c: len(c.failed))
        yield f"{requested} was requested by name, but it {_lacks(nearest)}"
    elif decision.error:
        yield decision.error


def _lacks(candidate: Candidate) -> str:
    return ", and ".join(dict.fromkeys(map(sentence, candidate.failed)))


def failure(decision: Decision) -> str:
    """Why there is no backend: the engine's refusals, or the nearest candidates with their reasons."""
    if decision.gates:
        return "; ".join(map(str, decision.gates))
    if decision.chosen is not None:
        return f"{decision.chosen.backend.name} would be chosen, but {decision.error}"
    near = [c for c in decision.candidates if "arch" not in c.reasons()]
    near = sorted(near, key=lambda c: len(c.failed))[:CLOSEST]
    if not near:
        return f"no candidate of {decision.route} supports {decision.inputs.device.arch}"
    sentences = (f"{c.backend.name} {_lacks(c)}" for c in near)
    return ". ".join(dict.fromkeys(sentences))


LATER = "supported, lower priority"


@dataclass(frozen=True)
class CandidateRow:
    """Adjacent experts classes of one backend with the same answer."""

    candidates: tuple[Candidate, ...]
    answer: str
    reasons: tuple[tuple[str, str], ...]
    untried: bool = False

    @property
    def first(self) -> Candidate:
        return self.candidates[0]

    @property
    def rank(self) -> str:
        """Ranks in the priority order, counted from 1."""
        ranks = [candidate.rank + 1 for candidate in self.candidates]
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"

    @property
    def experts(self) -> str:
        """The experts classes, each once."""
        return ", ".join(dict.fromkeys(c.variant.experts for c in self.candidates))

    @property
    def head(self) -> str:
        """Backend and experts classes, with the answer if it is not a list of reasons."""
        untried = f", {UNTRIED}" if self.untried else ""
        return (
            f"{self.first.backend.name} ({self.experts}){untried}{f': {self.answer}' if self.answer else ''}"
        )


def answer_of(candidate: Candidate, decision: Decision) -> str:
    """``chosen``, or why it is not although it is usable; otherwise empty."""
    if decision.chosen is not None and candidate is decision.chosen:
        return "chosen" if decision.usable else "would be chosen, but see above"
    return LATER if candidate.usable else ""


def rows_of(decision: Decision) -> tuple[CandidateRow, ...]:
    """The candidates of `decision` in priority order, adjacent ones merged."""
    rows: list[CandidateRow] = []
    for candidate in decision.candidates:
        untried = candidate.usable and candidate.backend.untried(decision.inputs.device)
        row = CandidateRow((candidate,), answer_of(candidate, decision), reasons(candidate), untried)
        last = rows[-1] if rows else None
        if (
            last
            and last.first.backend.name == candidate.backend.name
            and (last.answer, last.reasons) == (row.answer, row.reasons)
        ):
            rows[-1] = replace(last, candidates=(*last.candidates, candidate))
        else:
            rows.append(row)
    return tuple(rows)


def on_other_platforms(row: CandidateRow, decision: Decision) -> bool:
    """True if all experts classes of `row` are for platforms other than that of the decision's device."""
    platform = decision.inputs.device.platform
    return all(
        not c.usable
        and c.variant.capability.arch is not None
        and all(arch.platform != platform for arch in c.variant.capability.arch)
        for c in row.candidates
    )


def candidate_listing(rows: Iterable[CandidateRow]) -> Listing:
    """`rows` with their reasons."""
    return Listing(
        tuple(
            ListingEntry(row.rank, row.head, row.reasons, strong=row.answer.startswith("chosen"))
            for row in rows
        )
    )


def candidate_blocks(decision: Decision) -> Iterator[Listing]:
    """The candidates in priority order."""
    yield candidate_listing(rows_of(decision))


class _Footnotes:
    """Footnotes by text, numbered in order of use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    def listing(self) -> Iterator[Block]:
        if self.numbers:
            yield Listing(tuple(ListingEntry(f"[{number}]", text) for text, number in self.numbers.items()))


def matrix_blocks(matrix: DecisionMatrix, width: int) -> Iterator[Block]:
    """A table per layer group; groups with the same cells share one."""
    yield Heading(f"{matrix.origin.name} under {matrix.question.policy.name}", 1)
    notes, legend = _Footnotes(), set[str]()
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
            yield TextLine(f"{mark}: {meaning}.")
    yield from notes.listing()


_LEGEND = {
    "mono": "routing fused in the kernel; the others take top-k ids and weights",
    "!": "the expert weights alone exceed the memory of one GPU",
    "none": "no backend supports this",
}


def _rows(
    matrix: DecisionMatrix, cells: Sequence[MatrixCell], notes: _Footnotes, legend: set[str]
) -> tuple[tuple[str, ...], ...]:
    """GPUs with a cell for each deployment; adjacent GPUs with equal cells share a row."""
    deployments = len(matrix.parallels)
    rows = []
    for number, machine in enumerate(matrix.machines):
        row = tuple(
            _cell(matrix, cell, notes, legend)
            for cell in cells[number * deployments : (number + 1) * deployments]
        )
        rows.append((machine.device.arch, row, machine.key or machine.device.name))
    return tuple(
        (", ".join(name for _, _, name in same), arch, *row)
        for (arch, row), same in groupby(rows, key=lambda item: (item[0], item[1]))
    )


def _cell(matrix: DecisionMatrix, cell: MatrixCell, notes: _Footnotes, legend: set[str]) -> str:
    over = matrix.fits(cell.machine, cell.parallel) is False
    marks = ["!"] if over else []
    if cell.answer is None:
        text, reason = "none", cell.refusal
    else:
        text, reason = (
            _backend_name(cell.answer),
            ". ".join(filter(None, (fallback_words(cell.answer), *cell.answer.decision.cut))),
        )
    legend |= {mark for mark in (*marks, *text.split(" ")) if mark in _LEGEND}
    return " ".join([text, *marks, *([notes.mark(reason)] if reason else [])])


def _backend_name(answer: GroupExplanation) -> str:
    chosen = answer.decision.chosen
    if chosen is None or not answer.decision.usable:
        return "none"
    return f"{chosen.backend.name}{' mono' if chosen.variant.monolithic else ''}"


def parallel_name(parallel: Parallel) -> str:
    """``TP 4``, ``TP 8 PP 2``, ``TP 1 DP 8 EP``."""
    dp = f" DP {parallel.dp}" if parallel.dp > 1 else ""
    pp = f" PP {parallel.pp}" if parallel.pp > 1 else ""
    return f"TP {parallel.tp}{pp}{dp}{' EP' if parallel.ep else ''}"


def _table(matrix: DecisionMatrix, rows: Sequence[tuple[str, ...]], width: int) -> Iterator[Block]:
    """A table if it fits into `width`, otherwise a list with equal deployments merged."""
    names = tuple(parallel_name(parallel) for parallel in matrix.parallels)
    columns = ("GPU", "arch", *names)
    needed = 2 + sum(2 + max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns)))
    if needed <= width:
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


def matrix_lines(matrix: DecisionMatrix) -> list[str]:
    """One line per cell: GPU, deployment, layers, backend."""
    return [
        "\t".join(
            (
                cell.machine.key or cell.machine.device.name,
                parallel_name(cell.parallel),
                ranges(cell.layers),
                _backend_name(cell.answer).split(" ")[0] if cell.answer else "none",
            )
        )
        for cell in matrix.cells
    ]


Answers = tuple[tuple[tuple[int, ...], Counterfactuals], ...]
"""Layers with their counterfactuals."""


def why_blocks(command: ExplainCommand, answers: Answers) -> Iterator[Block]:
    """The answers for each layer group, equal ones merged."""
    groups: dict[str, tuple[list[int], Counterfactuals]] = {}
    for layers, why in answers:
        groups.setdefault(str(why.to_json()), ([], why))[0].extend(layers)
    for numbers, why in groups.values():
        yield Heading(f"what would have to change for {why.backend}: layers {layers_line(tuple(numbers))}")
        yield from _group_answers(command, why)


def _group_answers(command: ExplainCommand, why: Counterfactuals) -> Iterator[Block]:
    if why.chosen:
        yield TextLine(f"Nothing: {why.backend} is chosen.", strong=True)
    elif why.answers:
        yield Listing(
            tuple(_answer_entry(command, number, answer) for number, answer in enumerate(why.answers, 1))
        )
        yield TextLine("Each answer was checked by deciding again with the change made.")
    else:
        yield TextLine("No change helps.", strong=True)
        if why.reason:
            yield TextLine(f"{why.reason[0].upper()}{why.reason[1:]}.")
        yield Listing(
            tuple(
                ListingEntry("", candidate.variant.experts, (("because", f"it {sentence(verdict)}"),))
                for candidate, verdict in why.remaining
            )
        )
    if not why.complete:
        yield TextLine("The search was cut short; there may be further answers.")


def _answer_entry(command: ExplainCommand, number: int, answer: Counterfactual) -> ListingEntry:
    chosen = answer.decision.chosen
    largest = max(answer.changes, key=lambda change: change.size)
    # The largest change is last, with its alternatives.
    ordered = sorted(answer.changes, key=lambda change: change.size)
    also = [change.text for change in answer.also]
    steps = [change.text for change in ordered if change is not largest]
    steps.append(_alternatives([largest.text, *also]))
    return ListingEntry(
        str(number),
        ", and ".join(steps),
        (
            ("gets", chosen.variant.experts if chosen else ""),
            ("check", command.changed(answer.changes)),
        ),
    )


def _alternatives(texts: list[str]) -> str:
    """``use b200 (sm100) or b300 (sm103)``: texts with the same beginning are merged."""
    by_first_word: dict[str, list[list[str]]] = {}
    for text in texts:
        by_first_word.setdefault(text.split(" ")[0], []).append(text.split(" "))
    return ", or ".join(_merged(words) for words in by_first_word.values())


def _merged(texts: list[list[str]]) -> str:
    shortest = min(map(len, texts)) - 1
    shared = next((i for i in range(shortest) if len({words[i] for words in texts}) > 1), shortest)
    first, *rest = (" ".join(words[shared:]) for words in texts)
    start = " ".join(texts[0][:shared])
    endings = first if not rest else f"{', '.join([first, *rest[:-1]])} or {rest[-1]}"
    return f"{start} {endings}".strip()


def why_document(command: ExplainCommand, answers: Answers) -> list[dict[str, Any]]:
    """The answers for each layer group as plain data, each with the command that checks it."""
    return [
        {
            "layers": list(layers),
            **why.to_json(),
            "answers": [
                {**answer.to_json(), "command": command.changed(answer.changes)} for answer in why.answers
            ],
        }
        for layers, why in answers
    ]


def why_lines(command: ExplainCommand, answers: Answers) -> list[str]:
    """One line per group: layers, and the command with the smallest change."""
    lines = []
    for layers, why in answers:
        answer = command.changed(why.answers[0].changes) if why.answers else "nothing helps"
        lines.append(f"{ranges(layers)}\t{'chosen' if why.chosen else answer}")
    return lines


def difference_blocks(difference: ExplanationDiff) -> Iterator[Block]:
    """Changed inputs, then each group's choice with the causes."""
    yield Heading("what changed", 1)
    if difference.empty:
        yield TextLine("Nothing: inputs, choices, order and verdicts are the same.", strong=True)
        return
    if not difference.chosen_otherwise:
        yield TextLine("Every layer gets the same backend as before.", strong=True)
    if difference.inputs:
        yield LabelledValues(
            tuple(
                (change.path, f"{_value(change.old)} -> {_value(change.new)}") for change in difference.inputs
            )
        )
    for layers, when in ((difference.only_old, "before"), (difference.only_new, "now")):
        if layers:
            yield TextLine(f"Layers {layers_line(layers)} exist only {when}.")
    for group in difference.groups:
        yield from _group_difference(group)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "absent" if value is None else str(value) or "present"


def _choice(choice: tuple[str, str] | None) -> str:
    return f"{choice[0]} ({choice[1]})" if choice else "no backend"


def _cause(cause: ChoiceCause) -> str:
    return " ".join([cause.says, *filter(None, ["; ".join(dict.fromkeys(map(sentence, cause.verdicts)))])])


def _rank_change(old: int, new: int) -> str:
    if not old or not new:
        return f"is new, at rank {new}" if new else f"is removed, was at rank {old}"
    return f"moves from rank {old} to {new}"


def _group_difference(group: GroupDifference) -> Iterator[Block]:
    yield Heading(f"layers {layers_line(group.layers)}")
    if group.old_choice != group.new_choice:
        rows = [("choice", f"{_choice(group.old_choice)} -> {_choice(group.new_choice)}")]
        rows += [("because", _cause(rule)) for rule in group.rules]
        yield LabelledValues(tuple(rows), strong=frozenset({"choice"}))
    yield LabelledValues(
        tuple(
            ("order", f"{move.backend} ({move.experts}) {_rank_change(move.old, move.new)}")
            for move in group.moved
        )
    )
    if group.failures and group.old_choice == group.new_choice:
        yield LabelledValues(tuple(zip(("failed with", "fails with"), group.failures, strict=True)))
    by_verdicts: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for change in group.candidates:
        name = f"{change.backend} ({change.experts})"
        by_verdicts.setdefault(_changed_verdicts(change.old, change.new), []).append(name)
    if by_verdicts:
        yield Heading("verdicts that changed", 3)
        yield Listing(
            tuple(ListingEntry("", ", ".join(names), lines) for lines, names in by_verdicts.items())
        )


def _changed_verdicts(old: Sequence[Verdict], new: Sequence[Verdict]) -> tuple[tuple[str, str], ...]:
    return tuple(
        dict.fromkeys(
            (label, sentence(verdict))
            for label, verdicts in (("no longer", old), ("now", new))
            for verdict in verdicts
        )
    )

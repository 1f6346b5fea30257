"""The text of candidates, differences and counterfactuals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...explain.counterfactual import Counterfactual, Counterfactuals
from ...explain.explanation_diff import ChoiceCause, ExplanationDiff, GroupDifference
from ...oracle.backend import UNTRIED
from ...oracle.checks import Verdict
from ...oracle.decision import Candidate, Decision
from ...oracle.verdict_sentences import predicate, reasons, sentence
from ...problem.layer_ranges import layers_of, ranges
from ..output import count, gib
from ..text_blocks import Block, Heading, LabelledValues, Listing, ListingEntry, TextLine
from .command_line import ExplainCommand


def layers_words(layers: tuple[int, ...]) -> str:
    """``layers 0-27, 29-47 (47)``, or ``layer 0``."""
    return layers_of(layers) + (f" ({len(layers)})" if len(layers) > 1 else "")


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
        """Ranks in the priority order."""
        ranks = [candidate.rank for candidate in self.candidates]
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
        untried = candidate.usable and candidate.backend.untried(
            decision.inputs.device, decision.problem.scheme
        )
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


def next_higher(decision: Decision, chosen: Candidate) -> Candidate | None:
    """The candidate of highest priority that was rejected before `chosen`, of another backend and kernel."""
    for row in rows_of(decision):
        if row.first.rank >= chosen.rank:
            return None
        # A usable one was slower by measured times, as the reason says.
        if (
            row.first.failed
            and not on_other_platforms(row, decision)
            and row.first.backend.name != chosen.backend.name
        ):
            return row.first
    return None


def lacking(candidate: Candidate) -> str:
    """The first failing check, and how many there are besides."""
    sentences = list(dict.fromkeys(map(sentence, candidate.failed)))
    more = f" (and {count(len(sentences) - 1, 'more check')} failed)" if len(sentences) > 1 else ""
    return f"{sentences[0]}{more}"


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


Answers = tuple[tuple[tuple[int, ...], Counterfactuals], ...]
"""Layers with their counterfactuals."""


def why_blocks(command: ExplainCommand, answers: Answers) -> Iterator[Block]:
    """The answers for each layer group, equal ones merged."""
    groups: dict[str, tuple[list[int], Counterfactuals]] = {}
    for layers, why in answers:
        groups.setdefault(str(why.to_json()), ([], why))[0].extend(layers)
    for numbers, why in groups.values():
        yield Heading(f"why not {why.backend}: {layers_words(tuple(numbers))}")
        yield LabelledValues(tuple((backend, reason) for backend, reason in why.why_not))
        yield from _group_answers(command, why)


def _group_answers(command: ExplainCommand, why: Counterfactuals) -> Iterator[Block]:
    if why.chosen:
        yield TextLine(f"{why.backend} is chosen.", strong=True)
    elif why.answers:
        yield TextLine("what would make it the choice", strong=True)
        yield Listing(
            tuple(_answer_entry(command, number, answer) for number, answer in enumerate(why.answers, 1))
        )
        yield TextLine("Each answer was checked by deciding again with the change made.")
    else:
        yield TextLine("No change helps.", strong=True)
        if why.reason and why.reason not in dict(why.why_not).values():
            yield TextLine(f"{why.reason[0].upper()}{why.reason[1:]}.")
        yield Listing(
            tuple(
                ListingEntry("", candidate.variant.experts, (("because", f"it {predicate(verdict)}"),))
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
                (change.path, f"{_value(change.old, change.path)} -> {_value(change.new, change.path)}")
                for change in difference.inputs
            )
        )
    for layers, when in ((difference.only_old, "before"), (difference.only_new, "now")):
        if layers:
            yield TextLine(f"Only {when}: {layers_words(layers)}.")
    for group in difference.groups:
        yield from _group_difference(group)


_UNITS = {"bandwidth": "TB/s", "bf16_flops": "TFLOP/s", "fp8_flops": "TFLOP/s", "fp4_flops": "TFLOP/s"}
"""Units of a device's rates."""


def _value(value: Any, path: str = "") -> str:
    """An input as text: figures of devices with their units, others as they are."""
    name = path.removeprefix("device.")
    if name != path and isinstance(value, (int, float)):
        if name == "memory_bytes":
            return gib(value)
        if unit := _UNITS.get(name):
            return f"{value / 1e12:.4g} {unit}" if value else "none"
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
    yield Heading(layers_words(group.layers))
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

"""Which decisions differ between two releases of an engine, and by which rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..files.records import to_json
from ..oracle.decision import Decision
from ..oracle.registry import engine_named
from ..oracle.verdict_sentences import sentence
from ..problem.moe_problem import Parallel
from .decision_matrix import DecisionMatrix, MatrixCell
from .explanation_diff import Document, group_difference

NONE = ""
"""The backend of a decision without a working one."""


@dataclass(frozen=True)
class DecisionChange:
    """A decision that two releases make differently.

    Attributes:
        layers: of the checkpoint, with the weights of `scheme`.
        gpu: name of the device.
        before, after: the backends; empty without a working one.
        causes: the rules that did it, as sentences.
        reported: what such a change did to someone, with the public thread that says it.
    """

    checkpoint: str
    layers: tuple[int, ...]
    scheme: str
    gpu: str
    parallel: Parallel
    before: str
    after: str
    causes: tuple[str, ...]
    reported: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dict(to_json(self))


@dataclass(frozen=True)
class ChangeGroup:
    """Changes of the same kind: the same backends, scheme and causes on several machines and checkpoints."""

    before: str
    after: str
    scheme: str
    causes: tuple[str, ...]
    reported: tuple[str, ...]
    changes: tuple[DecisionChange, ...]


def decision_changes(
    before: Sequence[DecisionMatrix], after: Sequence[DecisionMatrix]
) -> Iterator[DecisionChange]:
    """The decisions that differ, of the same checkpoints, machines and deployments in the same order.

    Those that one side has no rules for are left out (`uncovered`).
    """
    for old, new in zip(before, after, strict=True):
        reports = engine_named(new.question.policy.name).reports
        for was, now in zip(old.cells, new.cells, strict=True):
            if _backend(was) != _backend(now) and not (was.uncovered or now.uncovered):
                yield DecisionChange(
                    new.origin.name,
                    now.layers,
                    str(now.problem.scheme),
                    now.machine.device.name,
                    now.parallel,
                    _backend(was),
                    _backend(now),
                    tuple(_causes(was, now)),
                    tuple(
                        report.says
                        for report in reports
                        if report.applies(old.question.policy.name, new.question.policy.name)
                        and report.fits(now.problem, now.machine.device, _backend(was), _backend(now))
                    ),
                )


def uncovered(before: Sequence[DecisionMatrix], after: Sequence[DecisionMatrix]) -> int:
    """How many decisions are left out, as one side has no rules for them."""
    return sum(
        was.uncovered or now.uncovered
        for old, new in zip(before, after, strict=True)
        for was, now in zip(old.cells, new.cells, strict=True)
    )


def change_groups(changes: Iterable[DecisionChange]) -> list[ChangeGroup]:
    """`changes` by kind, the most frequent first."""
    kinds: dict[tuple[str, str, str, tuple[str, ...], tuple[str, ...]], list[DecisionChange]] = {}
    for change in changes:
        kind = (change.before, change.after, change.scheme, change.causes, change.reported)
        kinds.setdefault(kind, []).append(change)
    groups = [ChangeGroup(*kind, tuple(alike)) for kind, alike in kinds.items()]
    return sorted(groups, key=lambda group: -len(group.changes))


def _backend(cell: MatrixCell) -> str:
    chosen = cell.answer.decision.chosen if cell.answer and cell.usable else None
    return chosen.backend.name if chosen else NONE


def _causes(was: MatrixCell, now: MatrixCell) -> Iterator[str]:
    """Sentences: what one release refuses, or the rules that changed the choice."""
    if was.answer is None or now.answer is None:
        if now.refusal:
            yield f"it is refused: {now.refusal}"
        if was.refusal:
            yield f"it was refused: {was.refusal}"
        return
    difference = group_difference(now.layers, _document(was.answer.decision), _document(now.answer.decision))
    for cause in difference.rules if difference else ():
        verdicts = "; ".join(dict.fromkeys(map(sentence, cause.verdicts)))
        yield f"{cause.says} {verdicts}".strip()


def _document(decision: Decision) -> Document:
    """A decision as a JSON document has it."""
    plain: Document = json.loads(json.dumps(decision.to_json(), default=list))
    return plain

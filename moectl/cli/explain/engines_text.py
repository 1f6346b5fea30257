"""The text of one checkpoint under every engine: a line for each, with its backend and what decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...explain import GroupExplanation
from ...explain.decision_matrix import DecisionMatrix, MatrixCell
from ...explain.decision_words import because, fallback_words, remark
from ...oracle.decision import FROM_SOURCE
from ...oracle.registry import engine_named
from ...problem.layer_ranges import layers_of
from ..text_blocks import Block, Heading, LabelledValues
from .summary import backend_title, deployment_words
from .text import lacking, next_higher

NONE = "none"

MORE = "-v: every candidate; --engine NAME: one in full"


def engine_blocks(answers: Sequence[DecisionMatrix], alone: bool = True) -> Iterator[Block]:
    """The checkpoint and deployment, and a line for each engine; `alone`: nothing follows."""
    first = answers[0]
    (machine,), (parallel,) = first.machines, first.parallels
    head = (first.origin.name, deployment_words(parallel, machine.device), "every engine")
    yield Heading("   ".join(part.replace(" ", "\u00a0") for part in head), 1)
    rows, tones = [], {}
    for answer in answers:
        engine = engine_named(answer.question.policy.name).versioned
        rows.append((engine, _answer(answer)))
        tones[engine] = "good" if all(cell.usable for cell in answer.cells) else "wrong"
    yield LabelledValues(tuple(rows), tones=tones)
    if alone:
        yield LabelledValues((("more", MORE),), tones={"more": "dim"})


def engine_lines(answers: Sequence[DecisionMatrix]) -> list[str]:
    """A line for each engine: its name, backends, reason."""
    return [
        "\t".join((answer.question.policy.name, _backends(answer), _reasons(answer))) for answer in answers
    ]


def engines_document(answers: Sequence[DecisionMatrix]) -> list[dict[str, Any]]:
    """The same as plain data."""
    rows = []
    for answer in answers:
        engine = engine_named(answer.question.policy.name)
        chosen = [_name(cell) for cell in answer.cells]
        rows.append(
            {
                "policy": engine.name,
                "title": engine.versioned,
                "usable": all(cell.usable for cell in answer.cells),
                "backends": [name for name in dict.fromkeys(chosen) if name != NONE],
                "because": _reasons(answer),
            }
        )
    return rows


def _name(cell: MatrixCell, titled: bool = False) -> str:
    decision = cell.answer.decision if cell.answer and cell.usable else None
    if decision is None or decision.chosen is None:
        return NONE
    return backend_title(decision, decision.chosen) if titled else decision.chosen.backend.name


def _answer(answer: DecisionMatrix) -> str:
    """Backend and reason; of layers with different ones, each."""
    alike: dict[tuple[str, str], list[int]] = {}
    for cell in answer.cells:
        alike.setdefault((_name(cell, titled=True), _reason(cell)), []).extend(cell.layers)
    if len(alike) == 1:
        return ": ".join(next(iter(alike)))
    return "; ".join(f"{layers_of(layers)} {name}: {reason}" for (name, reason), layers in alike.items())


def _backends(answer: DecisionMatrix) -> str:
    """The backends, each once."""
    return ",".join(dict.fromkeys(map(_name, answer.cells)))


def _reasons(answer: DecisionMatrix) -> str:
    """Why, each reason once."""
    return "; ".join(dict.fromkeys(map(_reason, answer.cells)))


def _reason(cell: MatrixCell) -> str:
    """What decided: a refusal, a backend that was passed over, or the priority order."""
    if cell.answer is None:
        return cell.refusal
    decision = cell.answer.decision
    read = f" ({FROM_SOURCE})" if any(note.startswith(FROM_SOURCE) for note in decision.notes) else ""
    return _decided(cell, cell.answer) + read


def _decided(cell: MatrixCell, answer: GroupExplanation) -> str:
    decision = answer.decision
    if not cell.usable or decision.chosen is None:
        return remark(answer) or because(decision)
    passed = fallback_words(answer)
    if not passed and (rejected := next_higher(decision, decision.chosen)):
        passed = f"not {rejected.backend.name}: {lacking(rejected)}"
    return "; ".join(filter(None, (because(decision), passed, *decision.warnings)))

"""Explanations made again from their JSON documents, without the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.model import Origin
from ..errors import CheckpointError, UsageError
from ..oracle.decision import replay_inputs
from ..oracle.registry import policy_named
from .explanation import Explanation, GroupExplanation, Question, explained
from .machines import Machine
from .matrix import Cell, Matrix
from .situation import Situation

MAX_BYTES = 64 << 20
"""Size above which a file is no document of ours."""


def read_document(path: Path) -> Mapping[str, Any]:
    """The JSON document in `path`; UsageError when it is not one of `moectl explain --json`."""
    hint = "make one with moectl explain CKPT --json"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is too large for a document of moectl explain", hint=hint)
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{path} is not a JSON document: {error}", hint=hint) from error
    if not isinstance(document, Mapping) or not ("groups" in document or "rows" in document):
        raise UsageError(f"{path} is not a document of moectl explain", hint=hint)
    return document


def _of(document: Mapping[str, Any], key: str, kind: type) -> Any:
    """Entry `key`, which must be a `kind`; CheckpointError says so when it is not."""
    value = document.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(
            f"the document's {key!r} must be {kind.__name__}, got {type(value).__name__}",
            hint="make it again with moectl explain CKPT --json",
        )
    return value


def _origin(document: Mapping[str, Any]) -> Origin:
    found = _of(document, "checkpoint", dict)
    path = found.get("path")
    return Origin(
        kind=str(found.get("source")),
        name=str(found.get("name")),
        revision=found.get("revision"),
        path=Path(path) if isinstance(path, str) else None,
        note=str(found.get("note") or ""),
    )


def replay(document: Mapping[str, Any]) -> tuple[Explanation, tuple[Situation, ...]]:
    """The explanation that the inputs in `document` give now, and what each layer group rests on.

    Raises UsageError or CheckpointError when the document is not whole.
    """
    groups: list[GroupExplanation] = []
    situations = []
    for found in _of(document, "groups", list):
        inputs = replay_inputs(_of(found, "decision", dict))
        situation = Situation(
            inputs.problem,
            inputs.device,
            inputs.packages,
            policy_named(inputs.policy),
            inputs.requested,
            inputs.allow_fallback,
        )
        others = [policy_named(str(other.get("policy"))) for other in found.get("others", ())]
        layers = tuple(int(number) for number in _of(found, "layers", list))
        notes = tuple(map(str, found.get("notes", ())))
        details = {str(name): str(value) for name, value in dict(found.get("details") or {}).items()}
        sources = _of(found, "sources", dict)
        groups.append(explained(layers, situation, sources, notes, others, details))
        situations.append(situation)
    if not situations:
        raise CheckpointError("the document has no layer groups, so there is nothing to decide again")
    first = situations[0]
    explanation = Explanation(
        _origin(document),
        first.device,
        first.packages,
        first.problem.parallel,
        first.policy.name,
        tuple(groups),
    )
    return explanation, tuple(situations)


def replay_matrix(document: Mapping[str, Any]) -> Matrix:
    """The matrix that the inputs in `document` give now; what was refused before it was asked stays so.

    Raises UsageError or CheckpointError when the document is not whole.
    """
    policy = policy_named(str(document.get("policy")))
    requested = document.get("requested")
    cells = []
    machines: dict[str, Machine] = {}
    for row in _of(document, "rows", list):
        layers = tuple(int(number) for number in _of(row, "layers", list))
        key = str(row.get("gpu"))
        inputs = replay_inputs(_of(row, "decision", dict))
        machine = machines.setdefault(key, Machine(inputs.device, inputs.packages, key))
        answer, refusal = None, str(row.get("refusal") or "")
        if not refusal:
            situation = Situation(
                inputs.problem, inputs.device, inputs.packages, policy, requested, inputs.allow_fallback
            )
            answer = explained(layers, situation, {})
        cells.append(Cell(machine, inputs.problem.parallel, layers, answer, refusal, inputs.problem))
    if not cells:
        raise CheckpointError("the document has no rows, so there is nothing to decide again")
    parallels = tuple(dict.fromkeys(cell.parallel for cell in cells))
    question = Question(policy, parallels[0], requested)
    return Matrix(_origin(document), question, tuple(machines.values()), parallels, tuple(cells))

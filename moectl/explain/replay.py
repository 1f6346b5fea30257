"""Explanations repeated from their JSON documents, without the checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import READABLE_SCHEMAS, SCHEMA_VERSION
from ..checkpoint.checkpoint import Origin
from ..checkpoint.config.fields import LIMITS
from ..errors import UsageError
from ..files.records import from_json, to_json
from ..files.safe_reading import read_given
from ..files.strict_json import VALUES_LIMIT, count_values
from ..oracle.registry import policy_named
from ..oracle.selection_inputs import SelectionInputs, replay_inputs
from ..problem.moe_problem import Dims
from ..problem.other_weights import OtherWeights
from ..problem.schemes import FULL
from .assumed_machines import AssumedMachine
from .decision_matrix import DecisionMatrix, MatrixCell
from .explanation import Explanation, GroupExplanation, Question, explained


def read_document(path: Path) -> Mapping[str, Any]:
    """The JSON document in `path`; UsageError when it is not one of `moectl explain --json`."""
    hint = "make one with moectl explain CKPT --json"
    data = read_given(path, "a document of moectl explain --json")
    if count_values(data) > VALUES_LIMIT:
        raise UsageError(f"{path} has more than {VALUES_LIMIT} values", hint=hint)
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON document: {error}", hint=hint) from error
    if not isinstance(document, Mapping) or not ("groups" in document or "rows" in document):
        raise UsageError(f"{path} is not a document of moectl explain", hint=hint)
    version = document.get("schema_version", SCHEMA_VERSION)
    if version not in READABLE_SCHEMAS:
        raise UsageError(
            f"{path} has schema version {version!r}, this moectl reads "
            f"{' or '.join(map(str, READABLE_SCHEMAS))}",
            hint="use the moectl that wrote it, or make it again with moectl explain CKPT --json",
        )
    return document


def _of(document: Mapping[str, Any], key: str, kind: type) -> Any:
    """Entry `key` of `document`. Raises UsageError if it is not a `kind`."""
    value = document.get(key)
    if not isinstance(value, kind):
        raise UsageError(
            f"the document's {key!r} must be {kind.__name__}, got {type(value).__name__}",
            hint="make it again with moectl explain CKPT --json",
        )
    return value


def _sources(group: Mapping[str, Any]) -> Mapping[str, str]:
    """Where the facts of a group of layers come from, by name."""
    sources: Mapping[str, str] = _of(group, "sources", dict)
    if not all(isinstance(source, str) for source in sources.values()):
        raise UsageError(
            "the document's 'sources' must be strings",
            hint="make it again with moectl explain CKPT --json",
        )
    return sources


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    objects = _of(document, key, list)
    if not all(isinstance(item, dict) for item in objects):
        raise UsageError(f"the document's {key!r} must hold objects", hint="make it again with --json")
    return list(objects)


def _layers(document: Mapping[str, Any]) -> tuple[int, ...]:
    layers = _of(document, "layers", list)
    if not layers or not all(type(number) is int and 0 <= number < LIMITS["layers"] for number in layers):
        raise UsageError(
            f"the document's 'layers' must be numbers from 0 to {LIMITS['layers'] - 1}",
            hint="make it again with moectl explain CKPT --json",
        )
    return tuple(layers)


def _checkpoints(document: Mapping[str, Any]) -> dict[str, tuple[Origin, OtherWeights | None]]:
    """The checkpoints by name, each with its other weights.

    Older documents have one, with those bytes beside it, if at all.
    """
    if "checkpoints" in document:
        listed = _objects(document, "checkpoints")
    else:
        listed = [
            {"other_weight_bytes": document.get("other_weight_bytes"), **_of(document, "checkpoint", dict)}
        ]
    if not listed:
        raise UsageError("the document has no checkpoints, so there is nothing to replay")
    return {str(entry.get("name")): (_origin(entry), _other_weights(entry)) for entry in listed}


def _origin(entry: Mapping[str, Any]) -> Origin:
    path, revision = entry.get("path"), entry.get("revision")
    return Origin(
        kind=str(entry.get("source")),
        name=str(entry.get("name")),
        revision=revision if isinstance(revision, str) else None,
        path=Path(path) if isinstance(path, str) else None,
        note=str(entry.get("note") or ""),
    )


def _other_weights(entry: Mapping[str, Any]) -> OtherWeights | None:
    """The recorded other weights of a checkpoint; None if they are not known.

    Older documents have their bytes alone, which are then taken for evenly sharded.
    """
    value, size = entry.get("other_weights"), entry.get("other_weight_bytes")
    if value is None and isinstance(size, int) and not isinstance(size, bool):
        value = to_json(OtherWeights("headers", 1, 0, first=size))
    if value is None:
        return None
    found = from_json(OtherWeights, value, "other_weights", UsageError)
    sizes = (found.sharded, found.kv, found.replicated, found.first, found.last)
    if min(found.layers, found.kv_heads, *sizes) < 0:
        raise UsageError(
            "the document's 'other_weights' must be numbers from 0",
            hint="make it again with moectl explain CKPT --json",
        )
    return found


def _inputs(decision: Mapping[str, Any]) -> SelectionInputs:
    """The inputs of a recorded decision. Raises UsageError, with the field, for impossible sizes."""
    inputs = replay_inputs(decision)
    problem, device = inputs.problem, inputs.device
    sizes = {
        "dims.hidden": problem.dims.hidden,
        "dims.intermediate": problem.dims.intermediate,
        "experts": problem.experts,
        "local_experts": problem.local_experts,
        "top_k": problem.top_k,
        "scheme.weight.bits": problem.scheme.weight.bits,
        "parallel.tp": problem.parallel.tp,
        "parallel.dp": problem.parallel.dp,
        "parallel.pp": problem.parallel.pp,
    }
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"the document's {name} must be positive, got {size}")
    for part, block in (("weight", problem.scheme.weight.block), ("act", problem.scheme.act.block)):
        if block != (0, 0) and any(size < 1 and size != FULL for size in block):
            raise UsageError(f"the document's scheme.{part}.block must be sizes or {FULL}, got {block}")
    if device.platform == "cuda" and not re.fullmatch(r"sm\d{2,3}[af]?", device.arch):
        raise UsageError(f"the document's device has no CUDA architecture: {device.arch!r}")
    # Padded sizes are a result of the recorded decision.
    problem = replace(problem, dims=Dims(problem.dims.hidden, problem.dims.intermediate))
    return replace(inputs, problem=problem, policy=policy_named(inputs.policy).name)


def replay(document: Mapping[str, Any]) -> Explanation:
    """The explanation for the inputs in `document`, decided again.

    Raises UsageError when the document is incomplete.
    """
    groups: list[GroupExplanation] = []
    for group in _objects(document, "groups"):
        inputs = _inputs(_of(group, "decision", dict))
        others = [policy_named(str(other.get("policy"))) for other in _objects(group, "others")]
        layers = _layers(group)
        notes = tuple(map(str, _of(group, "notes", list)))
        details = {str(name): str(value) for name, value in _of(group, "details", dict).items()}
        groups.append(explained(layers, inputs, _sources(group), notes, others, details))
    if not groups:
        raise UsageError("the document has no layer groups, so there is nothing to replay")
    first = groups[0].decision.inputs
    origin, other_weights = next(iter(_checkpoints(document).values()))
    return Explanation(
        origin,
        first.device,
        first.packages,
        first.problem.parallel,
        first.policy,
        tuple(groups),
        other_weights,
    )


def requested_gpu(document: Mapping[str, Any]) -> str:
    """The device's name as requested, of an explanation; empty in one without rows, as version 1 wrote."""
    rows = document.get("rows")
    row = rows[0] if isinstance(rows, list) and rows else {}
    name = row.get("gpu") if isinstance(row, dict) else None
    return name if isinstance(name, str) else ""


def replay_matrices(document: Mapping[str, Any]) -> tuple[DecisionMatrix, ...]:
    """A matrix for each checkpoint in `document`, decided again; refused cells stay refused.

    Raises UsageError when the document is incomplete.
    """
    checkpoints, rows = _checkpoints(document), _objects(document, "rows")
    if not rows:
        raise UsageError("the document has no rows, so there is nothing to replay")
    machines: dict[str, AssumedMachine] = {}
    cells: dict[str, list[MatrixCell]] = {name: [] for name in checkpoints}
    recorded = []
    for row in rows:
        name, key, layers = (
            str(row.get("checkpoint", next(iter(checkpoints)))),
            str(row.get("gpu")),
            _layers(row),
        )
        if name not in cells:
            raise UsageError(f"the document's row of {name!r} is of none of its 'checkpoints'")
        inputs = _inputs(_of(row, "decision", dict))
        recorded.append(inputs)
        machine = machines.setdefault(key, AssumedMachine(inputs.device, inputs.packages, key))
        refusal = str(row.get("refusal") or "")
        answer = None if refusal else explained(layers, inputs, {})
        cells[name].append(
            MatrixCell(machine, inputs.problem.parallel, layers, answer, refusal, inputs.problem)
        )
    parallels = tuple(dict.fromkeys(inputs.problem.parallel for inputs in recorded))
    first = recorded[0]
    question = Question(policy_named(first.policy), parallels[0], first.requested, first.allow_fallback)
    matrices = []
    for name, (origin, others) in checkpoints.items():
        places = [(cell.machine, cell.parallel) for cell in cells[name]]
        table = [(machine, parallel) for machine in machines.values() for parallel in parallels]
        if not places or places != table * (len(places) // len(table)):
            raise UsageError(
                f"the document does not have {name} in every deployment on every GPU, in order",
                hint="make it again with moectl explain CKPT --json",
            )
        matrices.append(
            DecisionMatrix(origin, question, tuple(machines.values()), parallels, tuple(cells[name]), others)
        )
    return tuple(matrices)

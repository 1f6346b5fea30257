"""Explanations repeated from their JSON documents, without the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import READABLE_SCHEMAS, SCHEMA_VERSION
from ..checkpoint.checkpoint import Origin
from ..checkpoint.config.fields import LIMITS
from ..errors import UsageError
from ..files.records import Size, extensible, from_json, to_json
from ..files.safe_reading import read_given
from ..files.strict_json import parse_document
from ..oracle.registry import policy_named
from ..oracle.selection_inputs import SelectionInputs, replay_inputs
from ..problem.moe_problem import Dims
from ..problem.other_weights import OtherWeights
from ..problem.schemes import FULL
from .assumed_machines import AssumedMachine
from .decision_matrix import DecisionMatrix, MatrixCell
from .explanation import Explanation, GroupExplanation, Question, explained


def _refused(sentence: str) -> UsageError:
    return UsageError(sentence, hint="make it again with moectl explain CKPT --json")


def read_document(path: Path) -> Mapping[str, Any]:
    """The JSON document in `path`; UsageError when it is not one of `moectl explain --json`.

    The types of its fields are checked, as far as they are read back: later versions may add others.
    """
    data = read_given(path, "a document of moectl explain --json")
    document = parse_document(data, str(path), _refused)
    if not ("groups" in document or "rows" in document):
        raise _refused(f"{path} is not a document of moectl explain")
    version = document.get("schema_version", SCHEMA_VERSION)
    if version not in READABLE_SCHEMAS:
        raise UsageError(
            f"{path} has schema version {version!r}, this moectl reads "
            f"{' or '.join(map(str, READABLE_SCHEMAS))}",
            hint="use the moectl that wrote it, or make it again with moectl explain CKPT --json",
        )
    _check(document, f"{path}: ")
    return document


DECISIONS_LIMIT = 1000
"""Most decisions of a document, each of which takes milliseconds to repeat; two groups of layers on every
built-in GPU in ten deployments have fewer."""


def _check(document: Mapping[str, Any], where: str = "the document: ") -> None:
    """Raises UsageError unless what is read back of `document` has the right types and a bounded length."""
    decisions = max(_decisions(document.get("groups")), _decisions(document.get("rows")))
    if decisions > DECISIONS_LIMIT:
        raise _refused(
            f"{where.removesuffix(': ')} has {decisions} decisions, expected at most {DECISIONS_LIMIT}"
        )
    kind = GroupsDocument if "groups" in document else RowsDocument
    from_json(kind, document, where, _refused)


def _decisions(items: Any) -> int:
    """The decisions of a list of groups or rows, with those of other policies; 0 if it is no list."""
    if not isinstance(items, list):
        return 0
    others = [item.get("others") for item in items if isinstance(item, dict)]
    return len(items) + sum(len(other) for other in others if isinstance(other, list))


@extensible
@dataclass(frozen=True)
class CheckpointPart:
    """A checkpoint in a document; older ones have the bytes of its other weights alone."""

    name: str
    source: str
    revision: str | None = None
    path: str | None = None
    note: str | None = None
    other_weights: OtherWeights | None = None
    other_weight_bytes: Size | None = None


@extensible
@dataclass(frozen=True)
class OtherPart:
    """Another policy's decision in a document."""

    policy: str


@extensible
@dataclass(frozen=True)
class GroupPart:
    """Layers with one decision in a document, with the facts it was made from."""

    layers: tuple[Size, ...]
    decision: Mapping[str, Any]
    sources: Mapping[str, str]
    notes: tuple[str, ...]
    details: Mapping[str, str]
    others: tuple[OtherPart, ...]


@extensible
@dataclass(frozen=True)
class RowPart:
    """One cell of a matrix in a document."""

    gpu: str
    layers: tuple[Size, ...]
    decision: Mapping[str, Any]
    checkpoint: str = ""
    refusal: str | None = None


@extensible
@dataclass(frozen=True, kw_only=True)
class RowsDocument:
    """A document of a matrix, as far as it is read back."""

    checkpoints: tuple[CheckpointPart, ...] = ()
    checkpoint: CheckpointPart | None = None
    other_weight_bytes: Size | None = None
    rows: tuple[RowPart, ...] = ()
    installed_engine: str | None = None
    python: str | None = None
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()


@extensible
@dataclass(frozen=True, kw_only=True)
class GroupsDocument(RowsDocument):
    """A document of one machine and deployment; its `rows` say the same as its groups."""

    groups: tuple[GroupPart, ...]


def _layers(document: Mapping[str, Any]) -> tuple[int, ...]:
    layers: list[int] = document["layers"]
    if not layers or max(layers) >= LIMITS["layers"]:
        raise _refused(f"the document's 'layers' must be numbers from 0 to {LIMITS['layers'] - 1}")
    return tuple(layers)


def _checkpoints(document: Mapping[str, Any]) -> dict[str, tuple[Origin, OtherWeights | None]]:
    """The checkpoints by name, each with its other weights.

    Older documents have one, with those bytes beside it, if at all.
    """
    if "checkpoints" in document:
        listed = document["checkpoints"]
    elif "checkpoint" in document:
        listed = [{"other_weight_bytes": document.get("other_weight_bytes"), **document["checkpoint"]}]
    else:
        listed = []
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
    if value is None and size is not None:
        value = to_json(OtherWeights("headers", 1, 0, first=size))
    return None if value is None else from_json(OtherWeights, value, "other_weights", _refused)


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
    _check(document)
    groups: list[GroupExplanation] = []
    for group in document.get("groups", ()):
        inputs = _inputs(group["decision"])
        others = [policy_named(other["policy"]) for other in group["others"]]
        notes = tuple(group["notes"])
        groups.append(explained(_layers(group), inputs, group["sources"], notes, others, group["details"]))
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
    return str(rows[0]["gpu"]) if rows else ""


def replay_engines(document: Mapping[str, Any]) -> tuple[DecisionMatrix, ...]:
    """The answer of each engine in a `document` of all engines, decided again, in its order.

    Raises UsageError when the document is incomplete.
    """
    _check(document)
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in document.get("rows") or ():
        rows.setdefault(_inputs(row["decision"]).policy, []).append(row)
    matrices = [matrix for own in rows.values() for matrix in replay_matrices({**document, "rows": own})]
    if any(matrix.columns != 1 for matrix in matrices) or not matrices:
        raise UsageError(
            "the document must have one deployment on one GPU for each engine",
            hint="make it again with moectl explain CKPT --engine all --json",
        )
    return tuple(matrices)


def replay_matrices(document: Mapping[str, Any]) -> tuple[DecisionMatrix, ...]:
    """A matrix for each checkpoint in `document`, decided again; refused cells stay refused.

    Raises UsageError when the document is incomplete.
    """
    _check(document)
    checkpoints, rows = _checkpoints(document), document.get("rows")
    if not rows:
        raise UsageError("the document has no rows, so there is nothing to replay")
    machines: dict[str, AssumedMachine] = {}
    cells: dict[str, list[MatrixCell]] = {name: [] for name in checkpoints}
    recorded = []
    for row in rows:
        name, key, layers = row.get("checkpoint", next(iter(checkpoints))), row["gpu"], _layers(row)
        if name not in cells:
            raise UsageError(f"the document's row of {name!r} is of none of its 'checkpoints'")
        inputs = _inputs(row["decision"])
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

"""What changed between two explanations, from their JSON documents, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ..errors import UsageError
from ..files.records import extensible, from_json, to_json
from ..oracle.checks import Verdict

Document = Mapping[str, Any]


@dataclass(frozen=True)
class InputChange:
    """One changed input: its path, and both values (None if absent)."""

    path: str
    old: Any
    new: Any


@dataclass(frozen=True)
class CandidateChange:
    """An experts class with other failing questions; `old` and `new` are the verdicts that differ."""

    backend: str
    experts: str
    old: tuple[Verdict, ...]
    new: tuple[Verdict, ...]


@dataclass(frozen=True)
class RankMove:
    """An experts class at another rank of the priority order."""

    backend: str
    experts: str
    old: int
    new: int


@dataclass(frozen=True)
class ChoiceCause:
    """A cause of another choice: a sentence, and the verdicts behind it."""

    says: str
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class GroupDifference:
    """What changed for some layers.

    Attributes:
        old_choice, new_choice: (backend, experts), or None without a working backend.
        moved: experts classes at other ranks, counted from 1 (0: absent).
        candidates: those with other verdicts.
        failures: the engine's own refusals, before and after, if they differ.
        rules: the causes of another choice.
    """

    layers: tuple[int, ...]
    old_choice: tuple[str, str] | None
    new_choice: tuple[str, str] | None
    moved: tuple[RankMove, ...]
    candidates: tuple[CandidateChange, ...]
    failures: tuple[str, str] | tuple[()]
    rules: tuple[ChoiceCause, ...]


@dataclass(frozen=True)
class ExplanationDiff:
    """Everything that changed; `only_old` and `only_new` are layers in one document only."""

    inputs: tuple[InputChange, ...]
    groups: tuple[GroupDifference, ...]
    only_old: tuple[int, ...] = ()
    only_new: tuple[int, ...] = ()

    @property
    def chosen_otherwise(self) -> bool:
        """True when some layers get another backend, or no longer get one."""
        return any(group.old_choice != group.new_choice for group in self.groups)

    @property
    def empty(self) -> bool:
        return not (self.inputs or self.groups or self.only_old or self.only_new)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**to_json(self), "chosen_otherwise": self.chosen_otherwise}


def diff(old: Document, new: Document) -> ExplanationDiff:
    """What changed from `old` to `new`, both documents of `moectl explain --json` on one machine.

    Raises UsageError for documents that cannot be compared.
    """
    if "groups" not in old or "groups" not in new:
        raise UsageError(
            "only documents about one GPU and one deployment can be compared, got a matrix",
            hint="give one GPU and one deployment to moectl explain --json",
        )
    from_json(ComparedDocument, old, "the older document: ", _incomplete)
    before, after = _by_layer(old), _by_layer(new)
    pairs: dict[tuple[int, int], list[int]] = {}
    for layer in sorted(before.keys() & after.keys()):
        pairs.setdefault((id(before[layer]), id(after[layer])), []).append(layer)
    groups = [
        difference
        for layers in pairs.values()
        if (difference := group_difference(tuple(layers), before[layers[0]], after[layers[0]]))
    ]
    inputs = dict[str, InputChange]()
    for layers in pairs.values():
        for change in _inputs(before[layers[0]], after[layers[0]]):
            inputs.setdefault(change.path, change)
    return ExplanationDiff(
        tuple(inputs.values()),
        tuple(groups),
        tuple(sorted(before.keys() - after.keys())),
        tuple(sorted(after.keys() - before.keys())),
    )


def _incomplete(sentence: str) -> UsageError:
    return UsageError(sentence, hint="make it again with moectl explain CKPT --json")


@extensible
@dataclass(frozen=True)
class ComparedVerdict:
    """A failing question in a document."""

    question: str
    wanted: str
    offered: str


@extensible
@dataclass(frozen=True)
class ComparedCandidate:
    """An experts class in a document, with its failing questions by group."""

    backend: str
    engine_name: str
    experts: str
    reasons: Mapping[str, tuple[ComparedVerdict, ...]]


@extensible
@dataclass(frozen=True)
class ComparedChoice:
    """The chosen candidate in a document."""

    backend: str
    experts: str


@extensible
@dataclass(frozen=True)
class ComparedGate:
    """A refusal of the engine's in a document; in older ones it is a sentence alone."""

    says: str


@extensible
@dataclass(frozen=True)
class ComparedDecision:
    """What is compared of a decision."""

    inputs: Mapping[str, Any]
    route: str
    usable: bool
    chosen: ComparedChoice | None
    candidates: tuple[ComparedCandidate, ...]
    gates: tuple[str | ComparedGate, ...]
    error: str | None
    notes: tuple[str, ...]


@extensible
@dataclass(frozen=True)
class ComparedGroup:
    """Layers with one decision."""

    layers: tuple[int, ...]
    decision: ComparedDecision


@extensible
@dataclass(frozen=True)
class ComparedDocument:
    """What is compared of a document."""

    groups: tuple[ComparedGroup, ...]


def _by_layer(document: Document) -> dict[int, Document]:
    return {layer: group["decision"] for group in document["groups"] for layer in group["layers"]}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by their path; lists are leaves."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


_RESULTS = ("problem.dims.padded_hidden", "problem.dims.padded_intermediate")
"""Written among the inputs, but results of the decision."""


def _inputs(old: Document, new: Document) -> Iterator[InputChange]:
    before, after = dict(_flat(old["inputs"])), dict(_flat(new["inputs"]))
    for path in dict.fromkeys((*before, *after)):
        if path not in _RESULTS and before.get(path) != after.get(path):
            yield InputChange(path, before.get(path), after.get(path))


def _verdicts(candidate: Document) -> frozenset[Verdict]:
    return frozenset(
        Verdict(verdict["question"], group, verdict["wanted"], verdict["offered"], False)
        for group, verdicts in candidate["reasons"].items()
        for verdict in verdicts
    )


ReasonKey = tuple[str, str, str]


def _candidates(decision: Document) -> dict[ReasonKey, Document]:
    """Candidates by backend, the engine's name and experts class; the first if there are several."""
    by_key: dict[ReasonKey, Document] = {}
    for candidate in decision["candidates"]:
        key = (candidate["backend"], candidate["engine_name"], candidate["experts"])
        by_key.setdefault(key, candidate)
    return by_key


def _choice(decision: Document) -> tuple[str, str] | None:
    chosen = decision["chosen"] if decision["usable"] else None
    return (chosen["backend"], chosen["experts"]) if chosen else None


def _failure(decision: Document) -> str:
    gates = [gate["says"] if isinstance(gate, Mapping) else str(gate) for gate in decision["gates"]]
    error = decision["error"]
    return "; ".join([*gates, *([str(error)] if error else [])])


def group_difference(layers: tuple[int, ...], old: Document, new: Document) -> GroupDifference | None:
    """What changed for `layers` from one decision's document to another; None if nothing did."""
    before, after = _candidates(old), _candidates(new)
    changed = []
    for key in dict.fromkeys((*after, *before)):
        if key in before and key in after:
            was, now = _verdicts(before[key]), _verdicts(after[key])
            if {v.question for v in was} != {v.question for v in now}:
                changed.append(CandidateChange(key[0], key[2], _sorted(was - now), _sorted(now - was)))
    failures = (_failure(old), _failure(new))
    difference = GroupDifference(
        layers,
        _choice(old),
        _choice(new),
        tuple(_moves([*before], [*after])),
        tuple(changed),
        failures if failures[0] != failures[1] else (),
        tuple(_rules(old, new, changed)) if _choice(old) != _choice(new) else (),
    )
    same_choice = difference.old_choice == difference.new_choice
    unchanged = same_choice and not (difference.moved or changed or difference.failures)
    return None if unchanged else difference


def _sorted(verdicts: frozenset[Verdict]) -> tuple[Verdict, ...]:
    return tuple(sorted(verdicts, key=lambda verdict: (verdict.group, verdict.question)))


def _moves(before: list[ReasonKey], after: list[ReasonKey]) -> Iterator[RankMove]:
    """Entries outside the longest common order, which alone count as moved."""
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    kept = {
        before[i] for block in matcher.get_matching_blocks() for i in range(block.a, block.a + block.size)
    }
    for key in dict.fromkeys((*after, *before)):
        if key not in kept:
            places = [order.index(key) + 1 if key in order else 0 for order in (before, after)]
            yield RankMove(key[0], key[2], *places)


def _rules(old: Document, new: Document, changed: Sequence[CandidateChange]) -> Iterator[ChoiceCause]:
    """The causes of another choice: lost and gained candidates, order, requests, refusals."""
    lost, gained = _choice(old), _choice(new)
    by_name = {(change.backend, change.experts): change for change in changed}
    if lost and lost in by_name and by_name[lost].new:
        yield ChoiceCause(f"{lost[1]} is now rejected:", by_name[lost].new)
    if gained and gained in by_name and by_name[gained].old:
        yield ChoiceCause(f"{gained[1]} is now supported; it was rejected before:", by_name[gained].old)
    requested = (old["inputs"].get("requested"), new["inputs"].get("requested"))
    if requested[0] != requested[1]:
        yield ChoiceCause(f"the request is {requested[1] or 'none'}, was {requested[0] or 'none'}")
    if old["route"] != new["route"]:
        yield ChoiceCause(f"another route of the policy applies: {new['route']} instead of {old['route']}")
    yield from (ChoiceCause(note) for note in new["notes"] if note not in old["notes"])
    yield from (ChoiceCause(f"no longer: {note}") for note in old["notes"] if note not in new["notes"])
    names = [{(c["backend"], c["experts"]) for c in document["candidates"]} for document in (old, new)]
    if gained and gained not in names[0]:
        yield ChoiceCause(f"{gained[1]} was not a candidate before")
    if lost and lost not in names[1]:
        yield ChoiceCause(f"{lost[1]} is no longer a candidate")
    if lost and gained and not {lost, gained} & by_name.keys() and _overtakes(old, new, lost, gained):
        yield ChoiceCause(f"{gained[1]} now has priority over {lost[1]}")
    if failure := _failure(new):
        yield ChoiceCause(f"the engine refuses or fails: {failure}")


def _overtakes(old: Document, new: Document, lost: tuple[str, str], gained: tuple[str, str]) -> bool:
    """True when `gained` has priority over `lost` in the new order only."""
    orders = [[(c["backend"], c["experts"]) for c in document["candidates"]] for document in (old, new)]
    if not all(lost in order and gained in order for order in orders):
        return False
    before, after = (order.index(gained) < order.index(lost) for order in orders)
    return after and not before

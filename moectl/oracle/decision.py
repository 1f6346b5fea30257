"""The outcome of a choice, with everything needed to show it and to make it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

from ..environment import Device, Packages
from ..errors import NoBackend, UsageError
from ..measured import Measured, Ranking, Timed
from ..problem import Activation, Dims, MoEProblem, Parallel, Routing
from ..schemes import ActFormat, Scheme, WeightFormat
from .backend import GROUPS, Backend, Variant
from .checks import Verdict

FORMAT = "moectl-decision-1"
"""Version of the JSON document."""


CAPABILITY, DTYPE, PLATFORM, NAME = "minimum capability", "model dtype", "platform", "backend name"
"""Kinds of `Gate`."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What an engine refuses before it asks any backend: the `kind` of the check, and a sentence."""

    kind: str
    says: str

    def __str__(self) -> str:
        return self.says


@dataclass(frozen=True, slots=True)
class Failure:
    """A sentence, and the exception class with which the engine fails."""

    says: str
    kind: str

    def __str__(self) -> str:
        return self.says


@dataclass(frozen=True, slots=True)
class Candidate:
    """One experts class, judged.

    `rank` counts from 0 in the order asked. `dims` are the sizes it would get. `layout` is empty where
    any will do. `engine_name` is the engine's own, for comparison. `assigned` tells that the engine takes
    it without asking.
    """

    backend: Backend
    variant: Variant
    rank: int
    verdicts: tuple[Verdict, ...]
    dims: Dims
    layout: str = ""
    engine_name: str = ""
    assigned: bool = False

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """Questions that do not hold, in group order."""
        against = [verdict for verdict in self.verdicts if not verdict.holds]
        return tuple(sorted(against, key=lambda verdict: GROUPS.index(verdict.group)))

    @property
    def usable(self) -> bool:
        """True when every question holds, or the engine does not ask."""
        return self.assigned or all(verdict.holds for verdict in self.verdicts)

    def reasons(self) -> dict[str, tuple[Verdict, ...]]:
        """Failing verdicts by group; groups without one are left out."""
        return {group: tuple(verdicts) for group, verdicts in groupby(self.failed, lambda v: v.group)}

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "backend": self.backend.name,
            "engine_name": self.engine_name,
            "experts": self.variant.experts,
            "monolithic": self.variant.monolithic,
            "layout": self.layout,
            "runner": self.backend.runner,
            "verified_on": [str(arch) for arch in self.backend.verified],
            "rank": self.rank,
            "usable": self.usable,
            "assigned": self.assigned,
            "padded_hidden": self.dims.padded_hidden,
            "padded_intermediate": self.dims.padded_intermediate,
            "reasons": {
                group: [
                    {"question": v.question, "wanted": v.wanted, "offered": v.offered, "code": v.code}
                    for v in verdicts
                ]
                for group, verdicts in self.reasons().items()
            },
        }


@dataclass(frozen=True)
class Decision:
    """What is chosen for one problem on one device, and why nothing else is.

    Attributes:
        problem: with the padded sizes of the choice (the logical ones where nothing is chosen).
        device, packages, policy, requested, allow_fallback: the inputs, enough to choose again.
        route: the policy row that took the problem; `method` the engine's method.
        candidates: every experts class in the order asked, with every answer.
        chosen: the winner, or None.
        sized: False when the engine fails before it fixes padded sizes.
        gates: what the engine refuses before it asks; it would not start.
        error: why nothing is chosen, or what fails after the choice; empty when all is well.
        error_kind: the engine's exception class for it; empty where the engine goes on without a choice.
        ignored: the request by name did nothing.
        order: the engine's names of all backends of its automatic order here, best first.
        stand_in: the engine's name of what it goes on with where nothing is chosen and nothing fails.
        notes: what a user should know about how the choice came about.
        cut: those of the notes that say what the method does to slices that cut across blocks of weights.
        measured: the times that were given to choose by, an input too.
        ranking: the times that chose; None where the order did.
    """

    problem: MoEProblem
    device: Device
    packages: Packages
    policy: str
    requested: str | None
    allow_fallback: bool
    route: str
    method: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    sized: bool = True
    gates: tuple[Gate, ...] = ()
    error: str = ""
    error_kind: str = ""
    ignored: bool = False
    order: tuple[str, ...] = ()
    stand_in: str = ""
    notes: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    measured: Measured = field(default_factory=Measured)
    ranking: Ranking | None = None

    @property
    def best_first(self) -> tuple[Candidate, ...]:
        """Every candidate that can serve: the chosen one, then the others in their order."""
        usable = tuple(c for c in self.candidates if c.usable)
        return tuple(sorted(usable, key=lambda c: c is not self.chosen))

    @property
    def usable(self) -> bool:
        """True when a deployment would work: something is chosen, and nothing refuses or fails."""
        return self.chosen is not None and not self.gates and not self.error

    def require(self) -> Candidate:
        """The chosen candidate; NoBackend with the reasons when the deployment would not work."""
        if self.chosen is not None and self.usable:
            return self.chosen
        what = self.error or f"policy {self.policy} refuses this: {'; '.join(map(str, self.gates))}"
        raise NoBackend(what, hint="Every candidate's reasons are in `moectl explain`.")

    def to_json(self) -> dict[str, Any]:
        """Plain data: the inputs first, so that `replay_inputs` can make the choice again."""
        chosen = self.chosen
        return {
            "format": FORMAT,
            "inputs": {
                "problem": plain(asdict(self.problem)),
                "device": plain(asdict(self.device)),
                "packages": {
                    "versions": dict(self.packages.versions),
                    "missing": sorted(self.packages.missing),
                    "env": dict(self.packages.env),
                },
                "policy": self.policy,
                "requested": self.requested,
                "allow_fallback": self.allow_fallback,
                "measured": self.measured.to_json(),
            },
            "route": self.route,
            "method": self.method,
            "usable": self.usable,
            "chosen": chosen.to_json() if chosen else None,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "gates": [{"kind": gate.kind, "says": gate.says} for gate in self.gates],
            "error": self.error or None,
            "error_kind": self.error_kind or None,
            "ignored": self.ignored,
            "order": list(self.order),
            "stand_in": self.stand_in or None,
            "notes": list(self.notes),
            "ranking": plain(asdict(self.ranking)) if self.ranking else None,
        }


def plain(value: Any) -> Any:
    """`value` as JSON can say it: sets as sorted lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@dataclass(frozen=True)
class Inputs:
    """Arguments of `select`, read back from a document."""

    problem: MoEProblem
    device: Device
    packages: Packages
    policy: str
    requested: str | None
    allow_fallback: bool
    measured: Measured = field(default_factory=Measured)


_NESTED: dict[str, Any] = {
    "dims": Dims,
    "scheme": Scheme,
    "weight": WeightFormat,
    "act": ActFormat,
    "activation": Activation,
    "routing": Routing,
    "parallel": Parallel,
}


_JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
    "tuple[int, int]": lambda value: isinstance(value, list) and [type(item) for item in value] == [int, int],
    "frozenset[str]": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}
"""What a JSON value of a field with this annotation is."""


def _is_a(value: Any, annotation: str) -> bool:
    return any(_JSON_TYPES[part](value) for part in annotation.split(" | "))


def _record(kind: Any, data: object, where: str) -> Any:
    """`data` as a record of `kind`; UsageError names the field that does not fit."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{where} must be an object, got {type(data).__name__}")
    known = {item.name: str(item.type) for item in fields(kind)}
    if unknown := sorted(set(data) - known.keys()):
        raise UsageError(f"{where} has unknown fields {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in _NESTED and known[name] != "str":
            value = _record(_NESTED[name], value, f"{where}.{name}")
        elif not _is_a(value, known[name]):
            raise UsageError(f"{where}.{name} must be {known[name]}, got {value!r}")
        elif name == "features":
            value = frozenset(value)
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = value
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} is incomplete: {error}") from error


def _name(value: object) -> str | None:
    """A request by name; UsageError for anything else."""
    if value is None or isinstance(value, str):
        return value
    raise UsageError(f"inputs.requested must be a name or null, got {value!r}")


def _measured(rows: object) -> Measured:
    """Recorded times; none in documents of before there were any."""
    if not isinstance(rows, list):
        raise UsageError(f"inputs.measured must be a list, got {type(rows).__name__}")
    times = tuple(_record(Timed, row, f"inputs.measured[{place}]") for place, row in enumerate(rows))
    if not all(time.us > 0 for time in times):
        raise UsageError("inputs.measured holds a time that is not positive")
    return Measured(times)


def replay_inputs(document: Mapping[str, Any]) -> Inputs:
    """The inputs of a document made by `Decision.to_json`; UsageError when it is not one."""
    if document.get("format") != FORMAT or not isinstance(document.get("inputs"), Mapping):
        raise UsageError(
            f"the document is not a decision (format {document.get('format')!r}, expected {FORMAT!r})",
            hint="Make one with `moectl explain CKPT --json`.",
        )
    inputs = document["inputs"]
    packages = inputs.get("packages")
    if not isinstance(packages, Mapping) or not all(
        isinstance(packages.get(key, kind()), kind)
        for key, kind in (("versions", dict), ("env", dict), ("missing", list))
    ):
        raise UsageError("inputs.packages must be an object with objects versions and env, and missing")
    return Inputs(
        problem=_record(MoEProblem, inputs.get("problem"), "inputs.problem"),
        device=_record(Device, inputs.get("device"), "inputs.device"),
        packages=Packages(
            versions={str(k): str(v) for k, v in dict(packages.get("versions", {})).items()},
            missing=frozenset(map(str, packages.get("missing", ()))),
            env={str(k): str(v) for k, v in dict(packages.get("env", {})).items()},
        ),
        policy=str(inputs.get("policy")),
        requested=_name(inputs.get("requested")),
        allow_fallback=bool(inputs.get("allow_fallback")),
        measured=_measured(inputs.get("measured", [])),
    )

"""What a decision rests on, as one record, and the same read back from a JSON document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..environment import Device, Packages
from ..errors import UsageError
from ..measured import Measured, Timed
from ..problem import Activation, Dims, MoEProblem, Parallel, Routing
from ..schemes import ActFormat, Scheme, WeightFormat

FORMAT = "moectl-decision-1"
"""Version of the JSON document."""


@dataclass(frozen=True)
class SelectionInputs:
    """Everything that a decision rests on: equal inputs give equal decisions.

    Attributes:
        problem: one rank's share of a layer.
        device, packages: the machine.
        policy: name of the policy that decides.
        requested: a backend asked for by name; None (or ``auto``) for the policy's own choice.
        allow_fallback: the policy's own choice takes over where the request cannot be served.
        measured: times that a policy may choose by.
    """

    problem: MoEProblem
    device: Device
    packages: Packages
    policy: str
    requested: str | None = None
    allow_fallback: bool = False
    measured: Measured = field(default_factory=Measured)

    def to_json(self) -> dict[str, Any]:
        """The head of a decision's document, as `replay_inputs` reads it."""
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


def replay_inputs(document: Mapping[str, Any]) -> SelectionInputs:
    """The inputs in a document made by `Decision.to_json`; UsageError when it is not one.

    Sizes of the problem are as padded for the recorded choice.
    """
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
    return SelectionInputs(
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

"""The inputs of a decision as one record, and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..cache.backend_times import MeasuredTimes, current_name
from ..checkpoint.config.fields import LIMITS
from ..environment import Device, Packages
from ..errors import UsageError
from ..files.records import from_json, to_json
from ..problem.model_shape import UNKNOWN_MODEL, ModelShape
from ..problem.moe_problem import MoEProblem

FORMAT = "moectl-decision-1"
"""Version of the JSON document."""


@dataclass(frozen=True)
class SelectionInputs:
    """Everything that a decision depends on: equal inputs give equal decisions.

    Attributes:
        problem: one rank's share of a layer.
        device, packages: the machine.
        policy: name of the policy.
        requested: a backend requested by name; None (or ``auto``) for the automatic choice.
        allow_fallback: fall back to the automatic choice if the requested backend is not supported.
        measured: measured times, for policies that use them.
        model: sizes of the model outside its experts, which an engine may check, too.
    """

    problem: MoEProblem
    device: Device
    packages: Packages
    policy: str
    requested: str | None = None
    allow_fallback: bool = False
    measured: MeasuredTimes = field(default_factory=MeasuredTimes)
    model: ModelShape = UNKNOWN_MODEL

    def to_json(self) -> dict[str, Any]:
        """The head of a decision document, as `replay_inputs` reads it."""
        return {
            "format": FORMAT,
            "inputs": {
                "problem": to_json(self.problem),
                "device": to_json(self.device),
                "packages": {
                    "versions": dict(self.packages.versions),
                    "missing": sorted(self.packages.missing),
                    "env": dict(self.packages.env),
                },
                "policy": self.policy,
                "requested": self.requested,
                "allow_fallback": self.allow_fallback,
                "measured": self.measured.to_json(),
                "model": to_json(self.model),
            },
        }


def _name(value: object) -> str | None:
    """A requested backend's name or None; UsageError for anything else."""
    if value is None or isinstance(value, str):
        return value
    raise UsageError(f"inputs.requested must be a name or null, got {value!r}")


def _measured(rows: object) -> MeasuredTimes:
    """Recorded times; older documents have none."""
    measured = from_json(MeasuredTimes, {"rows": rows}, "inputs.measured", UsageError)
    if not all(time.us > 0 for time in measured.rows):
        raise UsageError("inputs.measured holds a time that is not positive")
    return MeasuredTimes(tuple(replace(row, backend=current_name(row.backend)) for row in measured.rows))


def _problem(value: Any) -> MoEProblem:
    """The layer of a document, with sizes as a config may have them."""
    problem = from_json(MoEProblem, value, "inputs.problem", UsageError)
    sizes = {
        "experts": problem.experts,
        "top_k": problem.top_k,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
    }
    for name, size in sizes.items():
        high = min(LIMITS[name], problem.experts) if name == "top_k" else LIMITS[name]
        if not 1 <= size <= high:
            raise UsageError(
                f"{name} of inputs.problem must be a number from 1 to {high}, got {size}",
                hint="make the document again with moectl explain CKPT --json",
            )
    return problem


def replay_inputs(document: Mapping[str, Any]) -> SelectionInputs:
    """The inputs in a document made by `Decision.to_json`. Raises UsageError for any other document.

    Sizes of the problem are padded as for the recorded choice.
    """
    if document.get("format") != FORMAT or not isinstance(document.get("inputs"), Mapping):
        raise UsageError(
            f"the document is not a decision (format {document.get('format')!r}, expected {FORMAT!r})",
            hint="Make one with `moectl explain CKPT --json`.",
        )
    inputs = document["inputs"]
    requested = _name(inputs.get("requested"))
    if requested is not None and inputs.get("policy") == "moectl":
        requested = current_name(requested)
    packages = inputs.get("packages")
    if not isinstance(packages, Mapping) or not all(
        isinstance(packages.get(key, kind()), kind)
        for key, kind in (("versions", dict), ("env", dict), ("missing", list))
    ):
        raise UsageError("inputs.packages must be an object with objects versions and env, and missing")
    return SelectionInputs(
        problem=_problem(inputs.get("problem")),
        device=from_json(Device, inputs.get("device"), "inputs.device", UsageError),
        packages=Packages(
            versions={str(k): str(v) for k, v in dict(packages.get("versions", {})).items()},
            missing=frozenset(map(str, packages.get("missing", ()))),
            env={str(k): str(v) for k, v in dict(packages.get("env", {})).items()},
        ),
        policy=str(inputs.get("policy")),
        requested=requested,
        allow_fallback=bool(inputs.get("allow_fallback")),
        measured=_measured(inputs.get("measured", [])),
        model=from_json(ModelShape, inputs.get("model", {}), "inputs.model", UsageError),
    )

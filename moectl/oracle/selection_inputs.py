"""The inputs of a decision as one record, and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..cache.backend_times import BackendTime, MeasuredTimes, current_name
from ..checkpoint.config.fields import LIMITS
from ..environment import Device, Packages
from ..errors import UsageError
from ..files.records import extensible, from_json, to_json
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


@dataclass(frozen=True)
class RecordedPackages:
    """`Packages` in a document."""

    versions: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@extensible
@dataclass(frozen=True)
class RecordedInputs:
    """`SelectionInputs` in a document; older ones have no measured times and no model."""

    problem: MoEProblem
    device: Device
    packages: RecordedPackages
    policy: str
    requested: str | None = None
    allow_fallback: bool = False
    measured: tuple[BackendTime, ...] = ()
    model: ModelShape = UNKNOWN_MODEL


def _not_a_document(sentence: str) -> UsageError:
    return UsageError(sentence, hint="make the document again with moectl explain CKPT --json")


def _check_sizes(problem: MoEProblem) -> None:
    """Raises UsageError unless the sizes of a document's layer are some that a config may have."""
    sizes = {
        "experts": problem.experts,
        "top_k": problem.top_k,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
    }
    for name, size in sizes.items():
        high = min(LIMITS[name], problem.experts) if name == "top_k" else LIMITS[name]
        if not 1 <= size <= high:
            raise _not_a_document(f"{name} of inputs.problem must be a number from 1 to {high}, got {size}")


def replay_inputs(document: Mapping[str, Any]) -> SelectionInputs:
    """The inputs in a document made by `Decision.to_json`. Raises UsageError for any other document.

    Sizes of the problem are padded as for the recorded choice.
    """
    if document.get("format") != FORMAT or not isinstance(document.get("inputs"), Mapping):
        raise UsageError(
            f"the document is not a decision (format {document.get('format')!r}, expected {FORMAT!r})",
            hint="Make one with `moectl explain CKPT --json`.",
        )
    inputs = from_json(RecordedInputs, document["inputs"], "inputs", _not_a_document)
    _check_sizes(inputs.problem)
    requested, packages = inputs.requested, inputs.packages
    if requested is not None and inputs.policy == "moectl":
        requested = current_name(requested)
    return SelectionInputs(
        problem=inputs.problem,
        device=inputs.device,
        packages=Packages(packages.versions, frozenset(packages.missing), packages.env),
        policy=inputs.policy,
        requested=requested,
        allow_fallback=inputs.allow_fallback,
        measured=MeasuredTimes(
            tuple(replace(row, backend=current_name(row.backend)) for row in inputs.measured)
        ),
        model=inputs.model,
    )

"""The outcome of a selection, with everything needed to show and repeat it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..cache.backend_times import TimeRanking
from ..errors import NoBackend
from ..files.records import to_json
from ..problem.moe_problem import Dims, MoEProblem
from ..problem.schemes import BF16, Scheme
from .backend import GROUPS, Backend, ExpertsClass
from .checks import Verdict
from .selection_inputs import SelectionInputs
from .server_arguments import ServerArguments

CAPABILITY, DTYPE, PLATFORM, NAME = "minimum capability", "model dtype", "platform", "backend name"
DEPLOYMENT, ARGUMENTS = "deployment", "server arguments"
"""Kinds of `Gate`."""
FROM_SOURCE = "from source, not recorded"
"""How a note begins that says what of an answer was never compared with the engine's own."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A refusal before the engine checks any backend: the `kind` of the check, and a sentence.

    `error`: the class of the exception, if it is raised as a layer is built.
    """

    kind: str
    says: str
    error: str = ""

    def __str__(self) -> str:
        return self.says


@dataclass(frozen=True, slots=True)
class Failure:
    """A sentence, and the class of the exception that the engine raises."""

    says: str
    kind: str

    def __str__(self) -> str:
        return self.says


@dataclass(frozen=True, slots=True)
class Candidate:
    """One experts class with its verdicts.

    `rank` counts from 1 in priority order. `dims` are the padded sizes it would get. `layout` is empty if
    any will do. `engine_name` is the engine's own, for comparison. `assigned`: the engine takes it
    without checks. `last_resort`: the engine asks it only after every backend of the order has failed.
    """

    backend: Backend
    variant: ExpertsClass
    rank: int
    verdicts: tuple[Verdict, ...]
    dims: Dims
    layout: str = ""
    engine_name: str = ""
    assigned: bool = False
    last_resort: bool = False

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """Verdicts that do not hold, in group order."""
        failing = [verdict for verdict in self.verdicts if not verdict.holds]
        return tuple(sorted(failing, key=lambda verdict: GROUPS.index(verdict.group)))

    @property
    def usable(self) -> bool:
        """True when every verdict holds, or the engine assigns it without checks."""
        return self.assigned or all(verdict.holds for verdict in self.verdicts)

    def reasons(self) -> dict[str, tuple[Verdict, ...]]:
        """Failing verdicts by group, without empty groups."""
        return {group: tuple(verdicts) for group, verdicts in groupby(self.failed, lambda v: v.group)}

    def to_json(self, scheme: Scheme) -> dict[str, Any]:
        """Plain data, for a layer of `scheme`."""
        return {
            "backend": self.backend.name,
            "engine_name": self.engine_name,
            "experts": self.variant.experts,
            "monolithic": self.variant.monolithic,
            "layout": self.layout,
            "runner": self.backend.runner,
            "verified_on": [str(arch) for arch in self.backend.verified_with(scheme)],
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
    """What is chosen for one problem on one device, and why the other candidates are not.

    Attributes:
        inputs: everything that the decision depends on.
        problem: that of `inputs`, with the padded sizes of the choice if there is one.
        route: name of the policy's route for the problem; `method`: the engine's method.
        candidates: every experts class in priority order, with all verdicts.
        chosen: the winner, or None.
        sized: False when the engine fails before it sets padded sizes.
        gates: refusals before any backend is checked; the engine would not start.
        error: why nothing is chosen, or what fails after the choice; empty on success.
        error_kind: the engine's exception class for it; empty if the engine continues without a choice.
        refused: the error is of the engine's method, whatever the backend.
        ignored: the request by name had no effect.
        order: the engine's names of all backends in its automatic priority order.
        stand_in: the engine's name of what it continues with when nothing is chosen and nothing fails.
        notes: remarks for the user on how the choice was made.
        warnings: those of the notes about what does not work, or costs time, although there is a choice.
        ranking: the measured times behind the choice; None if the priority order decided.
        arguments: what the engine's server arguments became; None for an engine without that stage.
    """

    inputs: SelectionInputs
    problem: MoEProblem
    route: str
    method: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    sized: bool = True
    gates: tuple[Gate, ...] = ()
    error: str = ""
    error_kind: str = ""
    refused: bool = False
    ignored: bool = False
    order: tuple[str, ...] = ()
    stand_in: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ranking: TimeRanking | None = None
    arguments: ServerArguments | None = None

    def __repr__(self) -> str:
        if self.chosen is not None and self.usable:
            return self.chosen.backend.name
        return f"none: {self.error or '; '.join(map(str, self.gates))}"

    @property
    def held(self) -> MoEProblem:
        """The problem with its weights as the choice keeps them in memory: in 16 bits if it dequantizes."""
        if self.chosen is None or not self.chosen.backend.dequantizes:
            return self.problem
        return replace(self.problem, scheme=Scheme(BF16))

    @property
    def best_first(self) -> tuple[Candidate, ...]:
        """Every usable candidate: the chosen one, then the others in priority order."""
        usable = tuple(c for c in self.candidates if c.usable)
        return tuple(sorted(usable, key=lambda c: c is not self.chosen))

    @property
    def usable(self) -> bool:
        """True when the deployment would work: something is chosen, and nothing refuses or fails."""
        return self.chosen is not None and not self.gates and not self.error

    def require(self) -> Candidate:
        """The chosen candidate. Raises NoBackend with the reasons if the deployment would not work."""
        if self.chosen is not None and self.usable:
            return self.chosen
        reason = self.error or f"policy {self.inputs.policy} refuses this: {'; '.join(map(str, self.gates))}"
        raise NoBackend(reason, hint="Every candidate's reasons are in `moectl explain`.")

    def to_json(self) -> dict[str, Any]:
        """Plain data, inputs first, so that `replay_inputs` can repeat the selection."""
        chosen, scheme = self.chosen, self.problem.scheme
        return {
            **replace(self.inputs, problem=self.problem).to_json(),
            "route": self.route,
            "method": self.method,
            "usable": self.usable,
            "chosen": chosen.to_json(scheme) if chosen else None,
            "candidates": [candidate.to_json(scheme) for candidate in self.candidates],
            "gates": [{"kind": gate.kind, "says": gate.says} for gate in self.gates],
            "error": self.error or None,
            "error_kind": self.error_kind or None,
            "ignored": self.ignored,
            "order": list(self.order),
            "stand_in": self.stand_in or None,
            "notes": list(self.notes),
            "ranking": to_json(self.ranking),
        }

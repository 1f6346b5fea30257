"""The outcome of a choice, with everything needed to show it and to make it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..cache.backend_times import TimeRanking
from ..errors import NoBackend
from ..files.records import to_json
from ..problem.moe_problem import Dims, MoEProblem
from .backend import GROUPS, Backend, ExpertsClass
from .checks import Verdict
from .selection_inputs import SelectionInputs

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
    variant: ExpertsClass
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
        inputs: what was decided from, enough to decide again.
        problem: that of `inputs` with the padded sizes of the choice; as it is where nothing is chosen.
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
        ranking: the times that chose; None where the order did.
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
    ignored: bool = False
    order: tuple[str, ...] = ()
    stand_in: str = ""
    notes: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    ranking: TimeRanking | None = None

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
        what = self.error or f"policy {self.inputs.policy} refuses this: {'; '.join(map(str, self.gates))}"
        raise NoBackend(what, hint="Every candidate's reasons are in `moectl explain`.")

    def to_json(self) -> dict[str, Any]:
        """Plain data: the inputs first, so that `replay_inputs` can make the choice again."""
        chosen = self.chosen
        return {
            **replace(self.inputs, problem=self.problem).to_json(),
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
            "ranking": to_json(self.ranking),
        }

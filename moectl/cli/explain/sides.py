"""The same question put to several engines or releases, with the packages and exchanges of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...checkpoint.checkpoint import Checkpoint
from ...environment.packages import INSTALLED
from ...explain.assumed_machines import AssumedMachine
from ...explain.decision_matrix import DecisionMatrix, matrix
from ...explain.explanation import Question
from ...oracle.engine import Engine
from ...oracle.registry import engine_named
from ...problem.moe_problem import Parallel
from .options import DecisionOptions


@dataclass(frozen=True)
class Side:
    """One engine's question, and the machines and deployments that it is asked about."""

    question: Question
    machines: tuple[AssumedMachine, ...]
    parallels: tuple[Parallel, ...]

    @property
    def engine(self) -> Engine:
        """Whose rules answer."""
        return engine_named(self.question.policy.name)

    @property
    def decisions(self) -> int:
        """Machines times deployments."""
        return len(self.machines) * len(self.parallels)

    def matrix(self, checkpoint: Checkpoint) -> DecisionMatrix:
        """Every decision for `checkpoint`; refusals are cells of it."""
        return matrix(checkpoint, self.machines, self.parallels, self.question)


def side_of(options: DecisionOptions, policy: str | None) -> Side:
    """What `options` ask, under `policy`. Raises UsageError for options that this engine cannot have."""
    own = replace(options, policy=policy)
    rules = own.engine.policy
    parallels = own.parallels(rules)
    question = own.question(rules, parallels[0], (), measured=False)
    return Side(question, own.machines(), parallels)


def sides_of(options: DecisionOptions, engines: Iterable[Engine]) -> tuple[Side, ...]:
    """What `options` ask, under each of `engines`."""
    return tuple(side_of(options, engine.name) for engine in engines)


def assumptions_of(sides: Iterable[Side]) -> list[str]:
    """What is assumed of the machines, in sentences: default packages for all engines in one of them."""
    sides = tuple(sides)
    named = [side for side in sides if side.engine.package]
    assumed = [side.engine.title for side in named if any(machine.assumed for machine in side.machines)]
    *others, last = dict.fromkeys(assumed) if assumed else ("",)
    titles = " and ".join([", ".join(others), last] if others else [last])
    notes = (
        [f"assuming the default packages of {titles} (--packages {INSTALLED} detects yours)"] if last else []
    )
    machines = [machine for side in sides for machine in side.machines]
    notes += [note for machine in machines if not machine.assumed for note in machine.notes]
    return list(dict.fromkeys(notes))

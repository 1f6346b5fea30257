"""The decision for every layer group of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..checkpoint.model import Checkpoint, Origin
from ..environment import Device, Packages
from ..oracle.decision import Decision
from ..oracle.policy import Policy
from ..oracle.select import select
from ..problem import MoEProblem, Parallel
from .deployment import Floors, Memory, floors_of, memory_of
from .facts import facts, source_of


@dataclass(frozen=True)
class GroupExplanation:
    """Layers with one decision; `problem` is one rank's share.

    `sources` and `notes` are those of the checkpoint's layer group.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    decision: Decision
    memory: Memory
    floors: Floors
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data: the facts with their sources, the memory, the decision."""
        return {
            "layers": list(self.layers),
            "facts": [
                {"fact": fact, "value": value, "source": source_of(fact, self.sources)}
                for fact, value in facts(self.problem).items()
            ],
            "sources": dict(self.sources),
            "notes": list(self.notes),
            "memory": self.memory.to_json(len(self.layers)),
            "floors": self.floors.to_json(),
            "decision": self.decision.to_json(),
        }


@dataclass(frozen=True)
class Explanation:
    """Every layer group of a checkpoint under one policy on one device."""

    origin: Origin
    device: Device
    packages: Packages
    parallel: Parallel
    policy: str
    groups: tuple[GroupExplanation, ...]

    @property
    def usable(self) -> bool:
        """True when every layer group gets a backend that works."""
        return all(group.decision.usable for group in self.groups)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all layers' expert weights on one rank, as padded."""
        return sum(group.memory.padded * len(group.layers) for group in self.groups)

    @property
    def loading_bytes(self) -> int:
        """Bytes held at the peak of load-time repacking: all layers as padded, and the largest copies."""
        return self.expert_bytes + max((group.memory.repacking for group in self.groups), default=0)

    @property
    def fits(self) -> bool | None:
        """False when the expert weights alone exceed the device's memory; None when that is not known."""
        memory = self.device.memory_bytes
        return None if not memory else self.expert_bytes <= memory

    def to_json(self) -> dict[str, Any]:
        """Plain data, complete enough to make every decision again."""
        origin = self.origin
        return {
            "checkpoint": {
                "name": origin.name,
                "source": origin.kind,
                "revision": origin.revision,
                "path": str(origin.path) if origin.path else None,
                "note": origin.note,
            },
            "device": {**asdict(self.device), "features": sorted(self.device.features)},
            "packages": {"versions": dict(self.packages.versions), "env": dict(self.packages.env)},
            "parallel": asdict(self.parallel),
            "policy": self.policy,
            "usable": self.usable,
            "expert_bytes": self.expert_bytes,
            "loading_bytes": self.loading_bytes,
            "fits": self.fits,
            "groups": [group.to_json() for group in self.groups],
        }


def explained(
    layers: tuple[int, ...],
    problem: MoEProblem,
    decision: Decision,
    sources: Mapping[str, str],
    notes: tuple[str, ...] = (),
) -> GroupExplanation:
    """`decision` for one rank's `problem` with its memory and floors."""
    return GroupExplanation(
        layers, problem, decision, memory_of(decision), floors_of(problem, decision.device), sources, notes
    )


def explain(
    checkpoint: Checkpoint,
    device: Device,
    packages: Packages,
    policy: Policy,
    *,
    parallel: Parallel = Parallel(),
    backend: str | None = None,
    allow_fallback: bool = False,
) -> Explanation:
    """The decision of `policy` for every layer group of `checkpoint`, as one rank of `parallel` sees it.

    Raises UsageError when the experts cannot be sliced as `parallel` asks, OutOfScope when the policy
    has no row for a group's format or for the platform.
    """
    groups = []
    for group in checkpoint.groups:
        problem = group.problem.on(parallel)
        decision = select(problem, device, packages, policy, backend, allow_fallback)
        groups.append(explained(group.layers, problem, decision, group.sources, group.notes))
    return Explanation(checkpoint.origin, device, packages, parallel, policy.name, tuple(groups))

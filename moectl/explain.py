"""Which backend each layer group of a checkpoint gets: checkpoint and oracle, joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .checkpoint.model import Checkpoint, LayerGroup
from .environment import Device, Packages
from .oracle.decision import Decision
from .oracle.policy import Policy
from .oracle.select import select
from .problem import MoEProblem, Parallel


@dataclass(frozen=True)
class Memory:
    """Bytes of one layer's expert weights, scales and biases on one rank.

    `stored` as the checkpoint's formats take them, `padded` with the chosen backend's sizes.
    """

    stored: int
    padded: int


@dataclass(frozen=True)
class GroupExplanation:
    """One layer group with its decision; `problem` is one rank's share."""

    group: LayerGroup
    problem: MoEProblem
    decision: Decision
    memory: Memory

    def to_json(self) -> dict[str, Any]:
        """Plain data: the facts with their sources, the memory, the decision."""
        return {
            "layers": list(self.group.layers),
            "facts": [
                {"fact": fact, "value": value, "source": source_of(fact, self.group.sources)}
                for fact, value in facts(self.problem).items()
            ],
            "sources": dict(self.group.sources),
            "notes": list(self.group.notes),
            "memory": {
                "stored_bytes_per_layer": self.memory.stored,
                "padded_bytes_per_layer": self.memory.padded,
                "stored_bytes": self.memory.stored * len(self.group.layers),
                "padded_bytes": self.memory.padded * len(self.group.layers),
            },
            "decision": self.decision.to_json(),
        }


@dataclass(frozen=True)
class Explanation:
    """Every layer group of a checkpoint under one policy on one device."""

    checkpoint: Checkpoint
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
        return sum(group.memory.padded * len(group.group.layers) for group in self.groups)

    @property
    def fits(self) -> bool | None:
        """False when the expert weights alone exceed the device's memory; None when that is not known."""
        memory = self.device.memory_bytes
        return None if not memory else self.expert_bytes <= memory

    def to_json(self) -> dict[str, Any]:
        """Plain data, complete enough to make every decision again."""
        origin = self.checkpoint.origin
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
            "fits": self.fits,
            "groups": [group.to_json() for group in self.groups],
        }


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
        memory = Memory(
            problem.expert_bytes() * problem.local_experts,
            decision.problem.expert_bytes(padded=True) * problem.local_experts,
        )
        groups.append(GroupExplanation(group, problem, decision, memory))
    return Explanation(checkpoint, device, packages, parallel, policy.name, tuple(groups))


def source_of(fact: str, sources: Mapping[str, str]) -> str:
    """Where a fact of `facts` was read, its parts' places included, each once."""
    parts = {"storage": ("storage", "rows")}.get(fact, (fact,))
    found = [place for key, place in sources.items() if key.split(".")[0] in parts]
    return ", ".join(dict.fromkeys(found))


def facts(problem: MoEProblem) -> Mapping[str, str]:
    """A problem's fields in words, by the names that `LayerGroup.sources` uses."""
    act, routing = problem.activation, problem.routing
    details = [
        f"{name} {value:g}" for name in ("alpha", "limit") if (value := getattr(act, name)) is not None
    ]
    order = f"{routing.scoring} {'of the chosen logits' if routing.after_topk else 'scores'}"
    steps = [
        order,
        "renormalized" if routing.renormalize else "not renormalized",
        *(["correction bias"] if routing.correction_bias else []),
        *(["router bias"] if routing.router_bias else []),
        *([f"groups {routing.groups}, best {routing.topk_groups}"] if routing.groups else []),
        *([f"scale {routing.scale:g}"] if routing.scale != 1 else []),
        *(["weights on the input"] if routing.weight_on_input else []),
    ]
    local = "" if problem.local_experts == problem.experts else f" ({problem.local_experts} on this rank)"
    return {
        "experts": f"{problem.experts}{local}",
        "top_k": str(problem.top_k),
        "hidden": str(problem.dims.hidden),
        "intermediate": f"{problem.dims.intermediate}{'' if problem.parallel.tp_size == 1 else ' per rank'}",
        "scheme": str(problem.scheme),
        "storage": f"{problem.storage}, rows {problem.rows}",
        "activation": ", ".join([act.name, "gated" if act.gated else "not gated", *details]),
        "routing": ", ".join(steps),
        "bias": "yes" if problem.bias else "no",
        "shared_experts": str(problem.shared_experts),
    }

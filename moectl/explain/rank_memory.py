"""Memory of one GPU of a deployment: expert weights, all other weights, and what remains for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..environment import Device
from ..errors import NoBackend, UsageError
from ..oracle.decision import Decision
from ..oracle.select import decide
from ..problem.moe_problem import Parallel
from ..problem.other_weights import OtherWeights

TENSOR_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
"""Tensor-parallel sizes among which the smallest that fits is looked for."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one GPU; None where a number is not known.

    Attributes:
        device: memory of the GPU.
        usable: the engine's default share of it, for weights, KV cache and activations.
        experts: expert weights, padded as the chosen backends need.
        others: all other weights, as `OtherWeights.on_rank` distributes them; None when neither headers nor
            config tell them.
        smallest_tp: smallest tensor-parallel size at which the weights leave room; None when none does.
        source: how `others` are known, as `OtherWeights.source`; empty when they are not.
    """

    device: int | None
    usable: int | None
    experts: int
    others: int | None
    smallest_tp: int | None
    source: str = ""

    @property
    def weights(self) -> int:
        """All known weights."""
        return self.experts + (self.others or 0)

    @property
    def left(self) -> int | None:
        """What remains of `usable` for the KV cache and activations; negative when the weights do not fit."""
        return None if self.usable is None else self.usable - self.weights

    @property
    def fits(self) -> bool | None:
        """False when the known weights exceed the memory that the engine uses."""
        return None if self.left is None else self.left > 0

    def to_json(self) -> dict[str, Any]:
        """Plain data, bytes."""
        return {
            "device_bytes": self.device,
            "usable_bytes": self.usable,
            "expert_bytes": self.experts,
            "other_bytes": self.others,
            "other_source": self.source or None,
            "left_bytes": self.left,
            "smallest_tp": self.smallest_tp,
        }


def rank_memory(
    layers: tuple[tuple[int, Decision], ...],
    others: OtherWeights | None,
    stage: int,
    device: Device,
    fraction: float,
) -> RankMemory:
    """The memory of one GPU under decisions for numbers of identical layers of its pipeline stage.

    `others` are the other weights of the whole model, `stage` the number of decoder layers of the pipeline
    stage, `fraction` the share of the GPU that the engine uses. A tensor-parallel size that the engine
    refuses is not offered.
    """
    parallel = layers[0][1].problem.parallel
    usable = int(device.memory_bytes * fraction) if device.memory_bytes else None
    experts = sum(count * _padded(decision, parallel) for count, decision in layers)

    def share(tp: int) -> int:
        return others.on_rank(tp, stage, parallel.pp > 1) if others else 0

    smallest = None
    for tp in TENSOR_PARALLEL if usable is not None else ():
        there = replace(parallel, tp=tp)
        try:
            weights = sum(count * _padded(decision, there) for count, decision in layers)
        except UsageError:
            continue
        fits = weights + share(tp) < (usable or 0)
        if fits and all(_accepted(decision, there) for _, decision in layers):
            smallest = tp
            break
    return RankMemory(
        device.memory_bytes or None,
        usable,
        experts,
        share(parallel.tp) if others else None,
        smallest,
        others.source if others else "",
    )


def _accepted(decision: Decision, parallel: Parallel) -> bool:
    """False when the engine refuses `parallel` for layers for which it has a backend as they are."""
    if parallel == decision.problem.parallel or not decision.usable:
        return decision.inputs.model.attention_heads % parallel.tp == 0
    inputs = decision.inputs
    try:
        return decide(replace(inputs, problem=inputs.problem.on(parallel))).usable
    except NoBackend:
        return False


def _padded(decision: Decision, parallel: Parallel) -> int:
    """Bytes of one layer's experts on a rank of `parallel`, with the padding of the decision.

    Raises UsageError when the experts cannot be sharded so.
    """
    own = decision.held
    if parallel == own.parallel:
        return sum(own.matrix_bytes(padded=True)) * own.local_experts
    share = replace(decision.inputs.problem.on(parallel), scheme=own.scheme)
    padding = sum(own.matrix_bytes(padded=True)) / sum(own.matrix_bytes())
    return int(share.expert_bytes() * share.local_experts * padding)

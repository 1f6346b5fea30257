"""Memory of one GPU of a deployment: expert weights, all other weights, and what remains for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..environment import Device
from ..errors import UsageError
from ..files.tensor_table import TensorTable
from ..oracle.decision import Decision
from ..problem.moe_problem import Parallel

TENSOR_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
"""Tensor-parallel sizes among which the smallest that fits is looked for."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one GPU; None where a number is not known.

    Attributes:
        device: memory of the GPU.
        usable: the engine's default share of it, for weights, KV cache and activations.
        experts: expert weights, padded as the chosen backends need.
        others: all other weights in the checkpoint's headers, divided by the tensor-parallel size and the
            number of pipeline stages: engines
            shard attention, embeddings and shared experts; norms and routers, which they replicate, are
            small. None when the headers list the experts' layers alone.
        smallest_tp: smallest tensor-parallel size at which the weights leave room; None when none does.
    """

    device: int | None
    usable: int | None
    experts: int
    others: int | None
    smallest_tp: int | None

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
            "left_bytes": self.left,
            "smallest_tp": self.smallest_tp,
        }


def other_weights(checkpoint: Checkpoint) -> int | None:
    """Bytes of all tensors that are no routed experts; None when the headers do not list them.

    A built-in model lists its MoE layers only, a config.json alone no tensor.
    """
    if checkpoint.origin.kind == "catalogue" or not checkpoint.tensors:
        return None
    tensors = checkpoint.tensors
    if isinstance(tensors, TensorTable):
        total = sum(tensors.ends) - sum(tensors.starts)
    else:
        total = sum(info.nbytes for info in tensors.values())
    experts = sum(
        group.problem.expert_bytes() * group.problem.experts * len(group.layers)
        for group in checkpoint.groups
    )
    return max(0, total - experts)


def rank_memory(
    layers: tuple[tuple[int, Decision], ...], others: int | None, device: Device, fraction: float
) -> RankMemory:
    """The memory of one GPU under decisions for numbers of identical layers of its pipeline stage.

    `others` are the other weights of the whole model, `fraction` the share of the GPU that the engine uses.
    A tensor-parallel size that does not divide the attention heads is not offered.
    """
    parallel = layers[0][1].problem.parallel
    usable = int(device.memory_bytes * fraction) if device.memory_bytes else None
    experts = sum(count * _padded(decision, parallel) for count, decision in layers)
    smallest = None
    heads = layers[0][1].inputs.model.attention_heads
    for tp in TENSOR_PARALLEL if usable is not None else ():
        if heads % tp:
            continue
        try:
            weights = sum(count * _padded(decision, replace(parallel, tp=tp)) for count, decision in layers)
        except UsageError:
            continue
        if weights + (others or 0) // (tp * parallel.pp) < (usable or 0):
            smallest = tp
            break
    share = None if others is None else others // (parallel.tp * parallel.pp)
    return RankMemory(device.memory_bytes or None, usable, experts, share, smallest)


def _padded(decision: Decision, parallel: Parallel) -> int:
    """Bytes of one layer's experts on a rank of `parallel`, with the padding of the decision.

    Raises UsageError when the experts cannot be sharded so.
    """
    own = decision.problem
    if parallel == own.parallel:
        return sum(own.matrix_bytes(padded=True)) * own.local_experts
    share = own.on(parallel)
    padding = sum(own.matrix_bytes(padded=True)) / sum(own.matrix_bytes())
    return int(share.expert_bytes() * share.local_experts * padding)

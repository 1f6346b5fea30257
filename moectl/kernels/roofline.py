"""The least time a layer can take: bytes that must move and operations that must be done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import MoEProblem


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of a layer must do at least.

    Attributes:
        weight_bytes: weights, scales, zero points and biases of the experts that are hit, each read once.
        activation_bytes: the tokens read once and the result written once.
        flops: two per weight and assignment.
        experts: how many experts are hit.
    """

    weight_bytes: int
    activation_bytes: int
    flops: int
    experts: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do: memory `bandwidth` in bytes/s, matrix `flops` in FLOP/s, and their `source`."""

    bandwidth: float
    flops: float
    source: str


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time in seconds, and what sets it: ``memory`` or ``compute``."""

    seconds: float
    bound: str


def work_of(problem: MoEProblem, ids: Tensor) -> Work:
    """What a call with expert `ids` ``[tokens, top_k]`` must do; negative ids do nothing."""
    valid = ids[ids >= 0]
    hit = torch.unique(valid).numel()
    matrices = 3 if problem.activation.gated else 2
    flops = 2 * matrices * problem.dims.hidden * problem.dims.intermediate * int(valid.numel())
    activations = 2 * len(ids) * problem.dims.hidden * 2
    return Work(hit * problem.expert_bytes(), activations, flops, hit)


def floor_of(work: Work, rates: Rates) -> Floor:
    """The larger of moving `work`'s bytes and doing its operations at `rates`."""
    memory, compute = work.bytes / rates.bandwidth, work.flops / rates.flops
    return Floor(memory, "memory") if memory >= compute else Floor(compute, "compute")

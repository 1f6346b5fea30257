"""The least time a layer can take: bytes that must move and operations that must be done."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment import Device
from .moe_problem import MoEProblem
from .number_formats import number_format

ACTIVATION_BYTES = 2
"""Bytes of one value of the tokens that come in and go out."""


@dataclass(frozen=True, slots=True)
class LayerWork:
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
    experts: float

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device can do: memory `bandwidth` in bytes/s, matrix `flops` in FLOP/s, and their `source`.

    0 is a rate that is not known.
    """

    bandwidth: float
    flops: float
    source: str


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """The least time in seconds, and what sets it: ``memory`` or ``compute``."""

    seconds: float
    bound: str


def work_of_hits(problem: MoEProblem, tokens: int, assignments: float, experts: float) -> LayerWork:
    """What `tokens` must do on one rank when their `assignments` to its experts hit `experts` of them."""
    dims = problem.dims
    matrices = 3 if problem.activation.gated else 2
    return LayerWork(
        weight_bytes=round(experts * problem.expert_bytes()),
        activation_bytes=2 * tokens * dims.hidden * ACTIVATION_BYTES,
        flops=round(2 * matrices * dims.hidden * dims.intermediate * assignments),
        experts=experts,
    )


def uniform_work(problem: MoEProblem, tokens: int) -> LayerWork:
    """The expected work of one rank for `tokens`, each of which picks top-k experts evenly at random.

    An expert stays untouched with probability (1 - k/E)^M; a rank has `local_experts` of E.
    """
    share = problem.top_k / problem.experts
    touched = problem.local_experts * (1 - (1 - share) ** tokens)
    return work_of_hits(problem, tokens, tokens * share * problem.local_experts, touched)


def floor_of(work: LayerWork, rates: DeviceRates) -> RooflineTime:
    """The larger of moving `work`'s bytes and doing its operations at `rates`."""
    memory, compute = work.bytes / rates.bandwidth, work.flops / rates.flops
    return RooflineTime(memory, "memory") if memory >= compute else RooflineTime(compute, "compute")


_UNITS = {
    "fp4": ("fp4_flops", "fp8_flops", "bf16_flops"),
    "fp8": ("fp8_flops", "bf16_flops"),
    "bf16": ("bf16_flops",),
}
_LOWEST = {"fp8_flops": 89, "fp4_flops": 100}
"""Lowest CUDA capability with a matrix unit for the format."""
_WITH_UNIT = {
    "fp8_flops": frozenset({"gfx942", "gfx950", "gfx1200", "gfx1201", "gfx1250"}),
    "fp4_flops": frozenset({"gfx950", "gfx1250"}),
}
"""ROCm architectures with one."""


def published_rates(device: Device, act: str) -> DeviceRates:
    """Published peaks of `device`, with the fastest matrix rate that `act` activations allow there.

    Narrow activations are computed by the narrowest unit that the device has. Rates that no source
    states are 0.
    """
    for unit in _UNITS.get(number_format(act).grid.matrix_unit, ()):
        if _has_unit(device, unit):
            return DeviceRates(
                device.bandwidth, float(getattr(device, unit)), f"published, {unit[:-6]} matrix rate"
            )
    return DeviceRates(device.bandwidth, 0.0, "published")


def _has_unit(device: Device, unit: str) -> bool:
    """True when the device has the matrix unit, whether or not its rate is known."""
    if getattr(device, unit) or unit not in _LOWEST:
        return True
    if device.platform == "cuda":
        return device.capability >= _LOWEST[unit]
    return device.arch in _WITH_UNIT[unit]


def known_floor(work: LayerWork, rates: DeviceRates, needs_compute: bool = False) -> RooflineTime | None:
    """`floor_of` with rates that may be unknown (0); None when nothing can be said.

    Without a matrix rate, moving the bytes alone is still a floor; `needs_compute` wants both.
    """
    if not rates.bandwidth or (needs_compute and not rates.flops):
        return None
    if not rates.flops:
        return RooflineTime(work.bytes / rates.bandwidth, "memory")
    return floor_of(work, rates)

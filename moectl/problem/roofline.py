"""The roofline time of a layer: the bytes it must move and the operations it must do."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment import Device
from .moe_problem import MoEProblem
from .number_formats import number_format

ACTIVATION_BYTES = 2
"""Bytes per value of the input and output tokens."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The minimum work of one call of a layer.

    Attributes:
        weight_bytes: weights, scales, zero points and biases of the active experts, each read once.
        activation_bytes: input tokens read once, and the result written once.
        flops: two per weight and assignment.
        experts: number of active experts.
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
    """Peak rates of a device: memory `bandwidth` in bytes/s, matrix `flops` in FLOP/s, and their `source`.

    0 stands for an unknown rate.
    """

    bandwidth: float
    flops: float
    source: str


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """The minimum time in seconds, and what limits it: ``memory`` or ``compute``."""

    seconds: float
    bound: str


def work_of_hits(problem: MoEProblem, tokens: int, assignments: float, experts: float) -> LayerWork:
    """The work of one rank for `tokens` with `assignments` to `experts` active experts of the rank."""
    dims = problem.dims
    matrices = 3 if problem.activation.gated else 2
    return LayerWork(
        weight_bytes=round(experts * problem.expert_bytes()),
        activation_bytes=2 * tokens * dims.hidden * ACTIVATION_BYTES,
        flops=round(2 * matrices * dims.hidden * dims.intermediate * assignments),
        experts=experts,
    )


def uniform_work(problem: MoEProblem, tokens: int) -> LayerWork:
    """The expected work of one rank for `tokens` that select their top-k experts uniformly at random.

    An expert is inactive with probability (1 - k/E)^M; a rank has `local_experts` of E.

    Example:
        >>> from moectl.problem.published_layers import MODELS
        >>> round(uniform_work(MODELS["gpt-oss-20b"], 8).experts, 1)
        21.0
    """
    share = problem.top_k / problem.experts
    active = problem.local_experts * (1 - (1 - share) ** tokens)
    return work_of_hits(problem, tokens, tokens * share * problem.local_experts, active)


def roofline_time(work: LayerWork, rates: DeviceRates) -> RooflineTime:
    """The roofline time of `work`: the larger of its memory and compute times at `rates`."""
    memory, compute = work.bytes / rates.bandwidth, work.flops / rates.flops
    return RooflineTime(memory, "memory") if memory >= compute else RooflineTime(compute, "compute")


_UNITS = {
    "fp4": ("fp4_flops", "fp8_flops", "bf16_flops"),
    "fp8": ("fp8_flops", "bf16_flops"),
    "bf16": ("bf16_flops",),
}
_LOWEST = {"fp8_flops": 89, "fp4_flops": 100}
"""Lowest CUDA compute capability with the matrix unit."""
_WITH_UNIT = {
    "fp8_flops": frozenset({"gfx942", "gfx950", "gfx1200", "gfx1201", "gfx1250"}),
    "fp4_flops": frozenset({"gfx950", "gfx1250"}),
}
"""ROCm architectures with the matrix unit."""


def published_rates(device: Device, act: str) -> DeviceRates:
    """Published peak rates of `device`, with the fastest matrix rate for `act` activations.

    Activations use the narrowest matrix unit that supports them and that the device has. Unpublished rates
    are 0.
    """
    for unit in _UNITS.get(number_format(act).grid.matrix_unit, ()):
        if _has_unit(device, unit):
            return DeviceRates(
                device.bandwidth, float(getattr(device, unit)), f"published, {unit[:-6]} matrix rate"
            )
    return DeviceRates(device.bandwidth, 0.0, "published")


def _has_unit(device: Device, unit: str) -> bool:
    """True when the device has the matrix unit, even if its rate is unknown."""
    if getattr(device, unit) or unit not in _LOWEST:
        return True
    if device.platform == "cuda":
        return device.capability >= _LOWEST[unit]
    return device.arch in _WITH_UNIT[unit]


def known_roofline(work: LayerWork, rates: DeviceRates, needs_compute: bool = False) -> RooflineTime | None:
    """`roofline_time` for rates that may be unknown (0); None if there is no bound.

    Without a matrix rate the memory time is still a lower bound, unless `needs_compute`.
    """
    if not rates.bandwidth or (needs_compute and not rates.flops):
        return None
    if not rates.flops:
        return RooflineTime(work.bytes / rates.bandwidth, "memory")
    return roofline_time(work, rates)

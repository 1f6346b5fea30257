"""Bytes of expert weights on a rank, and roofline times of a layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..environment import Device
from ..oracle.decision import Decision
from ..oracle.registry import engine_named
from ..problem.moe_problem import MoEProblem
from ..problem.roofline import (
    DeviceRates,
    LayerWork,
    RooflineTime,
    known_roofline,
    published_rates,
    uniform_work,
)


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes of one layer's expert weights, scales, zero points and biases on one rank.

    `stored`: in the checkpoint's formats; `padded`: with the chosen backend's padding, and dequantized if it
    does that; `repacking`: the
    additional bytes while this layer is repacked at load time, as `why` describes. Other weights, the KV
    cache and allocator overhead are not counted.
    """

    stored: int
    padded: int
    repacking: int
    why: str

    def to_json(self, layers: int) -> dict[str, Any]:
        """Plain data for this many identical layers."""
        return {
            "stored_bytes_per_layer": self.stored,
            "padded_bytes_per_layer": self.padded,
            "stored_bytes": self.stored * layers,
            "padded_bytes": self.padded * layers,
            "repacking_bytes": self.repacking,
            "repacking": self.why,
        }


def memory_of(decision: Decision) -> WeightMemory:
    """Bytes of one layer under `decision`; as stored if nothing is chosen."""
    problem, held = decision.problem, decision.held
    row = engine_named(decision.inputs.policy).repacked(decision.chosen.layout if decision.chosen else "")
    w13, w2 = held.matrix_bytes(padded=True)
    return WeightMemory(
        problem.expert_bytes() * problem.local_experts,
        (w13 + w2) * problem.local_experts,
        (row.w13 * w13 + row.w2 * w2) * problem.local_experts,
        row.why,
    )


DECODE_TOKENS = (1, 8, 64)
PREFILL_TOKENS = 8192
"""Tokens of a prefill step, as engines schedule on large GPUs."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One layer's expected work for `tokens`, and its roofline time; None if a rate is unknown."""

    tokens: int
    work: LayerWork
    roofline: RooflineTime | None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "experts": self.work.experts,
            "bytes": self.work.bytes,
            "flops": self.work.flops,
            "us": self.roofline.seconds * 1e6 if self.roofline else None,
            "bound": self.roofline.bound if self.roofline else None,
        }


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Roofline times of one layer on one rank, for uniformly routed tokens of the whole deployment."""

    rates: DeviceRates
    decode: tuple[StepTime, ...]
    prefill: StepTime

    def to_json(self) -> dict[str, Any]:
        return {
            "rates": asdict(self.rates),
            "decode": [step.to_json() for step in self.decode],
            "prefill": self.prefill.to_json(),
        }


def roofline_of(problem: MoEProblem, device: Device) -> StepTimes:
    """Roofline times of one rank's share of a layer at the published peak rates of `device`."""
    rates = published_rates(device, problem.scheme.act.name)

    def step(tokens: int, prefill: bool = False) -> StepTime:
        work = uniform_work(problem, tokens)
        return StepTime(tokens, work, known_roofline(work, rates, needs_compute=prefill))

    return StepTimes(rates, tuple(map(step, DECODE_TOKENS)), step(PREFILL_TOKENS, prefill=True))

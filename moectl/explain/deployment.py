"""The numbers that decide a deployment: bytes of expert weights on a rank, and the least times of a layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..environment import Device
from ..floors import Floor, Rates, Work, known_floor, published_rates, uniform_work
from ..oracle.decision import Decision
from ..problem import MoEProblem


@dataclass(frozen=True, slots=True)
class Repacking:
    """How many further copies of one layer's experts are alive while an engine repacks it, and why.

    Counted are tensors as large as the weights. Scales that are cast, and scratch of single experts, are
    small beside them and left out.
    """

    copies: int
    why: str


REPACKING: tuple[tuple[str, Repacking], ...] = (
    ("plain", Repacking(0, "weights are used as they are loaded")),
    ("deep-gemm", Repacking(0, "weights stay, scales alone are rearranged")),
    ("triton-wna16", Repacking(0, "weights are used as they are loaded")),
    ("marlin-int", Repacking(2, "a transposed copy and the packed one live beside the loaded weights")),
    ("marlin", Repacking(1, "the packed weights live beside the loaded ones")),
    ("trtllm", Repacking(2, "shuffled experts are collected, then stacked, beside the loaded weights")),
    ("cutlass", Repacking(2, "reordered rows and the interleaved copy live beside the loaded weights")),
    ("triton", Repacking(1, "the swizzled weights live beside the loaded ones")),
    ("humming", Repacking(1, "the packed weights live beside the loaded ones")),
    ("moectl", Repacking(1, "the tiled weights live beside the loaded ones")),
    ("", Repacking(1, "assumed: one rearranged copy beside the loaded weights")),
)
"""By the beginning of a layout's name, the first that fits: how vLLM 0.33.0 makes each layout in
`process_weights_after_loading`, which runs layer by layer after every weight is loaded."""


def repacking(layout: str) -> Repacking:
    """The row of `REPACKING` for `layout`; a backend that names no layout takes weights as they are."""
    if not layout:
        return REPACKING[0][1]
    return next(row for prefix, row in REPACKING if layout.startswith(prefix))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one layer's expert weights, scales, zero points and biases on one rank.

    `stored` as the checkpoint's formats take them, `padded` with the chosen backend's sizes, `repacking`
    on top of all layers' while this one is repacked at load time: `padded` for each of `copies`, for the
    reason `why`. Other weights, the KV cache and the allocator's slack are not counted.
    """

    stored: int
    padded: int
    copies: int
    why: str

    @property
    def repacking(self) -> int:
        return self.padded * self.copies

    def to_json(self, layers: int) -> dict[str, Any]:
        """Plain data for this many equal layers."""
        return {
            "stored_bytes_per_layer": self.stored,
            "padded_bytes_per_layer": self.padded,
            "stored_bytes": self.stored * layers,
            "padded_bytes": self.padded * layers,
            "repacking_bytes": self.repacking,
            "repacking": self.why,
        }


def memory_of(decision: Decision) -> Memory:
    """Bytes of one layer under `decision`; as stored where nothing is chosen."""
    problem = decision.problem
    row = repacking(decision.chosen.layout if decision.chosen else "")
    return Memory(
        problem.expert_bytes() * problem.local_experts,
        problem.expert_bytes(padded=True) * problem.local_experts,
        row.copies,
        row.why,
    )


DECODE_TOKENS = (1, 8, 64)
PREFILL_TOKENS = 8192
"""Tokens of a prefill step: what engines schedule at once on large GPUs."""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's expected work for `tokens`, and its floor; None when a rate is not known."""

    tokens: int
    work: Work
    floor: Floor | None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "experts": self.work.experts,
            "bytes": self.work.bytes,
            "flops": self.work.flops,
            "us": self.floor.seconds * 1e6 if self.floor else None,
            "bound": self.floor.bound if self.floor else None,
        }


@dataclass(frozen=True, slots=True)
class Floors:
    """The least times of one layer on one rank, for tokens of the whole deployment routed uniformly."""

    rates: Rates
    decode: tuple[Step, ...]
    prefill: Step

    def to_json(self) -> dict[str, Any]:
        return {
            "rates": asdict(self.rates),
            "decode": [step.to_json() for step in self.decode],
            "prefill": self.prefill.to_json(),
        }


def floors_of(problem: MoEProblem, device: Device) -> Floors:
    """Floors of one rank's share of a layer at the published peaks of `device`."""
    rates = published_rates(device, problem.scheme.act.name)

    def step(tokens: int, prefill: bool = False) -> Step:
        work = uniform_work(problem, tokens)
        return Step(tokens, work, known_floor(work, rates, needs_compute=prefill))

    return Floors(rates, tuple(map(step, DECODE_TOKENS)), step(PREFILL_TOKENS, prefill=True))

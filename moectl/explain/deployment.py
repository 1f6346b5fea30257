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
    """How many further copies of w13 and of w2 live at the peak of an engine's repacking of one layer.

    Counted are tensors as large as a layer's weights with their scales; scratch of single experts is
    small beside them and left out. `why` says what the copies are.
    """

    w13: int
    w2: int
    why: str


REPACKING: tuple[tuple[str, Repacking], ...] = (
    ("plain", Repacking(0, 0, "weights are used as they are loaded")),
    ("triton-wna16", Repacking(0, 0, "weights are used as they are loaded")),
    ("deep-gemm", Repacking(0, 0, "weights stay, scales alone are rearranged")),
    ("cutlass-nvfp4", Repacking(0, 0, "weights stay, scales alone are rearranged")),
    ("flashinfer-cutlass-nvfp4", Repacking(0, 0, "halves are exchanged in place")),
    ("trtllm-bf16", Repacking(0, 0, "experts are rearranged in place")),
    ("cutedsl", Repacking(1, 0, "w13 is interleaved beside the loaded one")),
    ("cutlass-bf16", Repacking(1, 0, "w13 with its halves exchanged lives beside the loaded one")),
    ("cutlass-fp8", Repacking(1, 0, "w13 with its halves exchanged lives beside the loaded one")),
    ("cutlass-w4a8", Repacking(1, 1, "the encoded weights live beside the loaded ones")),
    ("cutlass", Repacking(3, 1, "w13 is de-interleaved, exchanged and interleaved, w2 once, all alive")),
    ("marlin-int", Repacking(2, 2, "transposed and packed weights live beside the loaded ones")),
    ("marlin-mxfp4", Repacking(1, 1, "the packed weights live beside the loaded ones")),
    ("marlin", Repacking(1, 2, "packed experts are collected, then joined, beside the loaded weights")),
    ("trtllm-nvfp4", Repacking(1, 1, "the shuffled weights live beside the loaded ones")),
    ("trtllm-fp8-block", Repacking(2, 1, "w13 is exchanged and shuffled, w2 shuffled, all alive")),
    ("trtllm-fp8-tensor", Repacking(4, 1, "w13 is exchanged, interleaved, shuffled and stacked, all alive")),
    ("trtllm-mxfp8", Repacking(3, 1, "w13 is exchanged, reordered and shuffled, w2 shuffled, all alive")),
    ("trtllm-mxfp4", Repacking(3, 1, "w13 is exchanged, shuffled and stacked, w2 shuffled, all alive")),
    ("trtllm-mxint4", Repacking(2, 1, "shuffled experts are collected, then stacked")),
    ("triton", Repacking(1, 1, "the swizzled weights live beside the loaded ones")),
    ("aiter", Repacking(1, 1, "the shuffled weights live beside the loaded ones")),
    ("moectl", Repacking(1, 1, "the tiled weights live beside the loaded ones")),
    ("", Repacking(1, 1, "assumed: one rearranged copy beside the loaded weights")),
)
"""By the beginning of a layout's name, the first that fits: how vLLM 0.33.0 makes each layout after
loading (`process_weights_after_loading`, layer by layer, once every weight is there)."""


def repacking(layout: str) -> Repacking:
    """The row of `REPACKING` for `layout`; a backend that names no layout takes weights as they are."""
    if not layout:
        return REPACKING[0][1]
    return next(row for prefix, row in REPACKING if layout.startswith(prefix))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one layer's expert weights, scales, zero points and biases on one rank.

    `stored` as the checkpoint's formats take them, `padded` with the chosen backend's sizes, `repacking`
    on top of all layers' while this one is repacked at load time, for the reason `why`. Other weights,
    the KV cache and the allocator's slack are not counted.
    """

    stored: int
    padded: int
    repacking: int
    why: str

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
    w13, w2 = problem.matrix_bytes(padded=True)
    return Memory(
        problem.expert_bytes() * problem.local_experts,
        (w13 + w2) * problem.local_experts,
        (row.w13 * w13 + row.w2 * w2) * problem.local_experts,
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

"""How fast this machine converts a planned layer: a few of its experts, in memory, without any file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import MoectlError
from ..stream.expert_batches import ExpertBatches
from ..stream.pipeline import usable_cores
from ..stream.source_reader import as_bytes
from .conversion_plan import ConversionPlan

SAMPLE_BYTES = 32 << 20
"""Bytes of experts that are converted for the estimate; at least one expert."""

HASHED_BYTES = 8 << 20

FILLER = 0x38
"""A byte that makes possible numbers everywhere: 1 as E4M3, small ones as E8M0, BF16 and F32."""

ASSUMED_RATE = 300e6
"""Bytes read a second where the sample's numbers cannot be converted: what two cores reach, about."""


@dataclass(frozen=True)
class ConversionRate:
    """Expert bytes read a second, and whether that was measured here; the disk is not counted."""

    bytes_per_second: float
    measured: bool


def measured_rate(plan: ConversionPlan, threads: int | None = None) -> ConversionRate:
    """The `ConversionRate` on the CPU, with as many threads as `convert` would use."""
    try:
        return ConversionRate(_sample(plan, threads or usable_cores()), True)
    except MoectlError:
        return ConversionRate(ASSUMED_RATE, False)


def _sample(plan: ConversionPlan, threads: int) -> float:
    layer = plan.layers[0]
    batches, writer = ExpertBatches(layer.map), layer.writer
    experts = max(1, min(layer.batch, SAMPLE_BYTES // max(1, batches.read_bytes(1))))
    nbytes = batches.read_bytes(experts)
    stored = batches.stored(torch.full((nbytes,), FILLER, dtype=torch.uint8), experts)
    made = torch.empty(batches.made_bytes(experts), dtype=torch.uint8)
    written = torch.empty(writer.buffer_bytes(experts), dtype=torch.uint8)

    def work() -> None:
        held = layer.share.cut(batches.convert(stored, made))
        for _ in writer.store(held, 0, writer.update_statistics(held, {}), written):
            pass

    work()
    piece = written[:HASHED_BYTES]
    hashing = _seconds(lambda: hashlib.sha256(as_bytes(piece)).digest()) / max(1, len(piece))
    moved = nbytes + len(written)
    # Reading and writing copy every byte once, and a first touch costs as much again.
    beside = moved * hashing + 2 * _seconds(lambda: written.clone()) * moved / max(1, len(written))
    working = min(_seconds(work) for _ in range(3))
    # The work itself takes all threads.
    return nbytes / (working + beside / threads)


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)

"""Estimates the conversion rate of this machine from a few experts in memory, without touching a file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import MoectlError
from ...lazy_torch import torch
from ..stream.expert_batches import ExpertBatches
from ..stream.pipeline import usable_cores
from ..stream.source_reader import as_bytes
from .conversion_plan import ConversionPlan

SAMPLE_BYTES = 16 << 20
"""Bytes of experts converted for the estimate; at least one expert."""

ENOUGH_SECONDS = 0.5
"""The sample is converted up to three times, but not again after this time: nobody waits long for a plan."""

HASHED_BYTES = 8 << 20

FILLER = 0x38
"""A byte that is a valid number in every format: 1 as E4M3, small numbers as E8M0, BF16 and F32."""

ASSUMED_RATE = 300e6
"""Bytes per second to assume if the sample cannot be converted: roughly the rate of two cores."""


@dataclass(frozen=True)
class ConversionRate:
    """Expert bytes read per second, disk time excluded, and whether the rate was measured on this machine."""

    bytes_per_second: float
    measured: bool


def measured_rate(plan: ConversionPlan, threads: int | None = None) -> ConversionRate:
    """The `ConversionRate` on the CPU, with as many threads as `convert` uses; never raises MoectlError.

    It is assumed where torch or numpy is not installed, as `convert --dry-run` needs neither.
    """
    try:
        return ConversionRate(_sample(plan, threads or usable_cores()), True)
    except (MoectlError, ModuleNotFoundError):
        return ConversionRate(ASSUMED_RATE, False)


def _sample(plan: ConversionPlan, threads: int) -> float:
    layer = plan.layers[0]
    batches, writer = ExpertBatches(layer.map), layer.writer
    experts = max(1, min(layer.batch, SAMPLE_BYTES // max(1, batches.read_bytes(1))))
    nbytes = batches.read_bytes(experts)
    stored = batches.stored(torch.full((nbytes,), FILLER, dtype=torch.uint8), experts)
    canonical = torch.empty(batches.made_bytes(experts), dtype=torch.uint8)
    written = torch.empty(writer.buffer_bytes(experts), dtype=torch.uint8)

    def work() -> None:
        batch = layer.rank_slice.slice(batches.convert(stored, canonical))
        for _ in writer.store(batch, 0, writer.update_statistics(batch, {}), written):
            pass

    work()
    sample = written[:HASHED_BYTES]
    hash_seconds = _seconds(lambda: hashlib.sha256(as_bytes(sample)).digest()) / max(1, len(sample))
    moved = nbytes + len(written)
    # Reading and writing copy every byte once, and the first touch of a page costs as much again.
    overlapped = moved * hash_seconds + 2 * _seconds(lambda: written.clone()) * moved / max(1, len(written))
    converting = [_seconds(work)]
    while len(converting) < 3 and sum(converting) < ENOUGH_SECONDS:
        converting.append(_seconds(work))
    # Conversion uses all threads; hashing and copying run one task per thread.
    return nbytes / (min(converting) + overlapped / threads)


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)

"""The memory budget of a conversion, and the batch size that fits it."""

from __future__ import annotations

import math

import psutil

from ...errors import UsageError
from ..layouts.registry import BLOCK_BYTES
from ..sources import LayerMapping
from ..steps.value_steps import Shapes
from ..stream.expert_batches import buffer_bytes
from ..stream.layer_writer import Writer
from ..stream.pipeline import SLOTS

MIB = 1 << 20
BASE_MEMORY = 24 * MIB
"""Bytes needed for any batch size: copy buffers, headers, allocator slack."""

LARGEST_BATCH = 64 * MIB
"""Canonical bytes of a batch above which larger batches are no faster."""

CHAIN_COPIES = 6
"""Copies of a block of experts (the larger of input and output) that a chain holds at most: codes unpacked
to bytes count twice, and a step holds both its input and its output."""


def default_memory() -> int:
    """A quarter of this machine's memory, bytes."""
    return int(psutil.virtual_memory().total) // 4


def plan_batch(mapped: LayerMapping, writer: Writer, slices: Shapes, memory: int) -> tuple[int, int]:
    """Experts converted at once, and the bytes that this takes in addition to the buffers.

    `slices` are the shapes of a rank's slices of a batch. Raises UsageError if one expert does not fit
    into `memory` bytes.
    """
    largest = max(slot_buffers(mapped, writer, 1))
    batch = min(mapped.experts, max(1, LARGEST_BATCH // largest))

    def needed(batch: int, slots: int) -> int:
        slot = sum(slot_buffers(mapped, writer, batch))
        return BASE_MEMORY + slots * slot + working_memory(mapped, writer, batch, slices)

    while needed(batch, SLOTS) > memory and batch > 1:
        batch = batch * 3 // 4
    if (least := needed(batch, 1)) > memory:
        raise UsageError(
            f"one expert of layer {mapped.layer} needs {math.ceil(least / MIB)} MiB, "
            f"--max-memory allows {f'{memory / MIB:.4g} MiB' if memory >= MIB else f'{memory} bytes'}.",
            hint=f"Give --max-memory {math.ceil(least / MIB)}MiB or more.",
        )
    return batch, working_memory(mapped, writer, batch, slices)


def slot_buffers(mapped: LayerMapping, writer: Writer, batch: int) -> tuple[int, int, int]:
    """Bytes of `batch` experts as read from the source, in canonical form, and as written."""
    read, canonical = (buffer_bytes(shapes, batch) for shapes in (mapped.read_shapes, mapped.made_shapes))
    return read, canonical, writer.buffer_bytes(batch)


def working_memory(mapped: LayerMapping, writer: Writer, batch: int, slices: Shapes) -> int:
    """Bytes needed at most in addition to the buffers to convert a batch and take `slices` of it."""
    roles = frozenset(statistic.role for statistic in writer.statistics)
    statistics = sum(tensors.mapping.each for tensors in mapped.filling(roles)) if roles else 0
    statistics += buffer_bytes({role: mapped.shapes[role] for role in roles}, 1)
    reading = CHAIN_COPIES * min(mapped.raw_bytes * batch, BLOCK_BYTES)
    sliced = buffer_bytes(slices, batch)
    return batch * statistics + reading + sliced + CHAIN_COPIES * writer.block_bytes(batch)

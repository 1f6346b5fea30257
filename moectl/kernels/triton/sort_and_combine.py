"""Sorting assignments by expert, and summing each token's parts: what surrounds the GEMMs of a layer.

Grids depend on sizes alone, nothing is read back and no sum depends on an order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from . import sort_and_combine_kernels as kernels
from .kernel_family import KernelCall, Order

INTERPRETED = not isinstance(kernels._combine_kernel, triton.runtime.JITFunction)
"""True under ``TRITON_INTERPRET=1``: kernels run on the CPU, slowly, for tests."""

FEW = 2048
"""Up to so many assignments each expert's program reads all of them; beyond, blocks are counted first."""

BLOCK = 128
"""Assignments of a block; all pairs of them are compared to rank them."""

ROWS = 256
"""Of a batch that one program lists."""

EXPERTS_AT_ONCE, BLOCKS_AT_ONCE = 8, 256
"""Counts that one program sums: columns, and rows at a time."""


def overlaps() -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def launch_options() -> dict[str, Any]:
    """Arguments of a launch of a kernel with a `PDL` parameter."""
    return {"PDL": True, "launch_pdl": True} if overlaps() else {"PDL": False}


def sort_by_expert(ids: Tensor, experts: int) -> Order:
    """Slots ``[T]`` by expert, in order within each, and where each expert's begin, ``[experts + 1]``.

    Args:
        ids: ``[T]`` int32, flat; ids that are not 0 .. experts - 1 are left out, so that only the first
            ``offsets[experts]`` slots are written.

    One launch for a few assignments, three for more.
    """
    slots, offsets = ids.new_empty(ids.numel()), ids.new_empty(experts + 1)
    (_sort_few if ids.numel() <= FEW else _sort_many)(ids, slots, offsets, experts)
    return slots, offsets


def order_of(call: KernelCall, experts: int) -> Order:
    """A call's slots by expert and their offsets: as given, or sorted now."""
    return call.order or sort_by_expert(call.ids, experts)


def order_of_counts(counts: Tensor, most: int) -> tuple[Tensor, Tensor, Order]:
    """Ids and weights ``[experts * most]`` of a batch, and its `KernelCall.order`, in one launch.

    Row ``e * most + i`` of a batch is a token of expert e for i below ``counts[e]``, which are integers
    ``[experts]`` (beyond `most` they count as `most`, below 0 as 0); other rows have id -1. Weights are 1.
    """
    experts = len(counts)
    ids = counts.new_empty(experts * most, dtype=torch.int32)
    weights = counts.new_empty(experts * most, dtype=torch.float32)
    slots, offsets = torch.empty_like(ids), ids.new_empty(experts + 1)
    kernels._batch_kernel[(experts, triton.cdiv(most, ROWS))](
        counts.contiguous(),
        ids,
        weights,
        slots,
        offsets,
        most,
        E=experts,
        EPAD=max(16, triton.next_power_of_2(experts)),
        ROWS=ROWS,
        **launch_options(),
    )
    return ids, weights, (slots, offsets)


def _sort_few(ids: Tensor, slots: Tensor, offsets: Tensor, experts: int) -> None:
    t = ids.numel()
    block = max(16, triton.next_power_of_2(t))
    warps = min(4, max(1, block // 64))
    kernels._sort_few_kernel[(experts,)](
        ids, slots, offsets, t, E=experts, BT=block, num_warps=warps, **launch_options()
    )


def _sort_many(ids: Tensor, slots: Tensor, offsets: Tensor, experts: int) -> None:
    t = ids.numel()
    blocks = triton.cdiv(t, BLOCK)
    counts, totals = ids.new_empty(blocks, experts), ids.new_empty(experts)
    options = {"E": experts, **launch_options()}
    bins = max(16, triton.next_power_of_2(experts))
    kernels._count_kernel[(blocks,)](ids, counts, t, BINS=bins, BT=BLOCK, num_warps=1, **options)
    rows = min(BLOCKS_AT_ONCE, triton.next_power_of_2(blocks))
    kernels._place_kernel[(triton.cdiv(experts, EXPERTS_AT_ONCE),)](
        counts, totals, blocks, BE=EXPERTS_AT_ONCE, BB=rows, **options
    )
    kernels._scatter_kernel[(blocks,)](ids, counts, totals, slots, offsets, t, BINS=bins, BT=BLOCK, **options)


@dataclass(frozen=True, slots=True)
class CombineLaunch:
    """One launch of the sum: `rows` tokens by `columns` of the hidden size in a program of `warps`."""

    rows: int
    columns: int
    warps: int


SUMS: tuple[tuple[float, CombineLaunch], ...] = (
    (16, CombineLaunch(1, 256, 1)),
    (64, CombineLaunch(1, 512, 4)),
    (float("inf"), CombineLaunch(1, 2048, 8)),
)
"""(most tokens, launch), first match. Measured on an H200."""


def finish(call: KernelCall, parts: Tensor, experts: int) -> None:
    """`combine`, unless `parts` already are the output."""
    if parts is not call.y:
        combine(parts, call.ids, call.y, experts)


def combine(parts: Tensor, ids: Tensor, y: Tensor, experts: int, launch: CombineLaunch | None = None) -> None:
    """Writes `y` ``[tokens, hidden]``: the sum of each token's parts, by choice, then by split.

    Args:
        parts: ``[splits, T, hidden]`` or ``[T, hidden]``; only slots of valid ids are read.
        ids: ``[T]`` int32, flat, top-k to a token.
        launch: other than the table's, for tuning.
    """
    tokens, hidden = y.shape
    launch = launch or next(found for most, found in SUMS if tokens <= most)
    grid = (triton.cdiv(tokens, launch.rows), triton.cdiv(hidden, launch.columns))
    kernels._combine_kernel[grid](
        parts,
        y,
        ids,
        ids.numel(),
        tokens,
        hidden,
        E=experts,
        TOP_K=ids.numel() // tokens,
        SPLIT_K=parts.numel() // (ids.numel() * hidden),
        ROWS=launch.rows,
        BH=launch.columns,
        INTERP=INTERPRETED,
        num_warps=launch.warps,
        **launch_options(),
    )

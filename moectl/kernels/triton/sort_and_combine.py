"""The steps around a layer's GEMMs: sorting assignments by expert, and summing each token's expert outputs.

Grids depend on sizes only, nothing is copied from the GPU, and sums have a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from . import sort_and_combine_kernels as kernels
from .kernel_family import ExpertOrder, KernelCall

INTERPRETED = not isinstance(kernels._combine_kernel, triton.runtime.JITFunction)
"""True under ``TRITON_INTERPRET=1``: for tests, kernels run on the CPU, slowly."""

SIZES = (64, 512, 2048)
"""Sizes to which a number of assignments is rounded up: each is another kernel to compile."""

FEW = SIZES[-1]
"""Maximum number of assignments for which each expert's program reads all ids; more are counted in blocks."""

BLOCK = 128
"""Assignments per block; they are ranked by comparing all pairs."""

ROWS = 256
"""Rows of a batch that one program lists."""

ZEROED = 16
"""Tokens that one program looks at, to zero the output of those without an expert."""

EXPERTS_AT_ONCE, BLOCKS_AT_ONCE = 8, 256
"""Columns and rows of the counts that one program adds up at a time."""


def launch_options() -> dict[str, Any]:
    """Launch arguments of a kernel with a `PDL` parameter (programmatic dependent launch, from Hopper on)."""
    if not INTERPRETED:
        target = triton.runtime.driver.active.get_current_target()
        if target.backend == "cuda" and target.arch >= 90:
            return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def sort_by_expert(ids: Tensor, experts: int) -> ExpertOrder:
    """Slots ``[T]`` stably sorted by expert, and the offset of each expert's first slot, ``[experts + 1]``.

    One launch for up to `FEW` assignments, three for more.

    Args:
        ids: ``[T]`` int32, flat; ids outside ``[0, experts)`` are skipped, so that only the first
            ``offsets[experts]`` slots are written.
    """
    slots, offsets = ids.new_empty(ids.numel()), ids.new_empty(experts + 1)
    (_sort_few if ids.numel() <= FEW else _sort_many)(ids, slots, offsets, experts)
    return slots, offsets


def order_of(call: KernelCall, experts: int) -> ExpertOrder:
    """The call's `order` if it has one; otherwise its assignments are sorted."""
    return call.order or sort_by_expert(call.ids, experts)


def order_of_counts(counts: Tensor, most: int) -> tuple[Tensor, Tensor, ExpertOrder]:
    """Ids and weights ``[experts * most]`` of a batch, and its `KernelCall.order`, in one launch.

    Row ``e * most + i`` of the batch is a token of expert e if ``i < counts[e]``; other rows have id -1.
    `counts` are integers ``[experts]``, clamped to ``[0, most]``. Weights are 1.
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
    block = next(size for size in SIZES if t <= size)
    warps = min(4, block // 64)
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
    kernels._place_kernel[(triton.cdiv(experts, EXPERTS_AT_ONCE),)](
        counts, totals, blocks, BE=EXPERTS_AT_ONCE, BB=BLOCKS_AT_ONCE, **options
    )
    kernels._scatter_kernel[(blocks,)](ids, counts, totals, slots, offsets, t, BINS=bins, BT=BLOCK, **options)


@dataclass(frozen=True, slots=True)
class CombineLaunch:
    """A launch of the sum: tokens (`rows`), columns of the hidden size and warps per program."""

    rows: int
    columns: int
    warps: int


SUMS: tuple[tuple[float, CombineLaunch], ...] = (
    (16, CombineLaunch(1, 256, 1)),
    (64, CombineLaunch(1, 512, 4)),
    (float("inf"), CombineLaunch(1, 2048, 8)),
)
"""(maximum tokens, launch); the first match is used. Measured on an H200."""


def finish(call: KernelCall, parts: Tensor, experts: int) -> None:
    """`combine`, unless `parts` is already the output: rows of tokens without an expert are zeroed then."""
    if parts is not call.y:
        combine(parts, call.ids, call.y, experts)
    elif call.order is None:
        tokens, hidden = call.y.shape
        kernels._zero_skipped_kernel[(triton.cdiv(tokens, ZEROED),)](
            call.ids, call.y, tokens, hidden, E=experts, ROWS=ZEROED, BH=1024, **launch_options()
        )


def combine(parts: Tensor, ids: Tensor, y: Tensor, experts: int, launch: CombineLaunch | None = None) -> None:
    """Writes `y` ``[tokens, hidden]``: the sum of each token's parts over its choices, then over K splits.

    Args:
        parts: ``[splits, T, hidden]`` or ``[T, hidden]``; only slots of valid ids are read.
        ids: ``[T]`` int32, flat, top-k per token.
        launch: replaces the one in `SUMS`, for tuning.
    """
    tokens, hidden = y.shape
    launch = launch or next(entry for max_tokens, entry in SUMS if tokens <= max_tokens)
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

"""Tokens in rows by expert, quantized on the way, as grouped GEMMs of other libraries take them.

Three steps around two GEMMs: `place_rows` gives each assignment a row, `scatter_tokens` fills the rows,
`activate_rows` is between the GEMMs; `gemm_glue.weighted_sum` makes the result. Grids depend on sizes only,
nothing is copied from the GPU, and assignments whose id is not a local expert have no row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...problem.moe_problem import Activation
from ..choice.launch import FEW
from ..triton.kernel_family import activation_numbers
from ..triton.sort_and_combine import INTERPRETED, launch_options, sort_by_expert
from . import grouped_rows_kernels as kernels

GROUP = 128
"""Columns that are read together, and share a scale where scales are of groups."""

GROUPS_AT_ONCE = 16
"""Groups of columns per program."""

PROGRAMS_PER_EXPERT = 8
"""Programs that share the slots of one expert if there are many assignments."""

WHOLE_ROWS = 0
"""Instead of a group: one scale for each row."""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Where each assignment's row is.

    Attributes:
        rows: ``[T]`` int32, the row of each assignment; -1 for skipped ones.
        ends: ``[experts]`` int32, the end of each expert's rows, without the padding behind them.
        counts: ``[experts]`` int32.
        size: number of rows, of which those of no assignment are undefined.
        span: rows whose scales lie in one matrix ``[groups, span]``.
    """

    rows: Tensor
    ends: Tensor
    counts: Tensor
    size: int
    span: int


@dataclass(frozen=True, slots=True)
class RowScales:
    """Scales of quantized rows: fp32, one for each `group` of columns, or for each row (`WHOLE_ROWS`), with
    `powers` rounded up to powers of two."""

    group: int
    powers: bool = False


def rows_for(assignments: int, experts: int, align: int) -> int:
    """Upper bound on the rows of any routing if each expert's begin at a multiple of `align`."""
    bound = assignments + min(assignments, experts) * (align - 1)
    return -(-bound // align) * align


def place_rows(ids: Tensor, experts: int, align: int = 1, apart: int = 0) -> GroupedRows:
    """Rows for the assignments `ids` ``[T]`` int32, stably sorted by expert.

    Args:
        align: each expert's rows begin at a multiple of it, directly behind those of the one before.
        apart: if not 0, the rows of expert e begin at ``e * apart``; at least the tokens of one expert.
    """
    t = ids.numel()
    size = experts * apart if apart else rows_for(t, experts, align)
    placed = GroupedRows(
        torch.empty_like(ids), ids.new_empty(experts), ids.new_empty(experts), size, apart or size
    )
    programs = 1 if t <= FEW else PROGRAMS_PER_EXPERT
    kernels._place_rows_kernel[(experts, programs)](
        ids, *sort_by_expert(ids, experts), placed.rows, placed.ends, placed.counts, t,
        E=experts, BINS=max(16, triton.next_power_of_2(experts)), ALIGN=align, APART=apart,
        BT=256, **launch_options(),
    )  # fmt: skip
    return placed


def batch_rows(counts: Tensor, most: int, apart: int) -> GroupedRows:
    """The rows of a batch ``[experts, most, ...]`` of which expert e has ``counts[e]``; apart by `apart`."""
    experts = len(counts)
    counts = counts.to(torch.int32).clamp(0, most)
    i = torch.arange(most, dtype=torch.int32, device=counts.device)
    first = torch.arange(0, experts * apart, apart, dtype=torch.int32, device=counts.device)
    rows = torch.where(i < counts[:, None], first[:, None] + i, -1)
    return GroupedRows(rows.view(-1), first + counts, counts, experts * apart, apart)


def _outputs(
    placed: GroupedRows, like: Tensor, columns: int, scales: RowScales | None
) -> tuple[Tensor, Tensor]:
    """Rows ``[size, columns]``, and scales ``[size / span, groups, span]``; `like` where there are none."""
    if scales is None:
        return like.new_empty(placed.size, columns), like
    groups = triton.cdiv(columns, scales.group) if scales.group else 1
    made = like.new_empty(placed.size // placed.span, groups, placed.span, dtype=torch.float32)
    return like.new_empty(placed.size, columns, dtype=torch.float8_e4m3fn), made


def _blocks(columns: int, scales: RowScales | None) -> tuple[int, int, int]:
    """Columns of a block, blocks per program, and programs per row."""
    if scales is not None and scales.group == WHOLE_ROWS:
        return triton.next_power_of_2(columns), 1, 1
    group = scales.group if scales else GROUP
    groups = triton.cdiv(columns, group)
    blocks = min(GROUPS_AT_ONCE, triton.next_power_of_2(groups))
    return group, blocks, triton.cdiv(groups, blocks)


def scatter_tokens(
    x: Tensor, placed: GroupedRows, top_k: int, scales: RowScales | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens `x` ``[tokens, columns]`` in their rows, quantized to E4M3 if `scales` are given.

    Returns rows ``[size, columns]`` and scales ``[size / span, groups, span]``; the latter are undefined
    without `scales`. Rows of no assignment, and their scales, are undefined.
    """
    tokens, columns = x.shape
    out, made = _outputs(placed, x, columns, scales)
    group, blocks, programs = _blocks(columns, scales)
    kernels._scatter_kernel[(tokens, programs)](
        x.contiguous(), _stored(out), made, placed.rows, columns, placed.span,
        TOP_K=top_k, GROUP=group, BLOCKS=blocks, QUANTIZED=scales is not None,
        POWERS=scales is not None and scales.powers,
        num_warps=_warps(group * blocks), **launch_options(),
    )  # fmt: skip
    return out, made


def activate_rows(
    x: Tensor, placed: GroupedRows, activation: Activation, scales: RowScales | None = None
) -> tuple[Tensor, Tensor]:
    """The activation of rows `x`, which have all gates before all ups; returns what `scatter_tokens` does."""
    columns = x.shape[-1] // (2 if activation.gated else 1)
    out, made = _outputs(placed, x, columns, scales)
    group, blocks, programs = _blocks(columns, scales)
    numbers = activation_numbers(activation)
    kernels._activate_rows_kernel[(placed.rows.numel(), programs)](
        x, _stored(out), made, placed.rows, columns, placed.span, numbers["alpha"], numbers["limit"],
        ACT=activation.name, GATED=activation.gated, GROUP=group, BLOCKS=blocks,
        QUANTIZED=scales is not None, POWERS=scales is not None and scales.powers, INTERP=INTERPRETED,
        num_warps=_warps(group * blocks),
        **launch_options(),
    )  # fmt: skip
    return out, made


def _stored(rows: Tensor) -> Tensor:
    """`rows` as kernels write them: FP8 codes as bytes in the interpreter, which cannot round to them."""
    return rows.view(torch.uint8) if INTERPRETED and rows.dtype == torch.float8_e4m3fn else rows


def _warps(values: int) -> int:
    """Warps of a program of that many values."""
    return min(16, max(1, values // 512))

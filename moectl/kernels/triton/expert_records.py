"""Records for kernels with few tokens per expert: each lists up to `tokens` assignments of one expert."""

from __future__ import annotations

import math
from typing import Any

import triton
from torch import Tensor

from ..choice.launch import token_tiles
from . import expert_records_kernels as kernels
from .kernel_family import ExpertOrder
from .sort_and_combine import launch_options, sort_by_expert

PLANS: tuple[tuple[int, int], ...] = ((64, 32), (256, 16), (2048, 8))
"""(maximum assignments, assignments that one program places); the first match is used. Every entry is another
kernel to compile."""

PLANNED_AT_ONCE = PLANS[-1][0]
"""Maximum number of assignments for which one launch makes the records; more are sorted first."""

COLUMNS = 1024
"""Columns of a token that one program reorders."""


def plan(ids: Tensor, experts: int, tokens: int, order: ExpertOrder | None = None) -> Tensor:
    """Records ``[records, 8 + tokens]`` int32 of the assignments `ids` (see `expert_records_kernels._plan`).

    If `order` is given, the records are cut from it.
    """
    arguments, programs = _plan_arguments(ids, experts, tokens)
    if order is not None or ids.numel() > PLANNED_AT_ONCE:
        _cut(order or sort_by_expert(ids, experts), arguments["PLAN"], experts, tokens)
    else:
        kernels._plan_kernel[(programs,)](ids, num_warps=4, **arguments, **launch_options())
    records: Tensor = arguments["PLAN"]
    return records


def plan_and_order(
    ids: Tensor, experts: int, tokens: int, x: Tensor, columns: int, order: ExpertOrder | None = None
) -> tuple[Tensor, Tensor]:
    """`plan`, and `x` padded to `columns` columns in the order of `expert_records_kernels._order`."""
    arguments, programs = _plan_arguments(ids, experts, tokens)
    out = x.new_empty(len(x), columns)
    order_arguments = {"X": x, "OUT": out, "K": columns, "KX": x.shape[1], "BK": COLUMNS}
    blocks = len(x) * math.ceil(columns / COLUMNS)
    if order is not None or ids.numel() > PLANNED_AT_ONCE:
        _cut(order or sort_by_expert(ids, experts), arguments["PLAN"], experts, tokens)
        kernels._order_kernel[(blocks,)](num_warps=4, **order_arguments, **launch_options())
    else:
        kernels._plan_and_order_kernel[(programs + blocks,)](
            ids, PLANS=programs, num_warps=4, **arguments, **order_arguments, **launch_options()
        )
    return arguments["PLAN"], out


def _plan_arguments(ids: Tensor, experts: int, tokens: int) -> tuple[dict[str, Any], int]:
    """Arguments of the plan kernels besides the ids, and the number of programs."""
    t = ids.numel()
    records = token_tiles(t, experts, tokens)
    padded, per_program = next((plan for plan in PLANS if t <= plan[0]), PLANS[-1])
    arguments = {
        "PLAN": ids.new_empty(records, 8 + tokens),
        "T": t,
        "RECORDS": records,
        "E": experts,
        "EPAD": max(16, triton.next_power_of_2(experts)),
        "TPAD": padded,
        "PER": per_program,
        "BLOCK": tokens,
    }
    return arguments, math.ceil(max(t, records) / per_program)


def _cut(order: ExpertOrder, out: Tensor, experts: int, tokens: int) -> None:
    slots, offsets = order
    sizes = {"E": experts, "EPAD": max(16, triton.next_power_of_2(experts)), "BLOCK": tokens}
    kernels._cut_kernel[(experts,)](slots, offsets, out, len(out), num_warps=1, **sizes, **launch_options())

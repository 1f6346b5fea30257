"""Which tokens a program has, in kernels of few tokens per expert: records of one expert's assignments."""

from __future__ import annotations

import math
from typing import Any

import triton
from torch import Tensor

from . import expert_records_kernels as kernels
from .expert_items import overlapping
from .kernel_family import Order
from .launches import token_tiles
from .sort_and_combine import sort_by_expert

PLANNED_AT_ONCE = 2048
"""Up to so many assignments one launch makes the records; beyond, they are sorted first."""

EACH, PAIRS = 32, 16384
"""Assignments that one program places at most, and pairs of them with all others that it compares."""

COLUMNS = 1024
"""Of a token that one program puts in order."""


def plan(ids: Tensor, experts: int, tokens: int, order: Order | None = None) -> Tensor:
    """Records ``[records, 8 + tokens]`` int32 of the assignments `ids` (see `records_kernels._plan`).

    Where their `order` is known they are cut from that.
    """
    arguments, programs = _plan_arguments(ids, experts, tokens)
    if order is not None or ids.numel() > PLANNED_AT_ONCE:
        _cut(order or sort_by_expert(ids, experts), arguments["PLAN"], experts, tokens)
    else:
        kernels._plan_kernel[(programs,)](ids, num_warps=4, **arguments, **overlapping())
    out: Tensor = arguments["PLAN"]
    return out


def plan_and_order(
    ids: Tensor, experts: int, tokens: int, x: Tensor, columns: int, order: Order | None = None
) -> tuple[Tensor, Tensor]:
    """`plan`, and `x` in `columns` columns in the order of `records_kernels._order`."""
    arguments, programs = _plan_arguments(ids, experts, tokens)
    out = x.new_empty(len(x), columns)
    columns_of = {"X": x, "OUT": out, "K": columns, "KX": x.shape[1], "BK": COLUMNS}
    blocks = len(x) * math.ceil(columns / COLUMNS)
    if order is not None or ids.numel() > PLANNED_AT_ONCE:
        _cut(order or sort_by_expert(ids, experts), arguments["PLAN"], experts, tokens)
        kernels._order_kernel[(blocks,)](num_warps=4, **columns_of, **overlapping())
    else:
        kernels._plan_and_order_kernel[(programs + blocks,)](
            ids, PLANS=programs, num_warps=4, **arguments, **columns_of, **overlapping()
        )
    return arguments["PLAN"], out


def _plan_arguments(ids: Tensor, experts: int, tokens: int) -> tuple[dict[str, Any], int]:
    """Arguments of a plan besides the ids, and its programs."""
    t = ids.numel()
    records = token_tiles(t, experts, tokens)
    padded = max(64, triton.next_power_of_2(t))
    each = min(EACH, max(1, PAIRS // padded))
    arguments = {
        "PLAN": ids.new_empty(records, 8 + tokens),
        "T": t,
        "RECORDS": records,
        "E": experts,
        "EPAD": max(16, triton.next_power_of_2(experts)),
        "TPAD": padded,
        "PER": each,
        "BLOCK": tokens,
    }
    return arguments, math.ceil(max(t, records) / each)


def _cut(order: Order, out: Tensor, experts: int, tokens: int) -> None:
    slots, offsets = order
    sizes = {"E": experts, "EPAD": max(16, triton.next_power_of_2(experts)), "BLOCK": tokens}
    kernels._cut_kernel[(experts,)](slots, offsets, out, len(out), num_warps=1, **sizes, **overlapping())

"""Which program has which tokens, in kernels of few tokens per expert: a list of blocks of one expert."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from . import marlin_kernels as kernels
from .kernel_family import Order
from .launches import token_tiles
from .sort_and_combine import overlaps, sort_by_expert

BASES = {"bf16": 128, "fp16": 1024}
"""Where the floats of a dtype count in ones: codes are or-ed into them."""


def items_of(ids: Tensor, experts: int, block: int, order: Order | None = None) -> tuple[dict[str, Any], int]:
    """Routing arguments of kernels that work through items, and the bound of their number.

    An item is up to `block` tokens of one expert. Two or four small launches sort the assignments by
    expert, unless their `order` is known, and list the items; the bound depends on sizes alone.
    """
    slots, offsets = order or sort_by_expert(ids, experts)
    bound = token_tiles(ids.numel(), experts, block)
    items = ids.new_empty(3, bound)
    pad = triton.next_power_of_2(experts)
    kernels._items_kernel[(1,)](offsets, items, bound, E=experts, EPAD=pad, BM=block, **overlapping())
    return {"SORTED": slots, "ITEMS": items, "bound": bound}, bound


def overlapping() -> dict[str, Any]:
    """Options of a kernel that starts while the one before it ends, where the GPU can do that."""
    return {"PDL": True, "launch_pdl": True} if overlaps() else {"PDL": False}

# mypy: ignore-errors
"""Token tiles of few assignments in one launch: sorted by expert and split, as `mid.schedule` does in two."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..sort_and_combine import launch_options
from ..sort_and_combine_kernels import _await_inputs

SIZES = (64, 256)
"""Sizes to which a number of assignments is rounded up, each another kernel: it compares all pairs."""

MOST = SIZES[-1]
"""Maximum number of assignments."""


def few_tiles(ids: Tensor, experts: int, tokens: int, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted slots ``[T]``, tiles ``[bound, 4]``, and their number with the number of positions, ``[2]``.

    Args:
        ids: ``[T]`` int32, flat, at most `MOST`; ids outside ``[0, experts)`` are skipped.
        tokens: most tokens of a tile.
        bound: `launches.token_tiles` of them.
    """
    t = ids.numel()
    slots, tiles, counts = ids.new_empty(t), ids.new_empty(bound, 4), ids.new_empty(2)
    padded = next(size for size in SIZES if t <= size)
    options = {"num_warps": padded // 32, **launch_options()}
    _few_tiles_kernel[(1,)](ids, slots, tiles, counts, t, tokens, E=experts, TPAD=padded, **options)
    return slots, tiles, counts


@triton.jit(do_not_specialize=["T", "TOKENS"])
def _few_tiles_kernel(
    IDS, SORTED, TILES, COUNTS, T, TOKENS, E: tl.constexpr, TPAD: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program; see `few_tiles`, and `mid_kernels._token_tiles_kernel` for the tiles."""
    _await_inputs(PDL)
    t = tl.arange(0, TPAD)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    live = (ids >= 0) & (ids < E)
    expert = tl.where(live, ids, E)
    same = expert[None, :] == expert[:, None]
    earlier = t[None, :] < t[:, None]
    rank = tl.sum((same & earlier).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    first = tl.sum((expert[None, :] < expert[:, None]).to(tl.int32), 1)
    tl.store(SORTED + first + rank, t, mask=live)
    tiles = (count + TOKENS - 1) // TOKENS
    part = (count + tiles - 1) // tiles
    begins = live & (rank % part == 0)
    position = tl.where(begins, first + rank, TPAD)
    number = tl.sum((position[None, :] < position[:, None]).to(tl.int32), 1)
    at = TILES + number * 4
    tl.store(at, expert, mask=begins)
    tl.store(at + 1, position, mask=begins)
    tl.store(at + 2, tl.minimum(part, count - rank), mask=begins)
    tl.store(COUNTS, tl.sum(begins.to(tl.int32), 0))
    tl.store(COUNTS + 1, tl.sum(live.to(tl.int32), 0))

# mypy: ignore-errors
"""Token tiles of few assignments in one launch: sorted by expert and split, as `mid.schedule` does in two."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..sort_and_combine import launch_options

SIZES = (64, 128, 256)
"""Sizes to which a number of assignments is rounded up, each another kernel: it compares all pairs."""

AT_ONCE = 16
"""Assignments with which all are compared at a time: more do not fit in registers."""

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
    padded = next(size for size in SIZES if t <= size)
    # One allocation: what the next kernel gets must not be memory that this one still writes.
    slots, *starts = ids.new_empty(4, padded)
    slots, tiles, counts = slots[:t], ids.new_empty(bound, 4), ids.new_empty(2)
    options = {"num_warps": padded // 32, **launch_options()}
    _few_tiles_kernel[(1,)](
        ids, slots, starts[0], tiles, counts, t, tokens, E=experts, TPAD=padded, AT_ONCE=AT_ONCE, **options
    )
    return slots, tiles, counts


@triton.jit(do_not_specialize=["T", "TOKENS"])
def _few_tiles_kernel(
    IDS, SORTED, STARTS, TILES, COUNTS, T, TOKENS,
    E: tl.constexpr, TPAD: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program; see `few_tiles`, and `mid_kernels._token_tiles_kernel` for the tiles.

    STARTS ``[3, TPAD]`` holds by position whether a tile begins there, its expert, and its tokens.
    """
    if PDL:  # in this order, for what runs beside it reads the same inputs
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.arange(0, TPAD)
    expert = _expert_of(IDS, t, T, E)
    live = expert < E
    rank = tl.zeros((TPAD,), dtype=tl.int32)
    count = tl.zeros((TPAD,), dtype=tl.int32)
    first = tl.zeros((TPAD,), dtype=tl.int32)
    for begin in range(0, TPAD, AT_ONCE):
        other = begin + tl.arange(0, AT_ONCE)
        its_expert = _expert_of(IDS, other, T, E)
        # Each thread adds up a column of its own.
        same = its_expert[:, None] == expert[None, :]
        rank += tl.sum((same & (other[:, None] < t[None, :])).to(tl.int32), 0)
        count += tl.sum(same.to(tl.int32), 0)
        first += tl.sum((its_expert[:, None] < expert[None, :]).to(tl.int32), 0)
    position = tl.where(live, first + rank, t)
    total = tl.sum(live.to(tl.int32), 0)
    tl.store(SORTED + position, t, mask=live)
    tiles = (count + TOKENS - 1) // TOKENS
    part = (count + tiles - 1) // tiles
    begins = live & (rank % part == 0)
    tl.store(STARTS + position, begins.to(tl.int32), mask=live)
    tl.store(STARTS + TPAD + position, expert, mask=live)
    tl.store(STARTS + 2 * TPAD + position, tl.minimum(part, count - rank), mask=live)
    tl.debug_barrier()  # what threads stored is read by others
    begins = tl.load(STARTS + t, mask=t < total, other=0)
    at = TILES + (tl.cumsum(begins, 0) - begins) * 4
    tl.store(at, tl.load(STARTS + TPAD + t, mask=begins > 0), mask=begins > 0)
    tl.store(at + 1, t, mask=begins > 0)
    tl.store(at + 2, tl.load(STARTS + 2 * TPAD + t, mask=begins > 0), mask=begins > 0)
    tl.store(COUNTS, tl.sum(begins, 0))
    tl.store(COUNTS + 1, total)


@triton.jit
def _expert_of(IDS, t, T, E: tl.constexpr):
    """The experts of assignments; E for those that are skipped or do not exist."""
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E)

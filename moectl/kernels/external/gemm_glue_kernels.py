# mypy: ignore-errors
"""Device code around the GEMMs of external kernels: blocks of assignments, activations, weighted sums.

`IDS` are flat, one per assignment (token, choice); a *slot* is an index into them. Ids outside ``[0, E)``
are skipped. `PDL` as in `sort_and_combine_kernels`.
"""

import triton
import triton.language as tl

from ..triton.mtile64_kernels import _nearest
from ..triton.portable_kernels import _gated, _ungated
from ..triton.sort_and_combine_kernels import _await_inputs


@triton.jit
def _clear_part(LOCKS, e, LOCKED: tl.constexpr, E: tl.constexpr, BL: tl.constexpr):
    """Zeroes this program's share of the `LOCKED` words."""
    for at in range(e * BL, LOCKED, E * BL):
        words = at + tl.arange(0, BL)
        tl.store(LOCKS + words, tl.zeros((BL,), tl.int32), mask=words < LOCKED)


@triton.jit
def _first_block(counts, bins, e, BLOCK: tl.constexpr):
    """(first block, number of blocks, number of slots) of expert e."""
    blocks = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(bins < e, blocks, 0), 0)
    mine = tl.sum(tl.where(bins == e, blocks, 0), 0)
    return first, mine, tl.sum(tl.where(bins == e, counts, 0), 0)


@triton.jit(do_not_specialize=["T"])
def _align_few_kernel(
    IDS, SLOTS, EXPERTS, TOTAL, LOCKS, T,
    E: tl.constexpr, BINS: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
    MOST: tl.constexpr, LOCKED: tl.constexpr, BL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Slots by expert in blocks of `BLOCK`, padded with T; each expert's program reads all ids."""
    _await_inputs(PDL)
    e = tl.program_id(0)
    t = tl.arange(0, BT)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    live = (ids >= 0) & (ids < E)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.where(live, ids, 0), BINS, mask=live)
    first, mine, count = _first_block(counts, bins, e, BLOCK)
    match = (ids == e).to(tl.int32)
    tl.store(SLOTS + first * BLOCK + tl.cumsum(match, 0) - 1, t, mask=ids == e)
    pad = count + tl.arange(0, PAD)
    tl.store(SLOTS + first * BLOCK + pad, tl.zeros((PAD,), tl.int32) + T, mask=pad < mine * BLOCK)
    b = tl.arange(0, MOST)
    tl.store(EXPERTS + first + b, tl.zeros((MOST,), tl.int32) + e, mask=b < mine)
    if e == E - 1:
        tl.store(TOTAL, (first + mine) * BLOCK)
    _clear_part(LOCKS, e, LOCKED, E, BL)


@triton.jit(do_not_specialize=["T"])
def _align_sorted_kernel(
    SORTED, OFFSETS, SLOTS, EXPERTS, TOTAL, LOCKS, T,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr, BT: tl.constexpr,
    LOCKED: tl.constexpr, BL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_align_few_kernel` from slots sorted by expert; several programs share an expert's blocks."""
    _await_inputs(PDL)
    e, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    bins = tl.arange(0, BINS)
    start = tl.load(OFFSETS + bins, mask=bins < E, other=0)
    counts = tl.load(OFFSETS + bins + 1, mask=bins < E, other=0) - start
    first, mine, count = _first_block(counts, bins, e, BLOCK)
    begin = tl.load(OFFSETS + e)
    i = tl.arange(0, BT)
    for at in range(part * BT, count, parts * BT):
        slots = tl.load(SORTED + begin + at + i, mask=at + i < count, other=0)
        tl.store(SLOTS + first * BLOCK + at + i, slots, mask=at + i < count)
    for at in range(part * BT, mine, parts * BT):
        tl.store(EXPERTS + first + at + i, tl.zeros((BT,), tl.int32) + e, mask=at + i < mine)
    if part == 0:
        pad = count + tl.arange(0, PAD)
        tl.store(SLOTS + first * BLOCK + pad, tl.zeros((PAD,), tl.int32) + T, mask=pad < mine * BLOCK)
        if e == E - 1:
            tl.store(TOTAL, (first + mine) * BLOCK)
        _clear_part(LOCKS, e, LOCKED, E, BL)


@triton.jit(do_not_specialize=["T"])
def _ragged_kernel(
    IDS, WEIGHTS, SLOTS, OFFSETS, PLACES, GATES, COUNTS, T,
    E: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PLACES: sorted position of each slot; GATES: weights in sorted order; COUNTS: slots of each expert.

    SLOTS beyond the last one, and the positions of skipped slots, become -1.
    """
    _await_inputs(PDL)
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    total = tl.load(OFFSETS + E)
    slot = tl.load(SLOTS + i, mask=i < total, other=-1)
    tl.store(SLOTS + i, slot, mask=(i >= total) & (i < T))
    tl.store(PLACES + slot, i, mask=slot >= 0)
    tl.store(GATES + i, tl.load(WEIGHTS + slot, mask=slot >= 0, other=0.0), mask=i < T)
    ids = tl.load(IDS + i, mask=i < T, other=0)
    tl.store(PLACES + i, tl.zeros((BT,), tl.int32) - 1, mask=(i < T) & ((ids < 0) | (ids >= E)))
    ends = tl.load(OFFSETS + i + 1, mask=i < E, other=0)
    tl.store(COUNTS + i, ends - tl.load(OFFSETS + i, mask=i < E, other=0), mask=i < E)


@triton.jit
def _activated(
    X, row, part, N, alpha, limit,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The activation of columns ``[part * BLOCK, (part + 1) * BLOCK)`` of N of a row of X, in fp32."""
    at = part * BLOCK + tl.arange(0, BLOCK)
    if not GATED:
        y = _ungated(tl.load(X + row * N + at, mask=at < N, other=0.0).to(tl.float32), ACT)
    else:
        if PAIRS:
            two = part * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
            both = tl.load(X + row * 2 * N + two, mask=two < 2 * N, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
        else:
            gate = tl.load(X + row * 2 * N + at, mask=at < N, other=0.0).to(tl.float32)
            up = tl.load(X + row * 2 * N + N + at, mask=at < N, other=0.0).to(tl.float32)
        y = _gated(gate, up, alpha, limit, ACT)
    return y


@triton.jit
def _activation_kernel(
    X, Y, N, alpha, limit,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Y ``[rows, N]``: the activation of X's rows: gates and ups in pairs or in halves, or ungated."""
    _await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _activated(X, row, tl.program_id(1), N, alpha, limit, ACT, GATED, PAIRS, BLOCK)
    tl.store(Y + row * N + at, _nearest(y, Y.dtype.element_ty, INTERP).to(Y.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["TOKENS"])
def _weighted_sum_kernel(
    PARTS, OUT, IDS, WEIGHTS, PLACES, TOKENS, HIDDEN, STRIDE,
    E: tl.constexpr, TOP_K: tl.constexpr, WEIGH: tl.constexpr, PLACED: tl.constexpr,
    ROWS: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """OUT ``[TOKENS, HIDDEN]``: sum of a token's rows of PARTS times its weights, in the order of choices.

    The row of a slot is the slot itself or, if PLACED, PLACES[slot].
    """
    _await_inputs(PDL)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = (m < TOKENS)[:, None] & (h < HIDDEN)[None, :]
    acc = tl.zeros((ROWS, BH), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        slot = m * TOP_K + k
        expert = tl.load(IDS + slot, mask=m < TOKENS, other=-1)
        valid = (expert >= 0) & (expert < E)
        row = slot
        if PLACED:
            row = tl.load(PLACES + slot, mask=(m < TOKENS) & valid, other=0)
        at = row.to(tl.int64)[:, None] * STRIDE + h[None, :]
        part = tl.load(PARTS + at, mask=inside & valid[:, None], other=0.0).to(tl.float32)
        if WEIGH:
            part = part * tl.load(WEIGHTS + slot, mask=m < TOKENS, other=0.0)[:, None]
        acc += part
    out = OUT + m.to(tl.int64)[:, None] * HIDDEN + h[None, :]
    tl.store(out, _nearest(acc, OUT.dtype.element_ty, INTERP).to(OUT.dtype.element_ty), mask=inside)

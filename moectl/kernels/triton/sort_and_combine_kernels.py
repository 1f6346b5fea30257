# mypy: ignore-errors
"""Device code around the GEMMs: sorting assignments by expert, and summing each token's expert outputs.

`IDS` are flat, one per assignment (token, choice); a *slot* is an index into them. Ids outside ``[0, E)``
are skipped. With `PDL` (programmatic dependent launch) a kernel starts while the previous one ends, and
waits for it before it accesses memory.
"""

import triton
import triton.language as tl

from .mtile64_kernels import _nearest


@triton.jit
def _await_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until the previous ones have written their results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["T"])
def _sort_few_kernel(IDS, SORTED, OFFSETS, T, E: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):
    """Slots stably sorted by expert, and offsets ``[E + 1]``; each expert's program reads all ids."""
    _await_inputs(PDL)
    e = tl.program_id(0)
    t = tl.arange(0, BT)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    match = (ids == e).to(tl.int32)
    base = tl.sum(((ids < e) & (ids >= 0)).to(tl.int32), 0)
    tl.store(SORTED + base + tl.cumsum(match, 0) - 1, t, mask=ids == e)
    tl.store(OFFSETS + e, base)
    if e == E - 1:
        tl.store(OFFSETS + E, base + tl.sum(match, 0))


@triton.jit(do_not_specialize=["most"])
def _batch_kernel(
    COUNTS, IDS, WEIGHTS, SORTED, OFFSETS, most,
    E: tl.constexpr, EPAD: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """IDS, WEIGHTS, SORTED and OFFSETS of a batch of `most` rows per expert; grid (experts, row blocks)."""
    _await_inputs(PDL)
    e, first = tl.program_id(0), tl.program_id(1) * ROWS
    every = tl.arange(0, EPAD)
    counts = tl.load(COUNTS + every, mask=every < E, other=0).to(tl.int32)
    counts = tl.minimum(tl.maximum(counts, 0), most)
    before = tl.sum(tl.where(every < e, counts, 0), 0)
    count = tl.sum(tl.where(every == e, counts, 0), 0)
    i = first + tl.arange(0, ROWS)
    row = e * most + i
    tl.store(IDS + row, tl.where(i < count, e, -1), mask=i < most)
    tl.store(WEIGHTS + row, tl.full((ROWS,), 1.0, dtype=tl.float32), mask=i < most)
    tl.store(SORTED + before + i, row, mask=i < count)
    if first == 0:
        tl.store(OFFSETS + e, before)
        if e == E - 1:
            tl.store(OFFSETS + E, before + count)


@triton.jit(do_not_specialize=["T"])
def _count_kernel(IDS, COUNTS, T, E: tl.constexpr, BINS: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):
    """COUNTS ``[blocks, E]``: number of assignments of each expert, by block."""
    _await_inputs(PDL)
    block = tl.program_id(0)
    t = block * BT + tl.arange(0, BT)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    counts = tl.histogram(ids, BINS, mask=(ids >= 0) & (ids < E))
    bins = tl.arange(0, BINS)
    tl.store(COUNTS + block * E + bins, counts, mask=bins < E)


@triton.jit(do_not_specialize=["BLOCKS"])
def _place_kernel(
    COUNTS, TOTALS, BLOCKS, E: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """COUNTS become exclusive prefix sums over blocks; TOTALS ``[E]`` are the sums over all blocks."""
    _await_inputs(PDL)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    b = tl.arange(0, BB)
    total = tl.zeros((BE,), dtype=tl.int32)
    for b0 in range(0, BLOCKS, BB):
        at = COUNTS + (b0 + b)[:, None] * E + e[None, :]
        inside = (b0 + b < BLOCKS)[:, None] & (e < E)[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    tl.store(TOTALS + e, total, mask=e < E)


@triton.jit(do_not_specialize=["T"])
def _scatter_kernel(
    IDS, BEFORE, TOTALS, SORTED, OFFSETS, T,
    E: tl.constexpr, BINS: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SORTED and OFFSETS from the block prefix sums, the totals and ranks within each block."""
    _await_inputs(PDL)
    block = tl.program_id(0)
    i = tl.arange(0, BT)
    t = block * BT + i
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    live = (ids >= 0) & (ids < E)
    known = tl.where(live, ids, 0)
    before = tl.load(BEFORE + block * E + known, mask=live, other=0)
    bins = tl.arange(0, BINS)
    totals = tl.load(TOTALS + bins, mask=bins < E, other=0)
    ends = tl.cumsum(totals, 0)
    start = tl.gather(ends - totals, known, 0)
    if block == 0:
        tl.store(OFFSETS + bins, ends - totals, mask=bins < E)
        tl.store(OFFSETS + bins + 1, ends, mask=bins == E - 1)
    earlier = (ids[:, None] == ids[None, :]) & (i[:, None] < i[None, :])
    rank = tl.sum(earlier.to(tl.int32), 0)
    tl.store(SORTED + start + before + rank, t, mask=live)


@triton.jit(do_not_specialize=["T", "TOKENS"])
def _combine_kernel(
    Y, OUT, IDS, T, TOKENS, HIDDEN,
    E: tl.constexpr, TOP_K: tl.constexpr, SPLIT_K: tl.constexpr, ROWS: tl.constexpr, BH: tl.constexpr,
    PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """OUT ``[TOKENS, HIDDEN]``: sum of the parts of a token's valid assignments, in a fixed order."""
    _await_inputs(PDL)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = (m < TOKENS)[:, None] & (h < HIDDEN)[None, :]
    acc = tl.zeros((ROWS, BH), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        slot = m * TOP_K + k
        expert = tl.load(IDS + slot, mask=m < TOKENS, other=-1)
        valid = (expert >= 0) & (expert < E)
        for part in tl.static_range(SPLIT_K):
            rows = (part * T.to(tl.int64) + slot) * HIDDEN
            y = tl.load(Y + rows[:, None] + h[None, :], mask=inside & valid[:, None], other=0.0)
            acc += y.to(tl.float32)
    out = OUT + m.to(tl.int64)[:, None] * HIDDEN + h[None, :]
    acc = _nearest(acc, OUT.dtype.element_ty, INTERP)
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["TOKENS"])
def _zero_skipped_kernel(
    IDS, OUT, TOKENS, HIDDEN, E: tl.constexpr, ROWS: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Zeroes the rows of OUT ``[TOKENS, HIDDEN]`` whose only assignment is skipped."""
    _await_inputs(PDL)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(IDS + m, mask=m < TOKENS, other=0)
    skipped = (expert < 0) | (expert >= E)
    if tl.sum(skipped.to(tl.int32), 0) > 0:
        for first in range(0, HIDDEN, BH):
            h = first + tl.arange(0, BH)
            out = OUT + m.to(tl.int64)[:, None] * HIDDEN + h[None, :]
            zeros = tl.zeros((ROWS, BH), dtype=OUT.dtype.element_ty)
            tl.store(out, zeros, mask=skipped[:, None] & (h < HIDDEN)[None, :])

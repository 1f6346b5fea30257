# mypy: ignore-errors
"""Device code around the GEMMs: sorting assignments by expert, and summing a token's parts.

`IDS` are flat, one per assignment (token, choice); a *slot* is an index into them. Ids below 0, or not
below `E`, are skipped. With `PDL` a kernel starts while the one before it ends, and waits before it
touches memory.
"""

import triton
import triton.language as tl

from .mtile64_kernels import _round_bf16


@triton.jit
def _await_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, and waits for what earlier ones write."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["T"])
def _sort_few_kernel(IDS, SORTED, OFFSETS, T, E: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):
    """Slots sorted by expert, stable, and their offsets ``[E + 1]``; one program per expert sees all ids."""
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


@triton.jit(do_not_specialize=["T", "BLOCKS"])
def _count_kernel(
    IDS, COUNTS, BELOW, T, BLOCKS,
    E: tl.constexpr, BINS: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNTS and BELOW ``[E, BLOCKS]``: how many of a block's ids are an expert, and how many a lower one."""
    _await_inputs(PDL)
    block = tl.program_id(0)
    t = block * BT + tl.arange(0, BT)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    counts = tl.histogram(tl.where((ids >= 0) & (ids < E), ids, E), BINS)
    bins = tl.arange(0, BINS)
    at = bins * BLOCKS + block
    tl.store(COUNTS + at, counts, mask=bins < E)
    tl.store(BELOW + at, tl.cumsum(counts, 0) - counts, mask=bins < E)


@triton.jit(do_not_specialize=["BLOCKS"])
def _place_kernel(
    COUNTS, BELOW, OFFSETS, BLOCKS, E: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """COUNTS ``[E, BLOCKS]`` become the first sorted position of a block's ids of an expert; OFFSETS too."""
    _await_inputs(PDL)
    e = tl.program_id(0)
    b = tl.arange(0, BB)
    below = tl.zeros((BB,), dtype=tl.int32)
    for b0 in range(0, BLOCKS, BB):
        below += tl.load(BELOW + e * BLOCKS + b0 + b, mask=b0 + b < BLOCKS, other=0)
    base = tl.sum(below, 0)
    tl.store(OFFSETS + e, base)
    for b0 in range(0, BLOCKS, BB):
        at = COUNTS + e * BLOCKS + b0 + b
        counts = tl.load(at, mask=b0 + b < BLOCKS, other=0)
        tl.store(at, base + tl.cumsum(counts, 0) - counts, mask=b0 + b < BLOCKS)
        base += tl.sum(counts, 0)
    if e == E - 1:
        tl.store(OFFSETS + E, base)


@triton.jit(do_not_specialize=["T", "BLOCKS"])
def _scatter_kernel(
    IDS, STARTS, SORTED, T, BLOCKS,
    E: tl.constexpr, BT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SORTED: each slot at its expert's start for this block plus its rank among the block's equal ids."""
    _await_inputs(PDL)
    block = tl.program_id(0)
    i = tl.arange(0, BT)
    t = block * BT + i
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    live = (ids >= 0) & (ids < E)
    start = tl.load(STARTS + ids * BLOCKS + block, mask=live, other=0)
    rank = tl.zeros((BT,), dtype=tl.int32)
    for j0 in range(0, BT, WIDTH):
        j = j0 + tl.arange(0, WIDTH)
        earlier = tl.load(IDS + block * BT + j, mask=block * BT + j < T, other=-1)
        same = (ids[:, None] == earlier[None, :]) & (j[None, :] < i[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    tl.store(SORTED + start + rank, t, mask=live)


@triton.jit(do_not_specialize=["T", "TOKENS"])
def _combine_kernel(
    Y, OUT, IDS, T, TOKENS, HIDDEN,
    E: tl.constexpr, TOP_K: tl.constexpr, SPLIT_K: tl.constexpr, ROWS: tl.constexpr, BH: tl.constexpr,
    PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """OUT ``[TOKENS, HIDDEN]``: the parts of a token's valid assignments, summed in a fixed order."""
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
    if OUT.dtype.element_ty == tl.bfloat16:
        acc = _round_bf16(acc, INTERP)
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=inside)

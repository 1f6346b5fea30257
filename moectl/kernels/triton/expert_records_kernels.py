# mypy: ignore-errors
"""Device code that sorts assignments into records of a few tokens of one expert (portable Triton)."""

import triton
import triton.language as tl


@triton.jit
def _plan(
    IDS, PLAN, T, RECORDS,
    E: tl.constexpr, EPAD: tl.constexpr, TPAD: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PLAN ``[RECORDS, 8 + BLOCK]``: (expert, tokens, 0, 5 unused, slots) of up to BLOCK assignments each.

    Records are in the order of experts, and slots ascend; unused records have expert -1 and no tokens. Each
    program reads all ids and places PER assignments; ranks come from comparisons, without atomics.
    """
    WORDS: tl.constexpr = 8 + BLOCK
    t = tl.arange(0, TPAD)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    counts = tl.histogram(ids, EPAD, mask=(ids >= 0) & (ids < E))
    blocks = (counts + BLOCK - 1) // BLOCK
    before = tl.cumsum(blocks, 0) - blocks
    mine = tl.program_id(0) * PER + tl.arange(0, PER)
    own = tl.load(IDS + mine, mask=mine < T, other=-1)
    valid = (own >= 0) & (own < E)
    rank = tl.sum(((ids[None, :] == own[:, None]) & (t[None, :] < mine[:, None])).to(tl.int32), 1)
    known = tl.where(valid, own, 0)
    base = tl.gather(before, known, 0)
    count = tl.gather(counts, known, 0)
    record = PLAN + (base + rank // BLOCK) * WORDS
    tl.store(record + 8 + rank % BLOCK, mine, mask=valid)
    head = valid & (rank % BLOCK == 0)
    tl.store(record, own, mask=head)
    tl.store(record + 1, tl.minimum(count - rank, BLOCK), mask=head)
    used = tl.sum(blocks, 0)
    tl.store(PLAN + mine * WORDS + 2, 0, mask=mine < RECORDS)
    spare = used + mine
    tl.store(PLAN + spare * WORDS, -1, mask=spare < RECORDS)
    tl.store(PLAN + spare * WORDS + 1, 0, mask=spare < RECORDS)


@triton.jit(do_not_specialize=["T", "RECORDS"])
def _plan_kernel(
    IDS, PLAN, T, RECORDS,
    E: tl.constexpr, EPAD: tl.constexpr, TPAD: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`_plan`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _plan(IDS, PLAN, T, RECORDS, E, EPAD, TPAD, PER, BLOCK)


@triton.jit
def _order(X, OUT, block, K, KX, BK: tl.constexpr):
    """OUT ``[tokens, K]``: the columns of X in the order in which lanes read them, zeros from KX on.

    Within 64 columns, position ``16 c + 8 k8 + 2 j + b`` holds column ``16 j + 2 c + 8 k8 + b``.
    """
    pieces = tl.cdiv(K, BK)
    token = (block // pieces).to(tl.int64)
    place = (block % pieces) * BK + tl.arange(0, BK)
    column = (place & ~63) | ((place >> 1) & 3) * 16 | ((place >> 4) & 3) * 2 | (place & 8) | (place & 1)
    x = tl.load(X + token * KX + column, mask=column < KX, other=0.0)
    tl.store(OUT + token * K + place, x, mask=place < K)


@triton.jit(do_not_specialize=["T", "RECORDS", "PLANS"])
def _plan_and_order_kernel(
    IDS, PLAN, X, OUT, T, RECORDS, PLANS, K, KX,
    E: tl.constexpr, EPAD: tl.constexpr, TPAD: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_plan` in the first PLANS programs, `_order` in the others."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < PLANS:
        _plan(IDS, PLAN, T, RECORDS, E, EPAD, TPAD, PER, BLOCK)
    else:
        _order(X, OUT, program - PLANS, K, KX, BK)


@triton.jit
def _order_kernel(X, OUT, K, KX, BK: tl.constexpr, PDL: tl.constexpr):
    """`_order`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _order(X, OUT, tl.program_id(0), K, KX, BK)


@triton.jit(do_not_specialize=["RECORDS"])
def _cut_kernel(
    SLOTS, OFFSETS, PLAN, RECORDS,
    E: tl.constexpr, EPAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PLAN as written by `_plan_kernel`, from slots sorted by expert; one program per expert."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    WORDS: tl.constexpr = 8 + BLOCK
    expert = tl.program_id(0)
    e = tl.arange(0, EPAD)
    begin = tl.load(OFFSETS + e, mask=e < E, other=0)
    end = tl.load(OFFSETS + e + 1, mask=e < E, other=0)
    blocks = (end - begin + BLOCK - 1) // BLOCK
    record = tl.sum(tl.where(e < expert, blocks, 0), 0)
    at = tl.load(OFFSETS + expert)
    last = tl.load(OFFSETS + expert + 1)
    n = tl.arange(0, BLOCK)
    while at < last:
        count = tl.minimum(last - at, BLOCK)
        to = PLAN + record.to(tl.int64) * WORDS
        tl.store(to, expert)
        tl.store(to + 1, count)
        tl.store(to + 2, 0)
        tl.store(to + 8 + n, tl.load(SLOTS + at + n, mask=n < count, other=0), mask=n < count)
        record += 1
        at += BLOCK
    if expert == E - 1:
        while record < RECORDS:
            spare = record + tl.arange(0, 128)
            tl.store(PLAN + spare.to(tl.int64) * WORDS, -1, mask=spare < RECORDS)
            tl.store(PLAN + spare.to(tl.int64) * WORDS + 1, 0, mask=spare < RECORDS)
            record += 128

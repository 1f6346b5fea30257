# mypy: ignore-errors
"""Device code around the GEMMs: lists of assignments by expert, and sums of each token's expert outputs.

`IDS` are flat, one per assignment (token, choice); a *slot* is an index into them. Ids outside ``[0, E)``
are skipped. With `PDL` (programmatic dependent launch) a kernel starts while the previous one ends, and
waits for it before it accesses memory. Everything that depends on the number of tokens is a run-time
argument, so that a layer has one form of each kernel.
"""

import triton
import triton.language as tl

from .mtile64_kernels import _nearest

NOTHING = tl.constexpr(0)
RECORDS = tl.constexpr(1)
EVEN_TILES = tl.constexpr(2)
UNIT_TILES = tl.constexpr(3)
FULL_TILES = tl.constexpr(4)
"""What is listed (`KIND`) besides the order of the assignments: see `_store_tiles`."""

FEWEST = tl.constexpr(0)
FEW = tl.constexpr(1)
GIVEN = tl.constexpr(2)
COUNTED = tl.constexpr(3)
PLACED = tl.constexpr(4)
SCATTERED = tl.constexpr(5)
"""What a launch of `_list_kernel` does (`JOB`)."""

IN_16_BITS = tl.constexpr(0)
IN_FP32 = tl.constexpr(1)
IN_PLACE = tl.constexpr(2)
"""What `_combine_kernel` adds (`FORM`)."""


@triton.jit
def _await_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until the previous ones have written their results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _await_then_start_next(PDL: tl.constexpr):
    """`_await_inputs` in the other order: what starts now may run beside this kernel on the same inputs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _before(counts, e, KIND, WIDTH, EPAD: tl.constexpr):
    """Assignments of the experts before `e`, the tiles (of WIDTH assignments) that come before its own, how
    many there are of all experts, and the assignments of `e`.

    Records are in the order of experts. Tiles of experts with more assignments come first: programs that take
    turns then have about the same work, and read an expert's weights at the same time.
    """
    experts = tl.arange(0, EPAD)
    count = tl.sum(tl.where(experts == e, counts, 0), 0)
    tiles = (counts + WIDTH - 1) // WIDTH
    sooner = experts < e
    if KIND != RECORDS:
        sooner = (counts > count) | (sooner & (counts == count))
    first = tl.sum(tl.where(experts < e, counts, 0), 0)
    return first, tl.sum(tl.where(sooner, tiles, 0), 0), tl.sum(tiles, 0), count


@triton.jit
def _store_offset(OFFSETS, e, first, count, KIND, E: tl.constexpr):
    """OFFSETS ``[E + 1]`` of expert `e`, unless records are listed."""
    if KIND != RECORDS:
        tl.store(OFFSETS + e, first)
        if e == E - 1:
            tl.store(OFFSETS + E, first + count)


@triton.jit
def _place_of(rank, base, KIND, SHIFT):
    """Where the assignment number `rank` of an expert is listed, whose first position or record is `base`."""
    words = ((base + (rank >> SHIFT)) * (8 + (1 << SHIFT))) + 8 + (rank & ((1 << SHIFT) - 1))
    return tl.where(KIND == RECORDS, words, base + rank)


@triton.jit
def _store_tiles(TILES, e, first, tile, count, j, mine, KIND, WIDTH):
    """Writes the tiles number `j` of experts `e`, where `mine`; `tile` is an expert's first.

    An expert's `count` assignments, from position `first` on, are in tiles of at most WIDTH. By KIND:

    - RECORDS ``[BOUND, 8 + WIDTH]``: (expert, assignments, 0, 5 unused, slots), slots where `_place_of` says.
    - EVEN_TILES ``[BOUND, 4]``: (expert, first position, assignments, 0), split evenly.
    - FULL_TILES: the same, of WIDTH assignments each but for the last.
    - UNIT_TILES ``[BOUND, 4]``: (expert, first position, end, units of 16), which differ by at most one unit.
    """
    if KIND == RECORDS:
        at = TILES + (tile + j).to(tl.int64) * (8 + WIDTH)
        tl.store(at, e, mask=mine)
        tl.store(at + 1, tl.minimum(count - j * WIDTH, WIDTH), mask=mine)
        tl.store(at + 2, 0, mask=mine)
    else:
        tiles = tl.maximum((count + WIDTH - 1) // WIDTH, 1)
        part = tl.where(KIND == FULL_TILES, WIDTH, (count + tiles - 1) // tiles)
        units = (count + 15) // 16
        least = units // tiles
        wider = units - least * tiles
        at = TILES + (tile + j) * 4
        start = tl.where(KIND != UNIT_TILES, j * part, 16 * (j * least + tl.minimum(j, wider)))
        width = least + (j < wider).to(tl.int32)
        size = tl.minimum(part, count - start)
        end = first + tl.minimum(start + 16 * width, count)
        tl.store(at, e, mask=mine)
        tl.store(at + 1, first + start, mask=mine)
        tl.store(at + 2, tl.where(KIND != UNIT_TILES, size, end), mask=mine)
        tl.store(at + 3, tl.where(KIND != UNIT_TILES, 0, width), mask=mine)


@triton.jit
def _store_total(TILES, COUNT, total, KIND, WIDTH, BOUND):
    """COUNT ``[3]``: the number of tiles, 0, 0. Records have none: unused ones get expert -1 and no
    assignments instead."""
    if KIND == RECORDS:
        for begin in range(total, BOUND, 128):
            spare = begin + tl.arange(0, 128)
            at = TILES + spare.to(tl.int64) * (8 + WIDTH)
            tl.store(at, -1, mask=spare < BOUND)
            tl.store(at + 1, 0, mask=spare < BOUND)
    elif KIND != NOTHING:
        i = tl.arange(0, 4)
        tl.store(COUNT + i, tl.where(i == 0, total, 0), mask=i < 3)


@triton.jit
def _cut(TILES, COUNT, e, first, tile, total, count, KIND, WIDTH, BOUND, E: tl.constexpr):
    """Writes the tiles of expert `e`, if KIND has any; for the last expert also `_store_total`."""
    tiles = tl.where(KIND == NOTHING, 0, (count + WIDTH - 1) // WIDTH)
    for begin in range(0, tiles, 32):
        j = begin + tl.arange(0, 32)
        _store_tiles(TILES, e, first, tile, count, j, j < tiles, KIND, WIDTH)
    if e == E - 1:
        _store_total(TILES, COUNT, total, KIND, WIDTH, BOUND)


@triton.jit
def _order(X, OUT, block, K, KX, BK: tl.constexpr):
    """OUT ``[tokens, K]``: the columns of X in the order in which lanes read them, zeros from KX on.

    X, OUT, K and KX are in pairs of 16-bit columns. Within 64 columns, position ``16 c + 8 k8 + 2 j + b``
    holds column ``16 j + 2 c + 8 k8 + b``.
    """
    pieces = tl.cdiv(K, BK)
    token = (block // pieces).to(tl.int64)
    place = (block % pieces) * BK + tl.arange(0, BK)
    pair = (place & ~31) | (place & 3) * 8 | ((place >> 3) & 3) | (place & 4)
    x = tl.load(X + token * KX + pair, mask=pair < KX, other=0)
    tl.store(OUT + token * K + place, x, mask=place < K)


@triton.jit
def _list_fewest(
    IDS, LISTED, OFFSETS, TILES, COUNT, T, LISTS, KIND, WIDTH, SHIFT, BOUND,
    E: tl.constexpr, EPAD: tl.constexpr, MOST: tl.constexpr, MINE: tl.constexpr,
):  # fmt: skip
    """The job FEWEST of `_list_kernel`: a program lists MINE of at most MOST assignments, the last the rest.

    An expert has at least as many assignments as tiles: its assignment number j writes tile j. Sums are of
    pairs of numbers below 2^15.
    """
    program = tl.program_id(0)
    t = tl.arange(0, MOST)
    experts = tl.arange(0, EPAD)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    counts = tl.histogram(ids, EPAD, mask=(ids >= 0) & (ids < E))
    if KIND == RECORDS:  # noqa: SIM108 (the form in one line is for constants)
        tiles = (counts + WIDTH - 1) >> SHIFT
    else:
        tiles = (counts + WIDTH - 1) // WIDTH
    if program == LISTS - 1:
        if KIND != RECORDS:
            tl.store(OFFSETS + experts, tl.cumsum(counts, 0) - counts, mask=experts < E)
            tl.store(OFFSETS + E, tl.sum(counts, 0))
        _store_total(TILES, COUNT, tl.sum(tiles, 0), KIND, WIDTH, BOUND)
    else:
        slot = program * MINE + tl.arange(0, MINE)
        e = tl.load(IDS + slot, mask=slot < T, other=-1)
        live = (e >= 0) & (e < E)
        one = tl.where(t[None, :] < slot[:, None], 65537, 1)
        both = tl.sum(tl.where(ids[None, :] == e[:, None], one, 0), 1)
        count, rank = both & 65535, both >> 16
        sooner = experts[None, :] < e[:, None]
        before = tl.where(sooner, counts[None, :], 0)
        if KIND != RECORDS:
            sooner &= counts[None, :] == count[:, None]
            sooner |= counts[None, :] > count[:, None]
        both = tl.sum(before + tl.where(sooner, tiles[None, :] << 16, 0), 1)
        first, tile = both & 65535, both >> 16
        base = tl.where(KIND == RECORDS, tile, first)
        tl.store(LISTED + _place_of(rank, base, KIND, SHIFT), slot, mask=live)
        if KIND != NOTHING:
            has = live & (rank * WIDTH < count)
            _store_tiles(TILES, e, first, tile, count, rank, has, KIND, WIDTH)


@triton.jit
def _list_few(
    IDS, LISTED, OFFSETS, TILES, COUNT, T, JOB, KIND, WIDTH, SHIFT, BOUND,
    E: tl.constexpr, EPAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The jobs FEW and GIVEN of `_list_kernel`, for the expert with the number of the program."""
    e = tl.program_id(0)
    experts = tl.arange(0, EPAD)
    i = tl.arange(0, CHUNK)
    if JOB == GIVEN:
        ends = tl.load(OFFSETS + 1 + experts, mask=experts < E, other=0)
        counts = ends - tl.load(OFFSETS + experts, mask=experts < E, other=0)
    else:
        counts = tl.zeros((EPAD,), dtype=tl.int32)
        ids = tl.load(IDS + i, mask=i < T, other=-1)
        for begin in range(0, T, CHUNK):
            coming = begin + CHUNK + i
            later = tl.load(IDS + coming, mask=coming < T, other=-1)
            counts += tl.histogram(ids, EPAD, mask=(ids >= 0) & (ids < E))
            ids = later
    first, tile, total, count = _before(counts, e, KIND, WIDTH, EPAD)
    base = tl.where(KIND == RECORDS, tile, first)
    if JOB == GIVEN:
        if KIND == RECORDS:
            for begin in range(0, count, CHUNK):
                rank = begin + i
                slot = tl.load(IDS + first + rank, mask=rank < count, other=0)
                tl.store(LISTED + _place_of(rank, base, KIND, SHIFT), slot, mask=rank < count)
    else:
        if count > 0:
            seen = 0
            for begin in range(0, T, CHUNK):
                slot = begin + i
                mine = tl.load(IDS + slot, mask=slot < T, other=-1) == e
                rank = seen + tl.cumsum(mine.to(tl.int32), 0) - 1
                tl.store(LISTED + _place_of(rank, base, KIND, SHIFT), slot, mask=mine)
                seen += tl.sum(mine.to(tl.int32), 0)
        _store_offset(OFFSETS, e, first, count, KIND, E)
    _cut(TILES, COUNT, e, first, tile, total, count, KIND, WIDTH, BOUND, E)


@triton.jit
def _list_many(
    IDS, COUNTS, LISTED, OFFSETS, TILES, COUNT, T, JOB, BLOCKS, KIND, WIDTH, SHIFT, BOUND,
    E: tl.constexpr, EPAD: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """The jobs COUNTED, PLACED and SCATTERED of `_list_kernel`."""
    program = tl.program_id(0)
    experts = tl.arange(0, EPAD)
    i = tl.arange(0, BT)
    t = program * BT + i
    if JOB == COUNTED:
        ids = tl.load(IDS + t, mask=t < T, other=-1)
        counts = tl.histogram(ids, EPAD, mask=(ids >= 0) & (ids < E))
        tl.store(COUNTS + program * E + experts, counts, mask=experts < E)
    elif JOB == PLACED:
        e = program * BE + tl.arange(0, BE)
        b = tl.arange(0, BB)
        total = tl.zeros((BE,), dtype=tl.int32)
        for first_block in range(0, BLOCKS, BB):
            at = COUNTS + (first_block + b)[:, None] * E + e[None, :]
            inside = (first_block + b < BLOCKS)[:, None] & (e < E)[None, :]
            counts = tl.load(at, mask=inside, other=0)
            tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
            total += tl.sum(counts, 0)
        tl.store(COUNTS + BLOCKS * E + e, total, mask=e < E)
    else:
        totals = tl.load(COUNTS + BLOCKS * E + experts, mask=experts < E, other=0)
        if program < BLOCKS:
            ids = tl.load(IDS + t, mask=t < T, other=-1)
            live = (ids >= 0) & (ids < E)
            known = tl.where(live, ids, 0)
            before = tl.load(COUNTS + program * E + known, mask=live, other=0)
            sizes = tl.where(KIND == RECORDS, (totals + WIDTH - 1) >> SHIFT, totals)
            base = tl.gather(tl.cumsum(sizes, 0) - sizes, known, 0)
            earlier = (ids[:, None] == ids[None, :]) & (i[:, None] < i[None, :])
            rank = before + tl.sum(earlier.to(tl.int32), 0)
            tl.store(LISTED + _place_of(rank, base, KIND, SHIFT), t, mask=live)
        else:
            e = program - BLOCKS
            first, tile, total, count = _before(totals, e, KIND, WIDTH, EPAD)
            _store_offset(OFFSETS, e, first, count, KIND, E)
            _cut(TILES, COUNT, e, first, tile, total, count, KIND, WIDTH, BOUND, E)


@triton.jit(do_not_specialize=["T", "JOB", "BLOCKS", "LISTS", "KIND", "WIDTH", "SHIFT", "BOUND", "K", "KX"])
def _list_kernel(
    IDS, COUNTS, LISTED, OFFSETS, TILES, COUNT, X, OUT,
    T, JOB, BLOCKS, LISTS, KIND, WIDTH, SHIFT, BOUND, K, KX,
    E: tl.constexpr, EPAD: tl.constexpr, MOST: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lists the assignments by expert, in the first LISTS programs; `_order` in the others.

    LISTED gets the slots, stably sorted by expert, or is TILES for records; OFFSETS ``[E + 1]`` are written
    unless records are; for what else KIND means see `_store_tiles`. By JOB:

    - FEWEST: at most MOST assignments; a program for MINE of them each, and one more.
    - FEW: a program for each expert, which reads all ids.
    - GIVEN: the same if IDS are the sorted slots and OFFSETS theirs.
    - COUNTED, PLACED, SCATTERED: any number of assignments, in three launches. COUNTS ``[BLOCKS + 1, E]``
      become the number of assignments of each expert by block of BT, a program a block; then exclusive prefix
      sums over blocks, and last the sums over all, a program for BE experts; then the lists are written, by a
      program for each block and, after these, one for each expert.
    """
    _await_then_start_next(PDL)
    if tl.program_id(0) >= LISTS:
        _order(X, OUT, tl.program_id(0) - LISTS, K, KX, BK)
    elif JOB == FEWEST:
        _list_fewest(
            IDS, LISTED, OFFSETS, TILES, COUNT, T, LISTS, KIND, WIDTH, SHIFT, BOUND, E, EPAD, MOST, MINE
        )  # fmt: skip
    elif (JOB == FEW) | (JOB == GIVEN):
        _list_few(IDS, LISTED, OFFSETS, TILES, COUNT, T, JOB, KIND, WIDTH, SHIFT, BOUND, E, EPAD, CHUNK)
    else:
        _list_many(
            IDS, COUNTS, LISTED, OFFSETS, TILES, COUNT, T, JOB, BLOCKS, KIND, WIDTH, SHIFT, BOUND,
            E, EPAD, BT, BE, BB,
        )  # fmt: skip


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


@triton.jit
def _sum_of_choices(PARTS, IDS, m, h, HIDDEN, E: tl.constexpr, TOP_K: tl.constexpr, BH: tl.constexpr):
    """The sum of token m's parts, one of each choice, in columns h."""
    acc = tl.zeros((BH,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(IDS + m * TOP_K + k)
        valid = (expert >= 0) & (expert < E)
        row = (m * TOP_K + k).to(tl.int64) * HIDDEN
        acc += tl.load(PARTS + row + h, mask=(h < HIDDEN) & valid, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _sum_of_splits(
    PARTS, IDS, m, h, T, HIDDEN, SPLITS,
    E: tl.constexpr, TOP_K: tl.constexpr, AT_ONCE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """`_sum_of_choices` with SPLITS parts of each choice, which are added one after the other."""
    acc = tl.zeros((BH,), dtype=tl.float32)
    k = 0
    part = 0
    for begin in range(0, TOP_K * SPLITS, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            expert = tl.load(IDS + m * TOP_K + k, mask=begin + j < TOP_K * SPLITS, other=-1)
            valid = (expert >= 0) & (expert < E)
            row = (part * T.to(tl.int64) + m * TOP_K + k) * HIDDEN
            acc += tl.load(PARTS + row + h, mask=(h < HIDDEN) & valid, other=0.0)
            part += 1
            k += (part == SPLITS).to(tl.int32)
            part = tl.where(part == SPLITS, 0, part)
    return acc


@triton.jit
def _zero_skipped(OUT, IDS, first, T, HIDDEN, E: tl.constexpr, ROWS: tl.constexpr, BH: tl.constexpr):
    """Zeroes the rows of OUT, of ROWS from `first` on, whose id is no expert's."""
    m = first + tl.arange(0, ROWS)
    expert = tl.load(IDS + m, mask=m < T, other=0)
    skipped = (expert < 0) | (expert >= E)
    if tl.sum(skipped.to(tl.int32), 0) > 0:
        rows = OUT + m.to(tl.int64)[:, None] * HIDDEN
        for begin in range(0, HIDDEN, BH):
            h = begin + tl.arange(0, BH)[None, :]
            zeros = tl.zeros((ROWS, BH), dtype=OUT.dtype.element_ty)
            tl.store(rows + h, zeros, mask=skipped[:, None] & (h < HIDDEN))


@triton.jit(do_not_specialize=["T", "FORM", "SPLITS"])
def _combine_kernel(
    PARTS, OUT, IDS, T, HIDDEN, FORM, SPLITS,
    E: tl.constexpr, TOP_K: tl.constexpr, AT_ONCE: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """OUT ``[tokens, HIDDEN]``: sum of the parts of a token's valid assignments, in a fixed order.

    PARTS are ``[T, HIDDEN]`` IN_16_BITS, or ``[SPLITS, T, HIDDEN]`` IN_FP32, whatever the pointer's type.
    With FORM IN_PLACE they are OUT, with a choice each, and what has no valid assignment is zeroed, ROWS
    tokens a program. WHOLE stands for IN_FP32 without splits, for which there is little code to bring to a
    multiprocessor. Otherwise the grid is (tokens, programs that share the columns).
    """
    _await_inputs(PDL)
    m = tl.program_id(0)
    parts32 = PARTS.to(tl.pointer_type(tl.float32), bitcast=True)
    if not WHOLE and FORM == IN_PLACE:
        _zero_skipped(OUT, IDS, m * ROWS, T, HIDDEN, E, ROWS, BH)
    else:
        for first in range(tl.program_id(1) * BH, HIDDEN, tl.num_programs(1) * BH):
            h = first + tl.arange(0, BH)
            if WHOLE:
                acc = _sum_of_choices(parts32, IDS, m, h, HIDDEN, E, TOP_K, BH)
            elif FORM == IN_16_BITS:
                acc = _sum_of_choices(PARTS, IDS, m, h, HIDDEN, E, TOP_K, BH)
            else:
                acc = _sum_of_splits(parts32, IDS, m, h, T, HIDDEN, SPLITS, E, TOP_K, AT_ONCE, BH)
            acc = _nearest(acc, OUT.dtype.element_ty, INTERP)
            out = OUT + m.to(tl.int64) * HIDDEN + h
            tl.store(out, acc.to(OUT.dtype.element_ty), mask=h < HIDDEN)

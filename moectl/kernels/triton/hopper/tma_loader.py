# mypy: ignore-errors
"""Producers of `tma_kernels`: they fill the shared memory ring, tile by tile, as far ahead as it has room.

A stage holds ``HOW.depth`` pieces of 128 bytes of each row: the weight rows of all workers, copied by TMA,
and the rows of the tile's tokens. Those are gathered by cp.async; where they lie one after the other, as the
rows of the second GEMM's input do, TMA may copy them, too. Its barrier `full` counts bytes copied by TMA and
arrivals of the token loaders' threads, its barrier `empty` the workers that have read it.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import async_load, reinterpret, tma_load
from .mid_loader import _next
from .tile_board import AHEAD, LOADER_MEETS, notes_of, slots_of, tile_told, warp_meets


@gluon.constexpr_function
def batch_rows(HOW):
    """Token rows that are copied at a time; a stage has whole batches."""
    rows = HOW.widths[-1]
    return min(rows & -rows, 64)


@gluon.constexpr_function
def batches(HOW):
    """Batches of token rows in a piece."""
    return HOW.widths[-1] // batch_rows(HOW)


@gluon.constexpr_function
def piece_bytes(HOW):
    """Bytes of all weight rows in a piece."""
    return HOW.workers * HOW.blocks_m * 64 * 128


@gluon.constexpr_function
def token_lines(HOW):
    """Lines of 128 bytes of each token in a piece: tokens of 16 bits have two for 128 FP8 weights, those of 8
    bits for 256 INT4 ones."""
    return 2 if HOW.decodes else 1


@gluon.constexpr_function
def token_bytes(HOW):
    """Bytes of all token rows in a piece."""
    return HOW.widths[-1] * 128 * token_lines(HOW)


@gluon.constexpr_function
def gathers(HOW):
    """Whether the token loaders' threads copy tokens by cp.async."""
    return not HOW.copied


@gluon.constexpr_function
def arrivals(HOW):
    """Arrivals that fill a stage: of the weight loader, of a copy of tokens or the threads that gather them,
    and one for scales that loaders multiply."""
    return 1 + (32 * HOW.loaders if gathers(HOW) else 1) + int(in_blocks(HOW) and not scales_apart(HOW))


@gluon.constexpr_function
def in_blocks(HOW):
    """Whether weights have scales by blocks, and tokens of 8 bits by 128 columns, which are in the ring."""
    return HOW.scales == "block"


@gluon.constexpr_function
def scales_apart(HOW):
    """Whether scales in blocks, of weights and of tokens, come to shared memory as they are, by cp.async, so
    that loaders wait for nothing but room.

    With more tokens, loaders multiply them, as workers would take longer than their products. A load of
    scales is behind all copies of tokens before it, which such a loader therefore awaits in each step.
    """
    return in_blocks(HOW) and HOW.widths[-1] <= (16 if HOW.decodes else 8)


@gluon.constexpr_function
def in_groups(HOW):
    """Whether weights have a scale for each row and 128 columns, which are in the ring."""
    return HOW.scales == "group"


@gluon.constexpr_function
def scale_halves(HOW):
    """2 if gate and up rows have scales one after the other, as two copies bring them; else 1."""
    return 2 if HOW.stage == 1 and HOW.gated else 1


@gluon.constexpr_function
def two_scales(HOW):
    """Whether rows of a tile have one scale for gates and one for ups, rather than one for each worker."""
    return HOW.stage == 1 and HOW.gated


@gluon.jit
def stored_rows(row, N, HOW: gl.constexpr):
    """Where TMA takes rows of a matrix from: the number of a pair of gate and up, 1 for its up row, and
    whether it exists; without a gate the row itself and 0."""
    if HOW.gated and HOW.stage == 1:
        pair = row // 16 * 8 + row % 8
        half = row // 8 % 2
        there = pair < N // 2
    else:
        pair = row
        half = row * 0
        there = row < N
    return pair, half, there


@gluon.jit
def scale_rows(row, N, HOW: gl.constexpr):
    """The rows of the weights' scales for rows of a matrix, and which exist."""
    pair, half, there = stored_rows(row, N, HOW)
    rows = N // 2 if HOW.gated and HOW.stage == 1 else N
    if HOW.scales == "block":
        at = pair // 128 + half * ((rows + 127) // 128)
    elif HOW.scales == "channel":
        at = pair + half * rows
    else:
        at = half
    return at, there


@gluon.jit
def scale_count(N, HOW: gl.constexpr):
    """Rows of an expert's scales."""
    HALVES: gl.constexpr = 2 if HOW.gated and HOW.stage == 1 else 1
    if HOW.scales == "block":
        count = (N // HALVES + 127) // 128 * HALVES
    elif HOW.scales == "channel":
        count = N
    else:
        count = HALVES
    return count


@gluon.jit
def weight_loader(work, HOW: gl.constexpr):
    """Producer of weight rows, and of their scales by groups."""
    ring, board, ROWS, steps = work[:4]
    DEPTH: gl.constexpr = HOW.depth
    GROUPS: gl.constexpr = HOW.workers * HOW.blocks_m * 4
    SCALED: gl.constexpr = HOW.workers * HOW.blocks_m * 64 // scale_halves(HOW)
    rows, _tokens, scales, full, empty = ring
    # An INT4 row has two scales for 128 bytes.
    SCALES_OF: gl.constexpr = piece_bytes(HOW) // 64 * scales.dtype.primitive_bitwidth // 8 * in_groups(HOW)
    BYTES: gl.constexpr = HOW.depth * (piece_bytes(HOW) + SCALES_OF)
    _jobs, _notes, _told, _noted, near, spent, _met = board
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    job = 0
    expert, _first, tokens, nt = tile_told(board, job, 1, HOW)
    while tokens >= 0:
        warp_meets(LOADER_MEETS)
        mbarrier.arrive(spent.index(job % HOW.jobs), count=1)
        for k in range(gl.where(tokens > 0, steps, 0)):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            for d in gl.static_range(DEPTH):
                at = [expert, nt * GROUPS, 0, 0, (k * DEPTH + d) * 128]
                tma_load(ROWS, at, full.index(stage), rows.index(stage * DEPTH + d))
            if in_groups(HOW):
                at = [expert, k * (2 * DEPTH), 0, nt * SCALED]
                tma_load(work[4], at, full.index(stage), scales.index(stage))
            mbarrier.arrive(near.index(0), count=1, pred=k + AHEAD == steps)
            stage, phase = _next(stage, phase, HOW)
        job += 1
        expert, _first, tokens, nt = tile_told(board, job, 1, HOW)


@gluon.jit
def token_rows(SORTED, first, place, live, HOW: gl.constexpr):
    """The rows of the GEMM's input that are at places of a tile."""
    row = first + place
    if HOW.stage == 1:
        row = slots_of(SORTED, first, place, live, HOW) // HOW.top_k
    return row


@gluon.jit
def _sources(SORTED, first, tokens, KX, AT: gl.constexpr, ROWS: gl.constexpr, HOW: gl.constexpr):
    """Offsets of ROWS tokens from token AT of a tile on, and which of them exist."""
    L: gl.constexpr = _bytes_layout(HOW)
    place = AT + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    live = place < tokens
    row = place
    if HOW.stage == 1:
        row = token_rows(SORTED, first, place, live, HOW)
        if HOW.wide:  # batched input: each slot has its own row
            row = row.to(gl.int64)
    return gl.expand_dims(row * KX, 1), gl.expand_dims(live, 1)


@gluon.jit
def _share_rows(places, SORTED, first, tokens, HOW: gl.constexpr):
    """Puts the rows of a tile's tokens at `places`, -1 where there is none."""
    place = gl.arange(0, notes_of(HOW), layout=gl.BlockedLayout([1], [32], [HOW.loaders], [0]))
    live = place < tokens
    places.store(gl.where(live, token_rows(SORTED, first, place, live, HOW), -1))


@gluon.jit
def _shared_sources(places, KX, AT: gl.constexpr, ROWS: gl.constexpr, HOW: gl.constexpr):
    """`_sources`, from `places`."""
    row = places.slice(AT, ROWS).load(gl.SliceLayout(1, _bytes_layout(HOW)))
    live = row >= 0
    if HOW.wide:
        row = row.to(gl.int64)
    return gl.expand_dims(row * KX, 1), gl.expand_dims(live, 1)


@gluon.constexpr_function
def _bytes_layout(HOW):
    """Layout of ``[rows, 128]`` bytes: 16 bytes per lane, whole rows per warp."""
    return gl.BlockedLayout([1, 16], [4, 8], [HOW.loaders, 1], [1, 0])


@gluon.jit
def _copied_tokens(COPIES, first, tokens, k, full, into, stage, HOW: gl.constexpr):
    """Copies a stage's tokens, which lie one after the other from row `first` on, in whole batches."""
    LINES: gl.constexpr = HOW.depth * token_lines(HOW)
    ROWS: gl.constexpr = batch_rows(HOW)
    COUNT: gl.constexpr = batches(HOW)
    BEFORE: gl.constexpr = HOW.stages * HOW.depth * piece_bytes(HOW) // (128 * batch_rows(HOW))
    for n in gl.static_range(1, COUNT + 1):
        if (tokens + ROWS - 1) // ROWS == n:
            mbarrier.expect(full.index(stage), n * LINES * ROWS * 128)
            for d in gl.static_range(LINES):
                for b in gl.static_range(n):
                    to = into.index(BEFORE + (stage * LINES + d) * COUNT + b)
                    tma_load(COPIES, [first + b * ROWS, (k * LINES + d) * 128], full.index(stage), to)


@gluon.constexpr_function
def _zero_asm():
    return "{ .reg .s32 lane; mov.u32 lane, %laneid; add.s32 lane, lane, $1; shr.s32 $0, lane, 31; }"


@gluon.jit
def zero_of_lanes(number):
    """Zero, for a `number` that is not negative, which ptxas takes for something of each lane's own.

    A scale that it knows to be one for all lanes it moves to a uniform register, and waits for it at once.
    """
    ASM: gl.constexpr = _zero_asm()
    return gl.inline_asm_elementwise(ASM, "=r,r", [number], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _scale_places(expert, first, nt, N, blocks, HOW: gl.constexpr):
    """Where the two scales of a row tile's first columns are, and whether they exist.

    Places have 32 bits, half the registers of pointers: an expert's block of 16384 weights has one scale.
    """
    row = nt * (64 * HOW.workers * HOW.blocks_m)
    other = row + 8 if two_scales(HOW) else row + 64 * HOW.blocks_m * (HOW.workers - 1)
    at, there = scale_rows(row, N, HOW)
    other_at, other_there = scale_rows(other, N, HOW)
    base = expert * (scale_count(N, HOW) * blocks) + zero_of_lanes(first)
    return base + at * blocks, there, base + other_at * blocks, other_there


@gluon.jit
def _scales_ahead(S, of_rows, XS, of_tokens, known, k, blocks, HOW: gl.constexpr):
    """For each piece of a stage the two scales of the rows, and those of the tokens if they have any; their
    products are left for later, as they would wait for the loads."""
    DEPTH: gl.constexpr = HOW.depth
    at, there, other_at, other_there = of_rows
    loaded = ()
    for d in gl.static_range(DEPTH):
        column = k * DEPTH + d
        inside = column < blocks
        if HOW.token_scales != "none":
            loaded += (gl.load(XS + (of_tokens + column), mask=known & inside, other=0.0),)
        loaded += (gl.load(S + (at + column), mask=there & inside, other=0.0),)
        loaded += (gl.load(S + (other_at + column), mask=other_there & inside, other=0.0),)
    return loaded


@gluon.jit
def _factors_of(now, D: gl.constexpr, NOTES: gl.constexpr, HOW: gl.constexpr):
    """Factors of the products of piece D by token: the first and the second scale of `now`, from
    `_scales_ahead`, times those of the tokens."""
    if HOW.token_scales != "none":
        factors = (now[3 * D] * now[3 * D + 1], now[3 * D] * now[3 * D + 2])
    else:
        ones = gl.full([NOTES], 1.0, gl.float32, gl.BlockedLayout([1], [32], [HOW.loaders], [0]))
        factors = (ones * now[2 * D], ones * now[2 * D + 1])
    return factors


@gluon.jit
def _scales_apart(S, XS, SORTED, expert, first, tokens, nt, N, blocks, HOW: gl.constexpr):
    """Pointers to the scales of a tile's first step, which of them exist, and their pieces: for each piece
    those of the tokens, then the two of its rows and room for as many as there are tokens."""
    DEPTH: gl.constexpr = HOW.depth
    NOTES: gl.constexpr = notes_of(HOW)
    i = gl.arange(0, 2 * DEPTH * NOTES, layout=gl.BlockedLayout([1], [32], [HOW.loaders], [0]))
    piece = i // (2 * NOTES)
    place = i % NOTES
    of_rows = i // NOTES % 2 == 1
    at, there, other_at, other_there = _scale_places(expert, first, nt, N, blocks, HOW)
    live = of_rows & gl.where(place == 0, there, (place == 1) & other_there)
    pointers = S + (gl.where(place == 0, at, other_at) + piece)
    if HOW.token_scales != "none":
        known = (place < tokens) & ~of_rows
        row = token_rows(SORTED, first, place, known, HOW)
        pointers = gl.where(of_rows, pointers, XS + (row * blocks + piece))
        live = live | known
    return pointers, live, piece


@gluon.jit
def token_loader(work, HOW: gl.constexpr):
    """Producer of token rows, which have `KX` bytes, and of the scales of products."""
    ring, board, places, X, COPIES, XS, S, SORTED, N, steps, KX = work
    DEPTH: gl.constexpr = HOW.depth
    LINES: gl.constexpr = HOW.depth * token_lines(HOW)
    ROWS: gl.constexpr = batch_rows(HOW)
    COUNT: gl.constexpr = batches(HOW)
    BEFORE: gl.constexpr = HOW.stages * HOW.depth * piece_bytes(HOW) // (128 * batch_rows(HOW))
    L: gl.constexpr = _bytes_layout(HOW)
    NOTES: gl.constexpr = notes_of(HOW)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [HOW.loaders], [0])
    APART: gl.constexpr = scales_apart(HOW)
    _rows, into, scales, full, empty = ring
    _jobs, _notes, _told, _noted, _near, spent, _met = board
    if HOW.stage == 2:
        tl.extra.cuda.gdc_wait()  # for the first GEMM; weight loads are already in flight
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, L)), 0)
    blocks = (KX // token_lines(HOW) + 127) // 128
    apart = scales
    if APART:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        apart = reinterpret(scales, gl.float32, [HOW.stages, 2 * DEPTH * NOTES], FLAT)
    job = 0
    expert, first, tokens, nt = tile_told(board, job, HOW.loaders, HOW)
    while tokens >= 0:
        mbarrier.arrive(spent.index(job % HOW.jobs), count=1)
        coming = ()
        if APART:
            pointers, wanted, piece = _scales_apart(S, XS, SORTED, expert, first, tokens, nt, N, blocks, HOW)
        elif in_blocks(HOW):
            place = gl.arange(0, NOTES, layout=LINE)
            known = place < tokens
            of_tokens = place
            if HOW.token_scales != "none":
                of_tokens = token_rows(SORTED, first, place, known, HOW) * blocks
            of_rows = _scale_places(expert, first, nt, N, blocks, HOW)
            coming = _scales_ahead(S, of_rows, XS, of_tokens, known, 0, blocks, HOW)
        base = X
        if HOW.stage == 2:
            base = X + first.to(gl.int64) * KX
        sources = ()
        if HOW.shares_rows:
            _share_rows(places, SORTED, first, tokens, HOW)
        elif gathers(HOW):
            for b in gl.static_range(COUNT):
                sources += (_sources(SORTED, first, tokens, KX, b * ROWS, ROWS, HOW),)
        for k in range(gl.where(tokens > 0, steps, 0)):
            now = coming
            if in_blocks(HOW) and not APART:
                coming = _scales_ahead(S, of_rows, XS, of_tokens, known, k + 1, blocks, HOW)
            mbarrier.wait(empty.index(stage), phase)
            if APART:
                at = k * DEPTH
                async_load(apart.index(stage), pointers + at, mask=wanted & (piece < blocks - at))
            elif in_blocks(HOW):
                for d in gl.static_range(DEPTH):
                    pair = (stage * DEPTH + d) * 2
                    factors = _factors_of(now, d, NOTES, HOW)
                    scales.index(pair).store(factors[0])
                    scales.index(pair + 1).store(factors[1])
                mbarrier.arrive(full.index(stage), count=1)
            if HOW.copied:
                _copied_tokens(COPIES, first, tokens, k, full, into, stage, HOW)
            for d in gl.static_range(LINES):
                if not HOW.copied:
                    start = (k * LINES + d) * 128
                    for b in gl.static_range(COUNT):
                        # Rows past the tile's tokens become zero, or keep what they hold: columns of the
                        # product are independent, and these are not stored.
                        if b == 0 or tokens > b * ROWS:
                            if HOW.shares_rows:
                                offsets, live = _shared_sources(places, KX, b * ROWS, ROWS, HOW)
                            else:
                                offsets, live = sources[b]
                            there = live
                            if not HOW.even:
                                there = live & (column < KX - start)
                            to = into.index(BEFORE + (stage * LINES + d) * COUNT + b)
                            async_load(to, base + start + (offsets + column), mask=there)
            if gathers(HOW):
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            stage, phase = _next(stage, phase, HOW)
        job += 1
        expert, first, tokens, nt = tile_told(board, job, HOW.loaders, HOW)

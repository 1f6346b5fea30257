# mypy: ignore-errors
"""Producers of `mid_kernels`: they fill the shared memory ring, tile by tile, as far ahead as it has room.

A stage holds ``HOW.depth`` pieces of 64 columns: codes (by TMA), scale and zero words of each worker's row
blocks (by cp.async, or with `tma_scales` by TMA), and the rows of the tile's tokens (gathered by cp.async).
Its barrier `full` counts bytes copied by TMA and arrivals of the loaders' threads, its barrier `empty` the
workers that have read it.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .fragments import code_lines, scale_words
from .gluon_compat import async_load, tma_load
from .tile_board import AHEAD, LOADER_MEETS, steps_of, tile_told, warp_meets


@gluon.constexpr_function
def _width(i, HOW):
    """The i-th width in token columns; 0 before the first."""
    return HOW.widths[i] if i >= 0 else 0


@gluon.constexpr_function
def _first(WIDTH):
    """Columns of the first product: the largest power of two that fits; `_rest` has the others."""
    return 1 << (WIDTH.bit_length() - 1)


@gluon.constexpr_function
def _rest(WIDTH):
    return WIDTH - _first(WIDTH)


@gluon.constexpr_function
def _rows(HOW):
    """Tokens of a piece in the first array; those beyond are in a second one."""
    return _first(HOW.widths[-1])


@gluon.constexpr_function
def _jointly(WIDTH, HOW):
    """Whether WIDTH, not a power of two, is still one product: its tokens are in a single array."""
    return _rest(WIDTH) > 0 and _first(WIDTH) < _rows(HOW)


@gluon.constexpr_function
def _together(HOW):
    """Whether tokens and codes share an array.

    Joint products address tokens from the start of shared memory, the only address that Triton names. Triton
    puts the largest array there: the tokens, if a piece has more rows of them than lines of codes.
    """
    jointly = any(_jointly(width, HOW) for width in HOW.widths)
    return jointly and _rows(HOW) <= HOW.blocks * code_lines(HOW.format)


@gluon.constexpr_function
def _before(HOW):
    """Entries at the start of the array of codes that the ring's tokens occupy."""
    return HOW.stages * _rows(HOW) // code_lines(HOW.format) if _together(HOW) else 0


@gluon.constexpr_function
def _span(HOW):
    """Columns that a run of scale words covers; 0: all."""
    return 64 if HOW.group in (16, 32) else HOW.group


@gluon.constexpr_function
def _runs(HOW):
    """Consecutive runs of scale words that a stage needs for each row block."""
    return max(1, HOW.depth * 64 // HOW.group) if HOW.group > 64 else (HOW.depth if HOW.group else 1)


@gluon.constexpr_function
def _run(D, HOW):
    """Index of the run of scale words for the D-th 64 columns of a stage."""
    return D * 64 // _span(HOW) if HOW.group else 0


@gluon.constexpr_function
def _stage_words(HOW):
    """Scale or zero-point words in one copy of a stage: with `tma_scales` those of a row block, else of all
    blocks, rounded up to a power of two."""
    if HOW.tma_scales:
        return _runs(HOW) * scale_words(HOW.format, HOW.group)
    return (1 << (HOW.blocks - 1).bit_length()) * HOW.depth * scale_words(HOW.format, HOW.group)


@gluon.constexpr_function
def _words_layout(HOW):
    return gl.NVMMASharedLayout(0, 32, 1) if HOW.tma_scales else gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def _here(value, HOW: gl.constexpr):
    """`value`; if registers are scarce rematerialized, as captured values occupy some in each partition."""
    if HOW.lean:
        value = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], gl.int32, False, 1)
    return value


@gluon.jit
def _size_here(size, UNIT: gl.constexpr, HOW: gl.constexpr):
    """`_here` of a size that stays known to be a multiple of UNIT, which 16-byte stores require."""
    if HOW.lean:
        size = parts_of(_here(size, HOW), UNIT) * UNIT
    return size


@gluon.jit
def parts_of(size, UNIT: gl.constexpr):
    """How many times UNIT goes into a size, which is divided as unsigned: ptxas would compute its sign once
    and keep it in a register in every partition."""
    return (size.to(gl.uint32) // UNIT).to(gl.int32)


@gluon.jit
def _next(stage, phase, HOW: gl.constexpr):
    """The ring position after (stage, phase)."""
    last = stage == HOW.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _steps(K, HOW: gl.constexpr):
    """Steps of a whole reduction."""
    return (parts_of(K, 64) + HOW.depth - 1) // HOW.depth


@gluon.jit
def _weight_loader(ring, board, CODES, S, Z, N, K, HOW: gl.constexpr):
    """Producer of codes, scale and zero words."""
    BLOCKS: gl.constexpr = HOW.blocks
    _x, _more, codes, words, full, empty = ring
    WORDS: gl.constexpr = scale_words(HOW.format, HOW.group)
    LINES: gl.constexpr = code_lines(HOW.format)
    ALL: gl.constexpr = _stage_words(HOW)
    BYTES: gl.constexpr = HOW.depth * LINES * 128 + (ALL * 4 if HOW.tma_scales else 0)
    SPAN: gl.constexpr = _span(HOW)
    BEFORE: gl.constexpr = _before(HOW)
    _jobs, _notes, _told, _noted, near, spent, _met = board
    K = _size_here(K, 32, HOW)
    N = _size_here(N, 32, HOW)
    if not HOW.tma_scales:
        L: gl.constexpr = gl.BlockedLayout([ALL // 32], [32], [1], [0])
        word = gl.arange(0, ALL, layout=L)
    columns = parts_of(K, 64)
    blocks = parts_of(N, 64)
    runs = parts_of(K, SPAN) if SPAN else 1
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    job = 0
    expert, _first, tokens, nt = tile_told(board, job, 1, HOW)
    while tokens >= 0:
        begin, steps = steps_of(board, job, _steps(K, HOW), 1, HOW)
        warp_meets(LOADER_MEETS)
        mbarrier.arrive(spent.index(job % HOW.jobs), count=1)
        block = nt * HOW.blocks
        line = (expert * blocks + block) * columns * LINES
        if HOW.tma_scales:
            own = expert * blocks + block
        else:
            own = expert * blocks + gl.minimum(block + word // (HOW.depth * WORDS), blocks - 1)
        base = own * (runs * WORDS)  # a word covers 64 weights or more, so this fits in 32 bits
        for step in range(steps):
            k = (begin + step) * HOW.depth
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), HOW.blocks * BYTES)
            for b in gl.static_range(BLOCKS):
                into = codes.index(BEFORE + stage * HOW.blocks + b)
                tma_load(CODES, [line + (b * columns + k) * LINES, 0], full.index(stage), into)
                if HOW.tma_scales:
                    run = base + (b * runs + (k * 64 // SPAN if SPAN else 0)) * WORDS
                    tma_load(S, [run], full.index(stage), words.index(stage * HOW.blocks + b))
            if not HOW.tma_scales:
                if SPAN == 64:  # words of consecutive columns are contiguous
                    at = k * WORDS + word % (HOW.depth * WORDS)
                elif SPAN:
                    at = (k + word // WORDS % HOW.depth) * 64 // SPAN * WORDS + word % WORDS
                else:
                    at = word % WORDS
                live = at < runs * WORDS
                async_load(words.index(stage).slice(0, ALL), S + (base + at), mask=live)
                if HOW.zeros:
                    into = words.index(stage).slice(ALL, ALL)
                    async_load(into, Z + (base + at), mask=live)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            mbarrier.arrive(near.index(0), count=1, pred=step + AHEAD == steps)
            stage, phase = _next(stage, phase, HOW)
        job += 1
        expert, _first, tokens, nt = tile_told(board, job, 1, HOW)


@gluon.jit
def _sources(X, SORTED, first, tokens, KX, WIDTH: gl.constexpr, HOW: gl.constexpr):
    """Base pointer, offsets and row mask for the first 64 columns of up to WIDTH tokens, `first` onwards."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [HOW.loaders, 1], [1, 0])
    place = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, L))
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, L)), 0)
    row = gl.minimum(place, tokens - 1)
    if HOW.stage == 1:
        row = gl.load(SORTED + first + row) // HOW.top_k
        if HOW.wide:  # batched input: each slot has its own row
            row = row.to(gl.int64)
        base = X
    else:
        row = _here(row, HOW)  # otherwise rows become pointers, which take twice the registers
        base = X + first.to(gl.int64) * KX
    return base, gl.expand_dims(row * KX, 1) + column, gl.expand_dims(place < tokens, 1), column


@gluon.jit
def _copy(into, source, k, KX, HOW: gl.constexpr):
    """Issues the copy of 64 columns of each token; columns and rows out of range become zero."""
    base, offsets, live, column = source
    if HOW.even:
        async_load(into, base + k * 64 + offsets, mask=live)
    else:
        there = live & (column < KX - k * 64)
        async_load(into, base + k * 64 + offsets, mask=there)


@gluon.jit
def _token_tile(
    ring, stage, phase, X, SORTED, first, tokens, part, KX, WIDTH: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Fills the ring with the columns of one tile's tokens: `part` are its first step and its steps."""
    DEPTH: gl.constexpr = HOW.depth
    FIRST: gl.constexpr = _first(WIDTH)
    REST: gl.constexpr = _rest(WIDTH)
    x, more, _codes, _words, full, empty = ring
    source = _sources(X, SORTED, first, tokens, KX, FIRST, HOW)
    if REST:
        rest = _sources(X, SORTED, first + FIRST, tokens - FIRST, KX, REST, HOW)
    begin, steps = part
    for step in range(steps):
        k = (begin + step) * HOW.depth
        mbarrier.wait(empty.index(stage), phase)
        for d in gl.static_range(DEPTH):
            piece = stage * HOW.depth + d
            _copy(x.index(piece).slice(0, FIRST), source, k + d, KX, HOW)
            if REST:
                if x.shape[1] == FIRST:
                    _copy(more.index(piece).slice(0, REST), rest, k + d, KX, HOW)
                else:
                    _copy(x.index(piece).slice(FIRST, REST), rest, k + d, KX, HOW)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage, phase = _next(stage, phase, HOW)
    return stage, phase


@gluon.jit
def _token_loader(ring, board, X, SORTED, K, KX, HOW: gl.constexpr):
    """Producer of token rows."""
    WIDTHS: gl.constexpr = len(HOW.widths)
    _jobs, _notes, _told, _noted, _near, spent, _met = board
    K = _size_here(K, 32, HOW)
    if HOW.stage == 2:
        tl.extra.cuda.gdc_wait()  # for the first GEMM; weight loads are already in flight
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    job = 0
    _expert, first, tokens, _nt = tile_told(board, job, HOW.loaders, HOW)
    while tokens >= 0:
        part = steps_of(board, job, _steps(K, HOW), HOW.loaders, HOW)
        mbarrier.arrive(spent.index(job % HOW.jobs), count=1)
        for i in gl.static_range(WIDTHS):
            if (tokens > _width(i - 1, HOW)) & (tokens <= _width(i, HOW)):
                stage, phase = _token_tile(
                    ring, stage, phase, X, SORTED, first, tokens, part, KX, _width(i, HOW), HOW
                )
        job += 1
        _expert, first, tokens, _nt = tile_told(board, job, HOW.loaders, HOW)

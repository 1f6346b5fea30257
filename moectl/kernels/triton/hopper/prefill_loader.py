# mypy: ignore-errors
"""Device code of the kernel family `prefill`: the producer warpgroup.

It takes tiles from a counter, passes them to the workers and fills the ring for them. Data of the previous
kernel is read with .cg, bypassing the L1 cache, which may hold stale lines.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .fragments import scale_words, tile_bytes
from .gluon_compat import async_load
from .prefill_tiles import _once, _placed, _rows_layout, _set_field, _start


@gluon.jit
def _token_rows(SORTED, first, end, KX, TOKENS: gl.constexpr, HOW: gl.constexpr):
    """Offsets of TOKENS rows from position `first` on, in units of 8 values, and the columns of a step.

    Rows past the end repeat the last one: token columns are independent, and these are not stored.
    """
    L: gl.constexpr = _rows_layout(64)
    rows = gl.minimum(first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L)), gl.maximum(end - 1, 0))
    if HOW.stage == 1:
        rows = gl.load(SORTED + rows, cache_modifier=".cg") // HOW.top_k
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    rows = rows.to(gl.uint32) * (KX // 8).to(gl.uint32)
    return gl.expand_dims(rows, 1), gl.expand_dims(columns, 0)


@gluon.jit
def _copy_tokens(x, X, rows, step, KX, HOW: gl.constexpr):
    """Copies 64 columns (step `step`) of rows from `_token_rows`; columns past the matrix become zero."""
    at, columns = rows
    p = X + (at + (step * 8).to(gl.uint32)).to(gl.int64) * 8 + columns
    if HOW.even:
        async_load(x, p)
    else:
        live, _ = gl.broadcast(
            step * 64 + columns < KX, gl.full([at.shape[0], 64], 0, gl.int1, _rows_layout(64))
        )
        async_load(x, p, mask=live)


@gluon.jit
def _note(notes, job, SORTED, WEIGHTS, B, F, N, expert, nt, first, end, part, HOW: gl.constexpr):
    """Loads what the epilogue of tile `job` needs: slots and weights by token, bias and factors by row.

    The factors of 64 rows are those of any 64: 8 gates and 8 ups alternate. Of a split GEMM, `part` are the
    first step, to whose part biases belong, and the rows of the parts before, which come on top of slots.
    """
    slots, weights, bias, factors = notes
    place = gl.arange(0, 256, layout=_once())
    if HOW.stage == 2 or HOW.weighted:
        live = first + place < end
        slot = gl.load(SORTED + first + place, mask=live, other=0, cache_modifier=".cg")
        slots.index(job % 2).store(slot + part[1])
        if HOW.weighted:
            weights.index(job % 2).store(gl.load(WEIGHTS + slot, mask=live, other=0.0))
    if HOW.bias:
        rows = nt * (64 * HOW.workers * HOW.blocks) + place
        b = gl.load(B + expert.to(gl.int64) * N + rows, mask=(rows < N) & (part[0] == 0), other=0.0)
        bias.index(job % 2).store(b.to(gl.float32))
    if HOW.halves:
        row = gl.arange(0, 64, layout=_once())
        factors.index(job % 2).store(gl.load(F + expert * HOW.halves + row // 8 % HOW.halves))


@gluon.jit
def _piece(x, more, stage, i: gl.constexpr, HOW: gl.constexpr):
    """The shared memory of piece i of a tile's tokens in a stage."""
    if _start(i, HOW) < 128:  # noqa: SIM108 - chosen at compile time: the types differ
        piece = x.index(stage).slice(_start(i, HOW), HOW.pieces[i])
    else:
        piece = more.index(stage)
    return piece


@gluon.jit
def _loader(load, size, HOW: gl.constexpr):
    """Loads tile after tile; a last tile of 0 units ends the workers."""
    ring, notes, jobs, given, taken, X, W, S, Z, B, F, WEIGHTS, SORTED, TILES, COUNT, COUNTER = load
    N, K, KX, spans, group_m, splits, T = size
    tokens, weights, full, empty = ring
    x, more = tokens
    codes, scales, zeros = weights
    BYTES: gl.constexpr = tile_bytes(HOW.format)
    WORDS: gl.constexpr = scale_words(HOW.format, HOW.group)
    STAGES: gl.constexpr = HOW.stages
    BLOCKS: gl.constexpr = HOW.workers * HOW.blocks
    WORKERS: gl.constexpr = HOW.workers
    PIECES: gl.constexpr = len(HOW.pieces)
    WL: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    SL: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [4, 1], [1, 0])
    columns = K // 64
    blocks = N // 64
    stage = gl.to_tensor(0)
    free = gl.to_tensor(1)
    job = 0
    tile = gl.program_id(0)
    count = gl.load(COUNT, cache_modifier=".cg")
    total = count * ((blocks + BLOCKS - 1) // BLOCKS)
    if HOW.splits:
        total *= splits
    units = 1
    while units > 0:
        place = tile
        begin, steps = 0, columns
        part = (0, 0)
        if HOW.splits:
            # Parts of a tile follow each other.
            place = tile // splits
            index = tile % splits
            begin = index * columns // splits
            steps = (index + 1) * columns // splits - begin
            part = (begin, index * T)
        mt, nt = _placed(place, count, blocks // BLOCKS, group_m)
        real = tile < total
        expert = gl.load(TILES + mt * 4, mask=real, other=0, cache_modifier=".cg")
        first = gl.load(TILES + mt * 4 + 1, mask=real, other=0, cache_modifier=".cg")
        end = gl.load(TILES + mt * 4 + 2, mask=real, other=0, cache_modifier=".cg")
        units = gl.load(TILES + mt * 4 + 3, mask=real, other=0, cache_modifier=".cg")
        mbarrier.wait(taken.index(job % 2), ((job // 2) & 1) ^ 1)
        _set_field(jobs, job, 0, units)
        _set_field(jobs, job, 1, first)
        _set_field(jobs, job, 2, end)
        _set_field(jobs, job, 3, nt)
        if HOW.splits:
            _set_field(jobs, job, 4, steps)
        _note(notes, job, SORTED, WEIGHTS, B, F, N, expert, nt, first, end, part, HOW)
        mbarrier.arrive(given.index(job % 2), count=1)
        job += 1
        tile = gl.num_programs(0) + gl.atomic_add(COUNTER, 1, sem="relaxed")
        rows = ()
        for i in gl.static_range(PIECES):
            rows += (_token_rows(SORTED, first + _start(i, HOW), end, KX, HOW.pieces[i], HOW),)
        w_expert = expert.to(gl.int64) * blocks * columns * BYTES
        s_expert = expert.to(gl.int64) * blocks * spans * WORDS
        mine = gl.arange(0, 4, layout=gl.SliceLayout(1, WL))
        inner = gl.arange(0, BYTES, layout=gl.SliceLayout(0, WL))
        w_at = gl.expand_dims(gl.minimum(nt * BLOCKS + mine, blocks - 1) * (columns * BYTES), 1)
        w_at = w_at + gl.expand_dims(inner, 0)
        w_live, _ = gl.broadcast(gl.expand_dims(mine < BLOCKS, 1), gl.full([4, BYTES], 0, gl.int1, WL))
        # A block past the matrix repeats the last one; its copy is not read, or its result not stored.
        own = gl.minimum(nt * BLOCKS + gl.arange(0, 4, layout=gl.SliceLayout(1, SL)), blocks - 1)
        word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, SL))
        s_at = gl.expand_dims(own * (spans * WORDS), 1) + gl.expand_dims(word, 0)
        for step in range(gl.where(real, steps, 0)):
            kt = begin + step
            for me in gl.static_range(WORKERS):
                mbarrier.wait(empty.index(WORKERS * stage + me), free)
            _copy_tokens(_piece(x, more, stage, 0, HOW), X, rows[0], kt, KX, HOW)
            for i in gl.static_range(1, PIECES):
                if units > _start(i, HOW) // 16:
                    _copy_tokens(_piece(x, more, stage, i, HOW), X, rows[i], kt, KX, HOW)
            async_load(codes.index(stage), W + (w_expert + kt * BYTES) + w_at, mask=w_live)
            s_step = s_expert + kt // HOW.span * WORDS
            async_load(scales.index(stage), S + s_step + s_at)
            if HOW.zeros:
                async_load(zeros.index(stage), Z + s_step + s_at)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            free = gl.where(last, free ^ 1, free)

# mypy: ignore-errors
"""Device code of the grouped GEMMs for about 5 to 130 tokens an expert, warp specialized.

A program stays on its multiprocessor and works off tiles: ``64 * workers`` weight rows times the tokens
of one expert. Two partitions fill a ring in shared memory, one with weights (codes by TMA, scale and zero
words by cp.async), one with token rows (gathered by cp.async); the workers, warpgroups with 64 weight rows
each, empty it. A worker turns the next codes into registers while the tensor cores work on the last ones.

A tile has as many token columns as its tokens need, one of ``HOW.widths``: a branch of the kernel each.

``N, K`` are stored sizes of the weights, ``KX`` the columns of the tokens, ``NX`` the columns of the output.
`HOW` is a `mid.Variant`: all that is known when the kernel is compiled.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .epilogue import activate, activate_one
from .fragments import FOLD_FACTOR, code_layout, code_lines, fragment, scale_layout, scale_words
from .mid_ring import _first, _next, _rest, _stage_words, _token_loader, _weight_loader, _width


@triton.jit
def _token_tiles_kernel(
    OFFSETS, TILES, COUNT, E: tl.constexpr, EPAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """TILES ``[bound, 4]``: (expert, first position, tokens, 0) of each tile of up to TOKENS; their COUNT."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, EPAD)
    low = tl.load(OFFSETS + i, mask=i < E, other=0)
    high = tl.load(OFFSETS + i + 1, mask=i < E, other=0)
    tiles = (high - low + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
    mine = i[None, :] == expert[:, None]
    first = tl.sum(tl.where(mine, (low - (ends - tiles) * TOKENS)[None, :], 0), 1) + t * TOKENS
    tokens = tl.minimum(tl.sum(tl.where(mine, high[None, :], 0), 1) - first, TOKENS)
    live = t < total
    tl.store(TILES + t * 4, expert, mask=live)
    tl.store(TILES + t * 4 + 1, first, mask=live)
    tl.store(TILES + t * 4 + 2, tokens, mask=live)
    if tl.program_id(0) == 0:
        tl.store(COUNT, total)


@gluon.constexpr_function
def _sums(WIDTH):
    """Registers of [64, WIDTH] fp32 sums of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])


@gluon.constexpr_function
def _operand(WIDTH):
    return gl.DotOperandLayout(0, _sums(WIDTH), 2)


@gluon.jit
def _weights(
    codes, words, stage, D: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr, HOW: gl.constexpr
):
    """Row block BLOCK's weights in the D-th 64 columns of a stage, [64, 64], as an A operand."""
    WORDS: gl.constexpr = scale_words(HOW.format, HOW.group)
    LINES: gl.constexpr = code_lines(HOW.format)
    LAYOUT: gl.constexpr = scale_layout(HOW.format, HOW.group)
    AT: gl.constexpr = (BLOCK * HOW.depth + D) * WORDS
    ZEROS: gl.constexpr = _stage_words(HOW)
    raw = codes.index(stage * HOW.workers + BLOCK).slice(D * LINES, LINES).load(code_layout(HOW.format))
    s = words.index(stage).slice(AT, WORDS).load(LAYOUT)
    z = words.index(stage).slice(ZEROS + AT, WORDS).load(LAYOUT) if HOW.zeros else s
    FORMAT: gl.constexpr = HOW.format
    GROUP: gl.constexpr = HOW.group
    WITH_ZEROS: gl.constexpr = HOW.zeros
    EXACT: gl.constexpr = HOW.exact
    SPLIT: gl.constexpr = HOW.split
    return fragment(raw, s, z, FORMAT, GROUP, WITH_ZEROS, EXACT, DTYPE, _operand(16), SPLIT)


@gluon.jit
def _multiply(a, tokens, acc, WIDTH: gl.constexpr):
    """Starts acc += a * tokens; the sums are there after a wait."""
    a = gl.convert_layout(a, _operand(WIDTH), assert_trivial=True)
    return hopper.warpgroup_mma(a, tokens.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _multiply_all(ring, piece, a, acc, acc2, WIDTH: gl.constexpr, HOW: gl.constexpr):
    """`_multiply` of a piece's token columns, in two parts unless they are a power of two."""
    FIRST: gl.constexpr = _first(WIDTH)
    REST: gl.constexpr = _rest(WIDTH)
    x, more, _codes, _words, _full, _empty = ring
    sums = _multiply(a, x.index(piece).slice(0, FIRST), acc, FIRST)
    if REST:
        if x.shape[1] == FIRST:
            tokens = more.index(piece).slice(0, REST)
        else:
            tokens = x.index(piece).slice(FIRST, REST)
        sums2 = _multiply(a, tokens, acc2, REST)
    else:
        sums2 = acc2
    return sums, sums2


@gluon.jit
def _finish(sums, sums2, a, after, WIDTH: gl.constexpr):
    """The sums, when the products that read `a` are done and `after` has been made."""
    if _rest(WIDTH):
        sums, sums2, a, after = hopper.warpgroup_mma_wait(0, deps=(sums, sums2, a, after))
    else:
        sums, a, after = hopper.warpgroup_mma_wait(0, deps=(sums, a, after))
    return sums, sums2, after


@gluon.jit
def _step(
    ring, stage, phase, a, acc, acc2,
    LAST: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Products of one stage, whose first weights are `a`; returns the first weights of the next stage.

    The matrix instructions in flight read `a`; the weights after it are made before the wait for them, in
    other registers.
    """
    DEPTH: gl.constexpr = HOW.depth
    _x, _more, codes, words, full, empty = ring
    following, turn = _next(stage, phase, HOW)
    for d in gl.static_range(DEPTH):
        sums, sums2 = _multiply_all(ring, stage * HOW.depth + d, a, acc, acc2, WIDTH, HOW)
        if d + 1 < HOW.depth:
            after = _weights(codes, words, stage, d + 1, BLOCK, DTYPE, HOW)
            acc, acc2, a = _finish(sums, sums2, a, after, WIDTH)
        elif LAST:
            acc, acc2, a = _finish(sums, sums2, a, a, WIDTH)
        else:
            mbarrier.wait(full.index(following), turn)
            after = _weights(codes, words, following, 0, BLOCK, DTYPE, HOW)
            acc, acc2, a = _finish(sums, sums2, a, after, WIDTH)
    mbarrier.arrive(empty.index(stage), count=1)
    return a, acc, acc2, following, turn


@gluon.jit
def _product(
    ring, stage, phase, K, WIDTH: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Sums of a tile over all its columns, [64, first] and [64, rest], and the ring position behind it."""
    UNROLL: gl.constexpr = 2 if HOW.depth == 1 else 1  # two operands then take turns without moves
    FIRST: gl.constexpr = _first(WIDTH)
    REST: gl.constexpr = _rest(WIDTH) if _rest(WIDTH) else 8
    _x, _more, codes, words, full, _empty = ring
    steps = (K // 64 + HOW.depth - 1) // HOW.depth
    acc = gl.full([64, FIRST], 0.0, gl.float32, _sums(FIRST))
    acc2 = gl.full([64, REST], 0.0, gl.float32, _sums(REST))
    mbarrier.wait(full.index(stage), phase)
    a = _weights(codes, words, stage, 0, BLOCK, DTYPE, HOW)
    for _ in range((steps - 1) // UNROLL):
        for _turn in gl.static_range(UNROLL):
            a, acc, acc2, stage, phase = _step(
                ring, stage, phase, a, acc, acc2, False, WIDTH, BLOCK, DTYPE, HOW
            )
    if UNROLL == 2 and steps % 2 == 0:
        a, acc, acc2, stage, phase = _step(ring, stage, phase, a, acc, acc2, False, WIDTH, BLOCK, DTYPE, HOW)
    a, acc, acc2, stage, phase = _step(ring, stage, phase, a, acc, acc2, True, WIDTH, BLOCK, DTYPE, HOW)
    return acc, acc2, stage, phase


@gluon.jit
def _activated(acc, alpha, limit, WIDTH: gl.constexpr, HOW: gl.constexpr):
    """Activations of [64, WIDTH] sums: [32, WIDTH] of 8 gates, 8 ups in each 16 rows; ungated, all 64."""
    ACT: gl.constexpr = HOW.activation
    if HOW.gated:
        gate, up = gl.split(acc.reshape([4, 2, 8, WIDTH]).permute((0, 2, 3, 1)))
        h = activate(gate, up, alpha, limit, ACT).reshape([32, WIDTH])
    else:
        h = activate_one(acc, ACT)
    return h


@gluon.constexpr_function
def _rows_of(HEIGHT):
    """Registers of [HEIGHT, columns] results on their way out: 8 neighbouring rows, 16 bytes, a thread."""
    return gl.BlockedLayout([8, 1], [HEIGHT // 8, 256 // HEIGHT], [1, 4], [0, 1])


@gluon.jit
def _store(
    acc, notes, Y, bias, block, first, tokens, NX, alpha, limit,
    AT: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Writes sums [64, WIDTH], from column AT of the tile on: activated by position, or weighted by slot."""
    slots, weights = notes
    L: gl.constexpr = acc.type.layout
    if HOW.folded:
        acc = acc * FOLD_FACTOR
    if HOW.weighted:
        weight = gl.expand_dims(weights.slice(AT, WIDTH).load(gl.SliceLayout(0, L)), 0)
        if HOW.stage == 1:
            acc = acc * weight
    if HOW.bias:
        acc = acc + gl.expand_dims(gl.convert_layout(bias, gl.SliceLayout(1, L)), 1)
    if HOW.stage == 1:
        result = _activated(acc, alpha, limit, WIDTH, HOW)
    elif HOW.weighted:
        result = acc * weight
    else:
        result = acc
    HEIGHT: gl.constexpr = result.shape[0]
    R: gl.constexpr = _rows_of(HEIGHT)
    result = gl.convert_layout(result.to(Y.dtype.element_ty), R)
    columns = block * HEIGHT + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, R))
    place = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, R))
    if HOW.stage == 1:
        base = Y + (first + AT).to(gl.int64) * NX
        row = place * NX
    else:
        base = Y
        slot = slots.slice(AT, WIDTH).load(gl.SliceLayout(0, R))
        row = (slot.to(gl.int64) if HOW.wide else slot) * NX
    target = base + (gl.expand_dims(row, 0) + gl.expand_dims(columns, 1))
    live = gl.expand_dims(AT + place < tokens, 0) & gl.expand_dims(columns < NX, 1)
    gl.store(target, result, mask=live)


@gluon.jit
def _store_sums(
    acc, notes, Y, bias, block, first, tokens, NX, alpha, limit,
    AT: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """`_store` by up to 32 columns: all at once would not fit registers."""
    HALF: gl.constexpr = WIDTH // 2
    QUARTER: gl.constexpr = WIDTH // 4
    if WIDTH <= 32:
        _store(acc, notes, Y, bias, block, first, tokens, NX, alpha, limit, AT, WIDTH, HOW)
    else:
        for h in gl.static_range(2):
            half = gl.split(acc.reshape([64, 2, HALF]).permute((0, 2, 1)))[h]
            if WIDTH <= 64:
                _store(
                    half, notes, Y, bias, block, first, tokens, NX, alpha, limit, AT + h * HALF, HALF, HOW
                )  # fmt: skip
            else:
                for q in gl.static_range(2):
                    quarter = gl.split(half.reshape([64, 2, QUARTER]).permute((0, 2, 1)))[q]
                    _store(
                        quarter, notes, Y, bias, block, first, tokens, NX, alpha, limit,
                        AT + h * HALF + q * QUARTER, QUARTER, HOW,
                    )  # fmt: skip


@gluon.jit
def _note(notes, SORTED, WEIGHTS, first, tokens, HOW: gl.constexpr):
    """Slots and router weights of a tile, into shared memory: loaded now, they do not delay its end."""
    slots, weights = notes
    if HOW.stage == 2 or HOW.weighted:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        place = gl.arange(0, slots.shape[0], layout=L)
        slot = gl.load(SORTED + first + place, mask=place < tokens, other=0, cache_modifier=".cg")
        slots.store(slot)
        if HOW.weighted:
            weights.store(gl.load(WEIGHTS + slot, mask=place < tokens, other=0.0, cache_modifier=".cg"))


@gluon.jit
def _worker(
    ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit,
    BLOCK: gl.constexpr, DTYPE: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """The product and the epilogue of row block BLOCK of each of the program's tiles."""
    WIDTHS: gl.constexpr = len(HOW.widths)
    Y, B, WEIGHTS, SORTED = out
    own = (notes[0].index(BLOCK), notes[1].index(BLOCK))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tiles = count * row_tiles
    first_tile = gl.program_id(0)
    expert, first, tokens = _tile(TILES, first_tile, tiles, row_tiles)
    for tile in range(first_tile, tiles, gl.num_programs(0)):
        block = (tile % row_tiles) * HOW.workers + BLOCK
        coming = _tile(TILES, tile + gl.num_programs(0), tiles, row_tiles)
        _note(own, SORTED, WEIGHTS, first, tokens, HOW)
        rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _sums(16)))
        if HOW.bias:
            bias = gl.load(B + expert.to(gl.int64) * N + rows, mask=rows < N, other=0.0).to(gl.float32)
        else:
            bias = rows
        for i in gl.static_range(WIDTHS):
            if (tokens > _width(i - 1, HOW)) & (tokens <= _width(i, HOW)):
                acc, acc2, stage, phase = _product(ring, stage, phase, K, _width(i, HOW), BLOCK, DTYPE, HOW)
                if block < N // 64:
                    _store_sums(
                        acc, own, Y, bias, block, first, tokens, NX, alpha, limit,
                        0, _first(_width(i, HOW)), HOW,
                    )  # fmt: skip
                    if _rest(_width(i, HOW)):
                        _store_sums(
                            acc2, own, Y, bias, block, first, tokens, NX, alpha, limit,
                            _first(_width(i, HOW)), _rest(_width(i, HOW)), HOW,
                        )  # fmt: skip
        expert, first, tokens = coming


@gluon.jit
def _tile(TILES, tile, tiles, row_tiles):
    """(expert, first position, tokens) of a tile, zeros where there is none.

    From L2: the second GEMM reads before it waits, when the L1 cache may still hold an earlier call's.
    """
    at = TILES + (tile // row_tiles) * 4
    there = tile < tiles
    expert = gl.load(at, mask=there, other=0, cache_modifier=".cg")
    first = gl.load(at + 1, mask=there, other=0, cache_modifier=".cg")
    return expert, first, gl.load(at + 2, mask=there, other=0, cache_modifier=".cg")


@gluon.jit(do_not_specialize=["row_tiles"])
def _grouped_gemm_kernel(
    X, CODES, S, Z, B, Y, SORTED, TILES, COUNT, WEIGHTS, N, K, KX, NX, row_tiles, alpha, limit,
    HOW: gl.constexpr,
):  # fmt: skip
    """Stage 1: Y ``[T, NX]`` by position = activation of tokens times weights. Stage 2: by slot, weighted."""
    STAGES: gl.constexpr = HOW.stages
    if HOW.stage == 1:
        tl.extra.cuda.gdc_wait()
    # The next kernel may start. It finds the tiles: they were there before this kernel began to work.
    tl.extra.cuda.gdc_launch_dependents()
    DTYPE: gl.constexpr = X.dtype.element_ty
    ROWS: gl.constexpr = _first(_width(len(HOW.widths) - 1, HOW))
    REST: gl.constexpr = _rest(_width(len(HOW.widths) - 1, HOW))
    ALL: gl.constexpr = 2 * ROWS if REST else ROWS
    LINES: gl.constexpr = code_lines(HOW.format)
    WORDS: gl.constexpr = _stage_words(HOW) * (2 if HOW.zeros else 1)
    count = gl.load(COUNT, cache_modifier=".cg")
    x = gl.allocate_shared_memory(DTYPE, [HOW.stages * HOW.depth, ROWS, 64], gl.NVMMASharedLayout(128, 16, 2))
    more = gl.allocate_shared_memory(
        DTYPE, [HOW.stages * HOW.depth, REST if REST else 8, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    slots = gl.allocate_shared_memory(gl.int32, [HOW.workers, ALL], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights = gl.allocate_shared_memory(gl.float32, [HOW.workers, ALL], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    codes = gl.allocate_shared_memory(
        gl.uint8, [HOW.stages * HOW.workers, HOW.depth * LINES, 128], gl.NVMMASharedLayout(128, 8, 2)
    )
    words = gl.allocate_shared_memory(gl.int32, [HOW.stages, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [HOW.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [HOW.stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * HOW.loaders + 32 + 1)
        mbarrier.init(empty.index(i), count=HOW.workers)
    hopper.fence_async_shared()
    ring = (x, more, codes, words, full, empty)
    notes = (slots, weights)
    out = (Y, B, WEIGHTS, SORTED)
    if HOW.workers == 2:
        gl.warp_specialize(
            [
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 0, DTYPE, HOW)),
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 1, DTYPE, HOW)),
                (_token_loader, (ring, X, SORTED, TILES, count, K, KX, row_tiles, HOW)),
                (_weight_loader, (ring, CODES, S, Z, TILES, count, N, K, row_tiles, HOW)),
            ],
            [4, HOW.loaders, 1],
            [HOW.registers[0], HOW.registers[1], HOW.registers[1]],
        )
    elif HOW.workers == 3:
        gl.warp_specialize(
            [
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 0, DTYPE, HOW)),
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 1, DTYPE, HOW)),
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 2, DTYPE, HOW)),
                (_token_loader, (ring, X, SORTED, TILES, count, K, KX, row_tiles, HOW)),
                (_weight_loader, (ring, CODES, S, Z, TILES, count, N, K, row_tiles, HOW)),
            ],
            [4, 4, HOW.loaders, 1],
            [HOW.registers[0], HOW.registers[0], HOW.registers[1], HOW.registers[1]],
        )
    else:
        gl.warp_specialize(
            [
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 0, DTYPE, HOW)),
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 1, DTYPE, HOW)),
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 2, DTYPE, HOW)),
                (_worker, (ring, notes, out, TILES, count, N, K, NX, row_tiles, alpha, limit, 3, DTYPE, HOW)),
                (_token_loader, (ring, X, SORTED, TILES, count, K, KX, row_tiles, HOW)),
                (_weight_loader, (ring, CODES, S, Z, TILES, count, N, K, row_tiles, HOW)),
            ],
            [4, 4, 4, HOW.loaders, 1],
            [HOW.registers[0], HOW.registers[0], HOW.registers[0], HOW.registers[1], HOW.registers[1]],
        )

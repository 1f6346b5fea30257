# mypy: ignore-errors
"""Device code of the kernel family `mid`: warp-specialized grouped GEMMs for 3 to 130 tokens per expert.

Programs are persistent. A tile is 64 or 128 weight rows per worker by the tokens of one expert. One warp
takes tiles and tells the others what they need to know of them (`tile_board`). Two producer partitions fill a
ring in shared memory, one with weights (codes by TMA, scale and zero-point words by cp.async or in boxes by
TMA), one with token rows (gathered by cp.async); the workers (consumer warpgroups) drain it. A worker
dequantizes the next codes into registers while the tensor cores multiply the previous ones.

A tile has as many token columns as its tokens need: one of ``HOW.widths``, each a branch of the kernel.

``N, K`` are the stored sizes of the weights, ``KX`` the columns of the tokens, ``NX`` those of the output.
`HOW` is a `mid.MidVariant`, which has all compile-time parameters.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .fragments import code_layout, code_lines, fragment, scale_layout, scale_words
from .gluon_compat import reinterpret
from .mid_epilogue import _biases, _factors, _store_all, _sums
from .mid_loader import (
    _before,
    _first,
    _jointly,
    _next,
    _rest,
    _rows,
    _run,
    _size_here,
    _stage_words,
    _steps,
    _together,
    _token_loader,
    _weight_loader,
    _width,
    _words_layout,
    parts_of,
)
from .mixed_width_wgmma import joined, joint_finished, joint_issued, joint_operand, joint_zeros
from .tile_board import (
    _cached,
    begin_board,
    job_words,
    noted_of,
    notes_of,
    part_told,
    steps_of,
    tile_scheduler,
    tile_told,
)


@gluon.constexpr_function
def _operand(WIDTH):
    return gl.DotOperandLayout(0, _sums(WIDTH), 2)


@gluon.jit
def _stored(codes, words, stage, D: gl.constexpr, BLOCK: gl.constexpr, HOW: gl.constexpr):
    """Loads codes, scale and zero words of row block BLOCK, for the D-th 64 columns of a stage."""
    WORDS: gl.constexpr = scale_words(HOW.format, HOW.group)
    LINES: gl.constexpr = code_lines(HOW.format)
    LAYOUT: gl.constexpr = scale_layout(HOW.format, HOW.group)
    BEFORE: gl.constexpr = _before(HOW)
    place = stage * HOW.blocks + BLOCK
    raw = codes.index(BEFORE + place).slice(D * LINES, LINES).load(code_layout(HOW.format))
    if HOW.tma_scales:
        AT: gl.constexpr = _run(D, HOW) * WORDS
        of = words.index(place)
    else:
        AT: gl.constexpr = (BLOCK * HOW.depth + D) * WORDS
        of = words.index(stage)
    s = of.slice(AT, WORDS).load(LAYOUT)
    z = of.slice(_stage_words(HOW) + AT, WORDS).load(LAYOUT) if HOW.zeros else s
    return raw, s, z


@gluon.jit
def _weights(stored, DTYPE: gl.constexpr, JOINT: gl.constexpr, HOW: gl.constexpr):
    """The codes and scales that `_stored` loaded, dequantized to a [64, 64] A operand."""
    raw, s, z = stored
    FORMAT: gl.constexpr = HOW.format
    GROUP: gl.constexpr = HOW.group
    ZEROS: gl.constexpr = HOW.zeros
    EXACT: gl.constexpr = HOW.exact
    SPLIT: gl.constexpr = HOW.split
    a = fragment(raw, s, z, FORMAT, GROUP, ZEROS, EXACT, DTYPE, _operand(16), SPLIT)
    if JOINT:
        a = joint_operand(a)
    return a


@gluon.jit
def _multiply(a, tokens, acc, WIDTH: gl.constexpr):
    """Issues acc += a * tokens; the result is valid after a wait."""
    a = gl.convert_layout(a, _operand(WIDTH), assert_trivial=True)
    return hopper.warpgroup_mma(a, tokens.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _multiply_all(ring, piece, a, acc, WIDTH: gl.constexpr, HOW: gl.constexpr):
    """`_multiply` for a piece's tokens: two products unless WIDTH is a power of two or `_jointly` one."""
    FIRST: gl.constexpr = _first(WIDTH)
    REST: gl.constexpr = _rest(WIDTH)
    x, more, _codes, _words, _full, _empty = ring
    if _jointly(WIDTH, HOW):
        sums = joint_issued(a, piece * (x.shape[1] * 128), acc, WIDTH // 16)
    elif REST:
        if x.shape[1] == FIRST:
            tokens = more.index(piece).slice(0, REST)
        else:
            tokens = x.index(piece).slice(FIRST, REST)
        first = _multiply(a, x.index(piece).slice(0, FIRST), acc[0], FIRST)
        sums = (first, _multiply(a, tokens, acc[1], REST))
    else:
        sums = (_multiply(a, x.index(piece).slice(0, FIRST), acc[0], FIRST), acc[1])
    return sums


@gluon.jit
def _finish(sums, a, after, WIDTH: gl.constexpr, JOINT: gl.constexpr):
    """The accumulators once the products that read `a` are done, and `after`, computed before the wait."""
    if JOINT:
        done, after = joint_finished(sums, a + after, 0, WIDTH // 16)
    elif _rest(WIDTH):
        sums1, sums2, a, after = hopper.warpgroup_mma_wait(0, deps=(sums[0], sums[1], a, after))
        done = (sums1, sums2)
    else:
        sums1, a, after = hopper.warpgroup_mma_wait(0, deps=(sums[0], a, after))
        done = (sums1, sums[1])
    return done, after


@gluon.jit
def _await(full, stage, phase):
    """Wait until a stage is filled.

    cp.async writes through the generic proxy and wgmma reads through the async one: hence the fence.
    """
    mbarrier.wait(full.index(stage), phase)
    hopper.fence_async_shared()


@gluon.jit
def _step(
    ring, stage, phase, a, acc, acc2,
    LAST: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """The products of one stage, whose first operand is `a`; returns the first operand of the next one too.

    While wgmmas in flight read `a`, the next operand is dequantized into other registers, before the wait for
    them.
    """
    TALL: gl.constexpr = HOW.blocks_m
    PIECES: gl.constexpr = HOW.depth * TALL
    _x, _more, codes, words, full, empty = ring
    JOINT: gl.constexpr = _jointly(WIDTH, HOW)
    following, turn = _next(stage, phase, HOW)
    if not LAST and HOW.tma_scales:
        # First of all: a later wait would end the basic block in which ptxas interleaves dequantization
        # with the products by itself.
        _await(full, following, turn)
    for j in gl.static_range(PIECES):
        piece = stage * HOW.depth + j // TALL
        if j % TALL == 0:
            sums = _multiply_all(ring, piece, a, acc, WIDTH, HOW)
        else:
            sums = _multiply_all(ring, piece, a, acc2, WIDTH, HOW)
        if j + 1 < PIECES:
            stored = _stored(codes, words, stage, (j + 1) // TALL, BLOCK * TALL + (j + 1) % TALL, HOW)
            after = _weights(stored, DTYPE, JOINT, HOW)
        elif LAST:
            after = a
        else:
            if not HOW.tma_scales:
                _await(full, following, turn)
            after = _weights(_stored(codes, words, following, 0, BLOCK * TALL, HOW), DTYPE, JOINT, HOW)
        if j % TALL == 0:
            acc, a = _finish(sums, a, after, WIDTH, JOINT)
        else:
            acc2, a = _finish(sums, a, after, WIDTH, JOINT)
    mbarrier.arrive(empty.index(stage), count=1)
    return a, acc, acc2, following, turn


@gluon.jit
def _zeros(WIDTH: gl.constexpr, JOINT: gl.constexpr):
    """Zeroed accumulators: for the first columns and the rest, or one for each unit of 16."""
    FIRST: gl.constexpr = _first(WIDTH)
    REST: gl.constexpr = _rest(WIDTH) if _rest(WIDTH) else 8
    if JOINT:
        sums = joint_zeros(WIDTH // 16)
    else:
        first = gl.full([64, FIRST], 0.0, gl.float32, _sums(FIRST))
        sums = (first, gl.full([64, REST], 0.0, gl.float32, _sums(REST)))
    return sums


@gluon.jit
def _parts(sums, WIDTH: gl.constexpr):
    """Joint accumulators as those of the first columns and of the rest."""
    FIRST: gl.constexpr = _first(WIDTH)
    REST: gl.constexpr = _rest(WIDTH)
    return joined(sums, 0, FIRST // 16), joined(sums, FIRST // 16, REST // 16)


@gluon.jit
def _product(
    ring, stage, phase, steps,
    WIDTH: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Accumulators of a tile's one or two row blocks over all its steps, one at least, and the ring position
    after it."""
    UNROLL: gl.constexpr = 2 if HOW.depth * HOW.blocks_m == 1 else 1  # two operands alternate without moves
    _x, _more, codes, words, full, _empty = ring
    JOINT: gl.constexpr = _jointly(WIDTH, HOW)
    acc = _zeros(WIDTH, JOINT)
    acc2 = _zeros(WIDTH, JOINT)
    _await(full, stage, phase)
    a = _weights(_stored(codes, words, stage, 0, BLOCK * HOW.blocks_m, HOW), DTYPE, JOINT, HOW)
    for _ in range((steps - 1) // UNROLL):
        for _turn in gl.static_range(UNROLL):
            a, acc, acc2, stage, phase = _step(
                ring, stage, phase, a, acc, acc2, False, WIDTH, BLOCK, DTYPE, HOW
            )
    if UNROLL == 2 and steps % 2 == 0:
        a, acc, acc2, stage, phase = _step(ring, stage, phase, a, acc, acc2, False, WIDTH, BLOCK, DTYPE, HOW)
    a, acc, acc2, stage, phase = _step(ring, stage, phase, a, acc, acc2, True, WIDTH, BLOCK, DTYPE, HOW)
    if JOINT:
        acc = _parts(acc, WIDTH)
        acc2 = _parts(acc2, WIDTH)
    return acc, acc2, stage, phase


@gluon.jit
def _worker(
    ring, board, Y, B, F, N, K, NX, alpha, limit, BLOCK: gl.constexpr, DTYPE: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """The product and the epilogue of row block BLOCK of each of the program's tiles."""
    WIDTHS: gl.constexpr = len(HOW.widths)
    _jobs, notes, _told, noted, _near, spent, _met = board
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    N = _size_here(N, 32, HOW)
    K = _size_here(K, 32, HOW)
    NX = _size_here(NX, HOW.unit, HOW)
    job = 0
    expert, first, tokens, nt = tile_told(board, job, 4, HOW)
    while tokens >= 0:
        begin, steps = steps_of(board, job, _steps(K, HOW), 4, HOW)
        at = job % HOW.jobs
        block = nt * HOW.blocks + BLOCK * HOW.blocks_m
        factors = _factors(F, expert, HOW)
        by_row = (_biases(B, expert, block, N, begin, HOW), factors)
        by_row2 = (_biases(B, expert, block + 1, N, begin, HOW), factors) if HOW.blocks_m == 2 else by_row
        for i in gl.static_range(WIDTHS):
            if (tokens > _width(i - 1, HOW)) & (tokens <= _width(i, HOW)):
                acc, acc2, stage, phase = _product(
                    ring, stage, phase, steps, _width(i, HOW), BLOCK, DTYPE, HOW
                )
                own = (notes[0].index(at), notes[1].index(at))
                if HOW.splits:
                    _begin, _count, place = part_told(board, job, 4, HOW)
                    own += (place,)
                if noted_of(HOW):
                    mbarrier.wait(noted.index(at), (job // HOW.jobs) & 1)
                if block < parts_of(N, 64):
                    _store_all(
                        acc, own, Y, by_row, block, first, tokens, NX, alpha, limit, _width(i, HOW), HOW
                    )  # fmt: skip
                if HOW.blocks_m == 2 and block + 1 < parts_of(N, 64):
                    _store_all(
                        acc2, own, Y, by_row2, block + 1, first, tokens, NX, alpha, limit, _width(i, HOW), HOW
                    )  # fmt: skip
        mbarrier.arrive(spent.index(at), count=1)
        job += 1
        expert, first, tokens, nt = tile_told(board, job, 4, HOW)


@gluon.jit(do_not_specialize=["row_tiles", "splits", "T"])
def _grouped_gemm_kernel(
    X, CODES, S, Z, B, F, Y, SORTED, TILES, COUNT, COUNTER, WEIGHTS, N, K, KX, NX, row_tiles, splits, T,
    alpha, limit,
    HOW: gl.constexpr,
):  # fmt: skip
    """Y ``[T, NX]``: activations by position (stage 1), or by slot, times router weights if weighted.

    With more than one of `splits`, parts of the reduction, Y of stage 2 is ``[splits, T, NX]`` in fp32,
    whatever the pointer's type.
    """
    STAGES: gl.constexpr = HOW.stages
    if HOW.stage == 1:
        tl.extra.cuda.gdc_wait()
    # The next kernel may start: the tiles that it reads were complete before this kernel began its work.
    tl.extra.cuda.gdc_launch_dependents()
    DTYPE: gl.constexpr = X.dtype.element_ty
    ROWS: gl.constexpr = _rows(HOW)
    REST: gl.constexpr = _rest(_width(len(HOW.widths) - 1, HOW))
    LINES: gl.constexpr = code_lines(HOW.format)
    WORDS: gl.constexpr = _stage_words(HOW) * (2 if HOW.zeros else 1)
    PLACES: gl.constexpr = HOW.stages * (HOW.blocks if HOW.tma_scales else 1)
    PIECES: gl.constexpr = HOW.stages * HOW.depth
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    CODES_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    CODES_SHAPE: gl.constexpr = [_before(HOW) + HOW.stages * HOW.blocks, HOW.depth * LINES, 128]
    count = gl.load(COUNT, cache_modifier=_cached(HOW))
    if _together(HOW):
        codes = gl.allocate_shared_memory(gl.uint8, CODES_SHAPE, CODES_LAYOUT)
        x = reinterpret(codes, DTYPE, [PIECES, ROWS, 64], X_LAYOUT)
    else:
        x = gl.allocate_shared_memory(DTYPE, [PIECES, ROWS, 64], X_LAYOUT)
        codes = gl.allocate_shared_memory(gl.uint8, CODES_SHAPE, CODES_LAYOUT)
    more = gl.allocate_shared_memory(DTYPE, [PIECES, REST if REST else 8, 64], X_LAYOUT)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    JOBS: gl.constexpr = HOW.jobs
    slots = gl.allocate_shared_memory(gl.int32, [JOBS, notes_of(HOW)], LINE)
    weights = gl.allocate_shared_memory(gl.float32, [JOBS, notes_of(HOW)], LINE)
    jobs = gl.allocate_shared_memory(gl.int32, [job_words(HOW) * JOBS, 1], LINE)
    told = gl.allocate_shared_memory(gl.int64, [JOBS, 1], BARRIER)
    # Not allocated without use, as in `tma_kernels`.
    noted = told
    if noted_of(HOW):
        noted = gl.allocate_shared_memory(gl.int64, [JOBS, 1], BARRIER)
    spent = gl.allocate_shared_memory(gl.int64, [JOBS, 1], BARRIER)
    near = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    words = gl.allocate_shared_memory(gl.int32, [PLACES, WORDS], _words_layout(HOW))
    full = gl.allocate_shared_memory(gl.int64, [HOW.stages, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [HOW.stages, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * HOW.loaders + (0 if HOW.tma_scales else 32))
        mbarrier.init(empty.index(i), count=HOW.workers)
    begin_board(told, noted, spent, near, HOW)
    hopper.fence_async_shared()
    ring = (x, more, codes, words, full, empty)
    board = (jobs, (slots, weights, weights), told, noted, near, spent, told)
    order = (board, SORTED, WEIGHTS, WEIGHTS, TILES, COUNTER, count, (_steps(K, HOW), row_tiles, 1))
    if HOW.splits:
        order += (splits, T)
    if HOW.workers == 2:
        gl.warp_specialize(
            [
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 0, DTYPE, HOW)),
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 1, DTYPE, HOW)),
                (_token_loader, (ring, board, X, SORTED, K, KX, HOW)),
                (_weight_loader, (ring, board, CODES, S, Z, N, K, HOW)),
                (tile_scheduler, (order, HOW)),
            ],
            [4, HOW.loaders, 1, 1],
            [HOW.registers[0], HOW.registers[1], HOW.registers[1], HOW.registers[1]],
        )
    elif HOW.workers == 3:
        gl.warp_specialize(
            [
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 0, DTYPE, HOW)),
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 1, DTYPE, HOW)),
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 2, DTYPE, HOW)),
                (_token_loader, (ring, board, X, SORTED, K, KX, HOW)),
                (_weight_loader, (ring, board, CODES, S, Z, N, K, HOW)),
                (tile_scheduler, (order, HOW)),
            ],
            [4, 4, HOW.loaders, 1, 1],
            [
                HOW.registers[0], HOW.registers[0],
                HOW.registers[1], HOW.registers[1], HOW.registers[1],
            ],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 0, DTYPE, HOW)),
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 1, DTYPE, HOW)),
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 2, DTYPE, HOW)),
                (_worker, (ring, board, Y, B, F, N, K, NX, alpha, limit, 3, DTYPE, HOW)),
                (_token_loader, (ring, board, X, SORTED, K, KX, HOW)),
                (_weight_loader, (ring, board, CODES, S, Z, N, K, HOW)),
                (tile_scheduler, (order, HOW)),
            ],
            [4, 4, 4, HOW.loaders, 1, 1],
            [
                HOW.registers[0], HOW.registers[0], HOW.registers[0],
                HOW.registers[1], HOW.registers[1], HOW.registers[1],
            ],
        )  # fmt: skip

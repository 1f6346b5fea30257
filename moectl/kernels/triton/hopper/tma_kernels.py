# mypy: ignore-errors
"""Device code of the kernel family `tma`: warp-specialized grouped GEMMs on weights stored row by row.

Programs are persistent. A tile is 64 or 128 weight rows per worker by the tokens of one expert. One warp
takes tiles and tells the others (`tile_board`). Two producer partitions fill a ring in shared memory, one
with weight rows (by TMA), one with token rows (gathered by cp.async); the workers (consumer warpgroups)
multiply them where they are, both operands of wgmma in shared memory. TMA brings gate and up rows in the
order that the epilogue needs, eight and eight, and zeros past the end of a matrix in rows and columns.

A tile has as many token columns as its tokens need: one of ``HOW.widths``, each a branch of the kernel. If
``HOW.turned``, tokens are the rows of products, 64 of each, and 128 weight rows their columns.

``N`` are the rows of a weight matrix, ``steps`` the steps of the ring over its columns, ``KX`` the bytes of a
token, ``NX`` the columns of the output. `HOW` is a `tma.TmaVariant`, which has all compile-time parameters.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import reinterpret
from .mid_loader import _width
from .tile_board import (
    _cached,
    begin_board,
    noted_of,
    notes_of,
    tile_again,
    tile_scheduler,
    tile_told,
    tokens_scaled_at_end,
)
from .tma_epilogue import _biases, _row_scales, _store_block, _store_codes, _store_turned
from .tma_loader import (
    arrivals,
    batch_rows,
    in_blocks,
    in_groups,
    scale_halves,
    token_lines,
    token_loader,
    weight_loader,
)
from .tma_products import (
    blocks_of,
    decoded_product,
    first_row,
    first_token,
    meet_for_turn,
    product,
    promoted_product,
    takes_turns,
)


@gluon.constexpr_function
def _reads_again(HOW):
    """Whether a worker reads what its epilogue needs of a tile after the products, which need registers."""
    return in_groups(HOW) and HOW.widths[-1] * HOW.blocks_m == 128


@gluon.jit
def _of_rows(S, B, expert, block, N, HOW: gl.constexpr):
    """The biases and the scales of a worker's row blocks, from number `block` on."""
    BLOCKS: gl.constexpr = HOW.blocks_m
    biases = ()
    factors = ()
    for b in gl.static_range(BLOCKS):
        biases += (_biases(B, expert, block + b, N, HOW),)
        factors += (_row_scales(S, expert, block + b, N, HOW),)
    return biases, factors


@gluon.jit
def _worker(work, ME: gl.constexpr, HOW: gl.constexpr):
    """The products and the epilogue of a worker's row blocks of each of the program's tiles."""
    ring, board, Y, YS, B, S, N, steps, NX, alpha, limit = work
    WIDTHS: gl.constexpr = len(HOW.widths)
    _jobs, notes, _told, noted, _near, spent, met = board
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    meeting = gl.to_tensor(0)
    if takes_turns(HOW) and ME == 1:
        meet_for_turn("arrive", 0)
    job = 0
    expert, first, tokens, nt = tile_told(board, job, 4, HOW)
    while tokens >= 0:
        at = job % HOW.jobs
        own = (notes[0].index(at), notes[1].index(at), notes[2].index(at))
        block = (nt * HOW.workers + ME) * HOW.blocks_m
        biases, factors = (), ()
        if not HOW.turned and not _reads_again(HOW):
            biases, factors = _of_rows(S, B, expert, block, N, HOW)
        for i in gl.static_range(WIDTHS):
            if (tokens > _width(i - 1, HOW)) & (tokens <= _width(i, HOW)):
                if HOW.decodes:
                    acc, stage, phase = decoded_product(ring, stage, phase, steps, _width(i, HOW), ME, HOW)
                elif HOW.promoted:
                    acc, stage, phase = promoted_product(ring, stage, phase, steps, _width(i, HOW), ME, HOW)
                else:
                    acc, stage, phase = product(ring, stage, phase, steps, _width(i, HOW), ME, HOW)
                of_rows = (biases, factors)
                if _reads_again(HOW):
                    expert, first, tokens, nt = tile_again(board, job, 4, HOW)
                    block = (nt * HOW.workers + ME) * HOW.blocks_m
                    of_rows = _of_rows(S, B, expert, block, N, HOW)
                if noted_of(HOW):
                    mbarrier.wait(noted.index(at), (job // HOW.jobs) & 1)
                if HOW.codes != "none":
                    meeting = _store_codes(
                        acc, own[1], met, meeting, Y, YS, nt, first, tokens, NX, alpha, limit,
                        _width(i, HOW), ME, HOW,
                    )  # fmt: skip
                else:
                    for b in gl.static_range(blocks_of(_width(i, HOW), HOW)):
                        if HOW.turned:
                            row = nt * (64 * HOW.workers * HOW.blocks_m)
                            row += first_row(b, _width(i, HOW), ME, HOW)
                            if b == 0 or row < N:
                                _store_turned(
                                    acc, own, Y, row, tokens, NX, b, first_token(_width(i, HOW), ME, HOW), HOW
                                )  # fmt: skip
                        elif (block + b) * 64 < N:
                            _store_block(
                                acc, own, Y, of_rows[1][b], of_rows[0][b], block + b, first, tokens, NX,
                                alpha, limit, b, _width(i, HOW), HOW,
                            )  # fmt: skip
        mbarrier.arrive(spent.index(at), count=1)
        job += 1
        expert, first, tokens, nt = tile_told(board, job, 4, HOW)
    if takes_turns(HOW) and ME == 0:
        meet_for_turn("sync", 0)


@gluon.jit(do_not_specialize=["row_tiles", "group_m", "steps", "bound"])
def _rows_gemm_kernel(
    X, COPIES, XS, ROWS, S, B, Y, YS, SORTED, TILES, COUNT, COUNTER, WEIGHTS,
    N, steps, KX, NX, row_tiles, group_m, bound, alpha, limit,
    HOW: gl.constexpr,
):  # fmt: skip
    """Y ``[T, NX]``: activations by position (stage 1), as codes with scales YS or in 16 bits; or results by
    slot, times router weights if weighted."""
    STAGES: gl.constexpr = HOW.stages
    BLOCKS: gl.constexpr = HOW.workers * HOW.blocks_m
    PIECES: gl.constexpr = HOW.stages * HOW.depth
    TOKENS: gl.constexpr = HOW.widths[-1]
    NOTES: gl.constexpr = notes_of(HOW)
    BATCH: gl.constexpr = batch_rows(HOW)
    PLACES: gl.constexpr = PIECES * (64 * BLOCKS + TOKENS * token_lines(HOW)) // BATCH
    # The largest array is at the start of shared memory, from where products address it: first the weight
    # rows of all stages, then the tokens.
    tokens = gl.allocate_shared_memory(gl.uint8, [PLACES, BATCH, 128], gl.NVMMASharedLayout(128, 8, 2))
    rows = reinterpret(tokens, gl.uint8, [PIECES, 1, 4 * BLOCKS, 2, 8, 128], gl.NVMMASharedLayout(128, 8, 5))
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    JOBS: gl.constexpr = HOW.jobs
    slots = gl.allocate_shared_memory(gl.int32, [JOBS, NOTES], LINE)
    weights = gl.allocate_shared_memory(gl.float32, [JOBS, NOTES], LINE)
    token_scales = weights
    if tokens_scaled_at_end(HOW):
        token_scales = gl.allocate_shared_memory(gl.float32, [JOBS, NOTES], LINE)
    jobs = gl.allocate_shared_memory(gl.int32, [4 * JOBS, 1], LINE)
    told = gl.allocate_shared_memory(gl.int64, [JOBS, 1], BARRIER)
    # Not allocated without use: Triton gives the memory of a barrier that nothing waits for or arrives at to
    # what partitions capture, and its initialization may come after the value is written.
    noted = told
    if noted_of(HOW):
        noted = gl.allocate_shared_memory(gl.int64, [JOBS, 1], BARRIER)
    met = told
    if HOW.codes != "none":
        met = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    spent = gl.allocate_shared_memory(gl.int64, [JOBS, 1], BARRIER)
    near = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    scales = weights
    if in_blocks(HOW):
        scales = gl.allocate_shared_memory(gl.float32, [2 * PIECES, NOTES], LINE)
    if in_groups(HOW):
        HALVES: gl.constexpr = scale_halves(HOW)
        BOX: gl.constexpr = gl.NVMMASharedLayout(0, S.dtype.primitive_bitwidth, 4)
        SHAPE: gl.constexpr = [HOW.stages, 1, 2 * HOW.depth, HALVES, 64 * BLOCKS // HALVES]
        scales = gl.allocate_shared_memory(S.dtype, SHAPE, BOX)
    places = slots
    if HOW.shares_rows:
        places = gl.allocate_shared_memory(gl.int32, [NOTES], LINE)
    full = gl.allocate_shared_memory(gl.int64, [HOW.stages, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [HOW.stages, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=arrivals(HOW))
        mbarrier.init(empty.index(i), count=HOW.workers)
    begin_board(told, noted, spent, near, HOW)
    if HOW.codes != "none":
        mbarrier.init(met.index(0), count=HOW.workers)
    hopper.fence_async_shared()
    if HOW.stage == 1:
        tl.extra.cuda.gdc_wait()
    # The next kernel may start: the tiles that it reads were complete before this kernel began its work.
    tl.extra.cuda.gdc_launch_dependents()
    count = bound
    if not HOW.experts:
        count = gl.load(COUNT, cache_modifier=_cached(HOW))
    ring = (rows, tokens, scales, full, empty)
    board = (jobs, (slots, weights, token_scales), told, noted, near, spent, met)
    work = (ring, board, Y, YS, B, S, N, steps, NX, alpha, limit)
    gather = (ring, board, places, X, COPIES, XS, S, SORTED, N, steps, KX)
    stream = (ring, board, ROWS, steps)
    if in_groups(HOW):
        stream += (S,)
    order = (board, SORTED, WEIGHTS, XS, TILES, COUNTER, count, (steps, row_tiles, group_m))
    if HOW.workers == 1:
        gl.warp_specialize(
            [
                (_worker, (work, 0, HOW)),
                (token_loader, (gather, HOW)),
                (weight_loader, (stream, HOW)),
                (tile_scheduler, (order, HOW)),
            ],
            [HOW.loaders, 1, 1],
            [HOW.registers[1], HOW.registers[2], HOW.registers[2]],
        )
    else:
        gl.warp_specialize(
            [
                (_worker, (work, 0, HOW)),
                (_worker, (work, 1, HOW)),
                (token_loader, (gather, HOW)),
                (weight_loader, (stream, HOW)),
                (tile_scheduler, (order, HOW)),
            ],
            [4, HOW.loaders, 1, 1],
            [HOW.registers[0], HOW.registers[1], HOW.registers[2], HOW.registers[2]],
        )

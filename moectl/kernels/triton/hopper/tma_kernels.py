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

from .decoded_wgmma import decoded, decoded_finished, decoded_issued, lane_place
from .gluon_compat import reinterpret
from .mid_loader import _next, _width
from .prefill_tiles import _mma
from .shared_wgmma import await_all_but_last, step_issued, step_zeros, steps_finished, unit_of, units_of
from .tile_board import (
    FIRST_TURN,
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
    piece_bytes,
    scale_halves,
    token_bytes,
    token_lines,
    token_loader,
    two_scales,
    weight_loader,
    zero_of_lanes,
)


@gluon.jit
def _product(ring, stage, phase, steps, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr):
    """Accumulators of a tile's one or two row blocks over all columns, and the ring position after it.

    A step's products are in flight while the next step is awaited and issued.
    """
    PIECE: gl.constexpr = piece_bytes(HOW)
    TOKENS: gl.constexpr = token_bytes(HOW)
    OWN: gl.constexpr = ME * HOW.blocks_m * 64 * 128
    FIRST: gl.constexpr = HOW.stages * HOW.depth * PIECE
    BLOCKS: gl.constexpr = HOW.blocks_m
    DEPTH: gl.constexpr = HOW.depth
    KIND: gl.constexpr = HOW.kind
    _rows, _tokens, _scales, full, empty = ring
    acc = step_zeros(WIDTH, BLOCKS, KIND)
    for step in range(steps):
        _await(full, stage, phase, HOW)
        rows = stage * (DEPTH * PIECE) + OWN
        tokens = stage * (DEPTH * TOKENS) + FIRST
        acc = step_issued(rows, tokens, acc, WIDTH, BLOCKS, DEPTH, PIECE, TOKENS, KIND, False)
        await_all_but_last()
        mbarrier.arrive(empty.index(_before(stage, HOW)), count=1, pred=step > 0)
        stage, phase = _next(stage, phase, HOW)
    acc = steps_finished(acc, 0, WIDTH, BLOCKS, KIND)
    mbarrier.arrive(empty.index(_before(stage, HOW)), count=1)
    return acc, stage, phase


@gluon.jit
def _before(stage, HOW: gl.constexpr):
    """The stage before `stage`. A variable of the loop that keeps the last one would not do: Triton 3.6 takes
    a name that is assigned the value which it had at first, that of `stage`, for one that never changes."""
    return gl.where(stage == 0, HOW.stages, stage) - 1


@gluon.jit
def _await(full, stage, phase, HOW: gl.constexpr, there=True):
    """Wait until a stage is filled, if it is `there`: cp.async writes tokens through the generic proxy, wgmma
    reads through the async one."""
    mbarrier.wait(full.index(stage), phase, pred=there)
    if not HOW.copied:
        hopper.fence_async_shared()


@gluon.constexpr_function
def _two_at_once(WIDTH, HOW):
    """Whether the registers of a worker hold sums of two pieces besides its accumulators."""
    return WIDTH // 2 * (HOW.blocks_m + 2) + 56 <= HOW.registers[0]


@gluon.constexpr_function
def columns_of(WIDTH, HOW):
    """Columns of a product of a tile of WIDTH tokens: its tokens, or weight rows if products are turned."""
    return 128 if HOW.turned else WIDTH


@gluon.constexpr_function
def blocks_of(WIDTH, HOW):
    """Products of a worker for each piece: of its row blocks, or if turned for every 128 weight rows."""
    return WIDTH // 64 if HOW.turned else HOW.blocks_m


@gluon.constexpr_function
def first_row(BLOCK, WIDTH, ME, HOW):
    """The first weight row of a worker's product number BLOCK. Turned, workers share out weight rows if there
    are no more than 64 tokens, otherwise the tokens."""
    if HOW.turned:
        return 128 * (BLOCK if WIDTH == 128 else ME)
    return 64 * (ME * HOW.blocks_m + BLOCK)


@gluon.constexpr_function
def first_token(WIDTH, ME, HOW):
    """The first token of a worker's products."""
    return 64 * ME if HOW.turned and WIDTH == 128 else 0


@gluon.jit
def _piece_issued(
    stage, TURN: gl.constexpr, LEAD: gl.constexpr, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Issues the products of turn TURN of a stage: 128 columns (a piece) of one row block. With LEAD the
    first of them can be awaited alone."""
    PIECE: gl.constexpr = piece_bytes(HOW)
    TOKENS: gl.constexpr = token_bytes(HOW)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, HOW)
    PART: gl.constexpr = TURN // BLOCKS
    ROWS: gl.constexpr = PART * PIECE + first_row(TURN % BLOCKS, WIDTH, ME, HOW) * 128
    FIRST: gl.constexpr = HOW.stages * HOW.depth * PIECE + PART * TOKENS + first_token(WIDTH, ME, HOW) * 128
    KIND: gl.constexpr = HOW.kind
    COLUMNS: gl.constexpr = columns_of(WIDTH, HOW)
    rows = stage * (HOW.depth * PIECE) + ROWS
    tokens = stage * (HOW.depth * TOKENS) + FIRST
    if HOW.turned:
        made = step_issued(tokens, rows, (), COLUMNS, 1, 1, PIECE, TOKENS, KIND, True, LEAD)
    else:
        made = step_issued(rows, tokens, (), COLUMNS, 1, 1, PIECE, TOKENS, KIND, True, LEAD)
    return made


@gluon.jit
def _turned_scales(
    scales, stage, TURN: gl.constexpr, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Factors of the sums of turn TURN of turned products: scales of rows times those of tokens."""
    TOKEN: gl.constexpr = first_token(WIDTH, ME, HOW)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, HOW)
    M: gl.constexpr = _mma(16)
    place = (stage * HOW.depth + TURN // BLOCKS) * 2
    if two_scales(HOW):
        gates = scales.index(place).slice(TOKEN, 64).load(gl.SliceLayout(1, M))
        ups = scales.index(place + 1).slice(TOKEN, 64).load(gl.SliceLayout(1, M))
        up = gl.arange(0, 16, layout=gl.SliceLayout(0, M)) // 8 == 1
        factor = gl.where(gl.expand_dims(up, 0), gl.expand_dims(ups, 1), gl.expand_dims(gates, 1))
    else:
        HALF: gl.constexpr = first_row(TURN % BLOCKS, WIDTH, ME, HOW) // 128
        factor = gl.expand_dims(scales.index(place + HALF).slice(TOKEN, 64).load(gl.SliceLayout(1, M)), 1)
    return factor


@gluon.jit
def _added(
    acc, part, factor, scales, stage,
    TURN: gl.constexpr, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """The accumulators plus the sums of turn TURN, times the scales of its rows and tokens."""
    UNITS: gl.constexpr = units_of(columns_of(WIDTH, HOW))
    UNIT: gl.constexpr = unit_of(columns_of(WIDTH, HOW))
    BLOCKS: gl.constexpr = blocks_of(WIDTH, HOW)
    BLOCK: gl.constexpr = TURN % BLOCKS
    M: gl.constexpr = _mma(UNIT)
    made = ()
    place = (stage * HOW.depth + TURN // BLOCKS) * 2
    if HOW.turned:
        for i in gl.static_range(UNITS):
            made += (acc[BLOCK * UNITS + i] + part[i] * factor,)
    elif in_blocks(HOW):
        for i in gl.static_range(UNITS):
            if two_scales(HOW):
                gates = scales.index(place).slice(i * UNIT, UNIT).load(gl.SliceLayout(0, M))
                ups = scales.index(place + 1).slice(i * UNIT, UNIT).load(gl.SliceLayout(0, M))
                up = gl.arange(0, 64, layout=gl.SliceLayout(1, M)) // 8 % 2 == 1
                factor = gl.where(gl.expand_dims(up, 1), gl.expand_dims(ups, 0), gl.expand_dims(gates, 0))
            else:
                of_tokens = scales.index(place + ME).slice(i * UNIT, UNIT)
                factor = gl.expand_dims(of_tokens.load(gl.SliceLayout(0, M)), 0)
            made += (acc[BLOCK * UNITS + i] + part[i] * factor,)
    else:
        for i in gl.static_range(UNITS):
            made += (acc[BLOCK * UNITS + i] + part[i],)
    return acc[: BLOCK * UNITS] + made + acc[(BLOCK + 1) * UNITS :]


MOST_LAG = 1
"""The largest `_lag`; by a simulation two steps need a ring of four stages."""


@gluon.constexpr_function
def _lag(HOW):
    """Steps by which the second worker of turned products is behind the first: each has the tensor cores to
    itself for so many while the other one is in its epilogue. The ring needs two stages more: the first
    worker awaits a step ahead of its own, and the second gives stages back only as it gets turns."""
    return max(0, min(MOST_LAG, HOW.stages - 2)) if HOW.turned else 0


@gluon.constexpr_function
def _turn_asm(ACTION, WHOSE, ALWAYS):
    """Two warpgroups meet at a barrier of the hardware: one arrives, the other waits for that."""
    meet = f"bar.{ACTION} {FIRST_TURN + WHOSE}, 256;"
    if ALWAYS:
        return f"{meet} mov.u32 $0, 0;"
    return "{ .reg .pred taken; setp.ne.s32 taken, $1, 0; @taken " + meet + " mov.u32 $0, 0; }"


@gluon.jit
def _turn(ACTION: gl.constexpr, WHOSE: gl.constexpr):
    """Awaits (``sync``) or gives (``arrive``) the turn of worker WHOSE to use the tensor cores."""
    ASM: gl.constexpr = _turn_asm(ACTION, WHOSE, True)
    gl.inline_asm_elementwise(ASM, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _turn_if(taken, ACTION: gl.constexpr, WHOSE: gl.constexpr, HOW: gl.constexpr):
    """`_turn` if it is `taken`, which all turns are if workers are not `_lag` steps apart."""
    if _lag(HOW):
        ASM: gl.constexpr = _turn_asm(ACTION, WHOSE, False)
        gl.inline_asm_elementwise(ASM, "=r,r", [taken.to(gl.int32)], gl.int32, is_pure=False, pack=1)
    else:
        _turn(ACTION, WHOSE)


@gluon.jit
def _promoted_product(
    ring, stage, phase, steps, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """`_product` whose sums of 128 columns are added up outside of the tensor cores, which sum FP8 products
    with fewer bits than fp32. While one sum is added, the next is computed, here or by the other worker.

    Two workers that read the same stages would otherwise multiply at the same time, and add at the same time
    while the tensor cores idle: they take turns. A turn ends when the first product is done, so that those of
    the other worker are there before the tensor cores idle.
    """
    BLOCKS: gl.constexpr = blocks_of(WIDTH, HOW)
    COLUMNS: gl.constexpr = columns_of(WIDTH, HOW)
    TURNS: gl.constexpr = HOW.depth * BLOCKS
    TWO: gl.constexpr = TURNS > 1 and _two_at_once(COLUMNS, HOW)
    ALTERNATE: gl.constexpr = HOW.workers == 2 and not TWO and COLUMNS >= 64
    # The next stage is awaited while the last products but one of this stage are in flight; later that would
    # hold up the next turn. ptxas would spill registers of wider tiles for that, in some layers.
    EARLY: gl.constexpr = TURNS > 1 and not TWO and (HOW.turned or HOW.widths[-1] <= 96)
    LAG: gl.constexpr = _lag(HOW)
    KIND: gl.constexpr = HOW.kind
    _rows, _tokens, scales, full, empty = ring
    acc = step_zeros(COLUMNS, BLOCKS, KIND)
    if EARLY:
        _await(full, stage, phase, HOW)
    for step in range(steps):
        after, phase_after = _next(stage, phase, HOW)
        factor = 1.0
        # The first worker is alone in a tile's first steps, the second in its last ones.
        taken = step >= LAG if ME == 0 else step < steps - LAG
        if not EARLY:
            _await(full, stage, phase, HOW)
        if ALTERNATE:
            _turn_if(taken, "sync", ME, HOW)
        part = _piece_issued(stage, 0, ALTERNATE, WIDTH, ME, HOW)
        for turn in gl.static_range(TURNS):
            # Gates and ups have the same scales in all products of a piece.
            if HOW.turned and (turn % BLOCKS == 0 or not two_scales(HOW)):
                factor = _turned_scales(scales, stage, turn, WIDTH, ME, HOW)
            if TWO and turn + 1 < TURNS:
                coming = _piece_issued(stage, turn + 1, False, WIDTH, ME, HOW)
                part = steps_finished(part, 1, COLUMNS, 1, KIND)
            else:
                if ALTERNATE:
                    await_all_but_last()
                    _turn_if(taken, "arrive", 1 - ME, HOW)
                if EARLY and turn + 2 == TURNS:
                    _await(full, after, phase_after, HOW, step + 1 < steps)
                part = steps_finished(part, 0, COLUMNS, 1, KIND)
            acc = _added(acc, part, factor, scales, stage, turn, WIDTH, ME, HOW)
            if turn + 1 < TURNS:
                if ALTERNATE:
                    _turn_if(taken, "sync", ME, HOW)
                part = coming if TWO else _piece_issued(stage, turn + 1, ALTERNATE, WIDTH, ME, HOW)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = after, phase_after
    return acc, stage, phase


@gluon.constexpr_function
def _takes_turns(HOW):
    """Whether the two workers take turns to use the tensor cores (`_promoted_product`)."""
    return HOW.promoted and HOW.workers == 2 and not HOW.decodes


@gluon.constexpr_function
def decodes_early(HOW):
    """Whether the next operand is decoded while the last one is multiplied. Tiles with many sums of two kinds
    lack the registers, and have two workers: one decodes and adds while the other multiplies."""
    return not (in_groups(HOW) and HOW.widths[-1] >= 64)


@gluon.jit
def _group_scale(scales, stage, HALF: gl.constexpr, ME: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr):
    """The scales of a row block for half number HALF of a stage's columns, 128 of them."""
    PIECE: gl.constexpr = HALF // 2 // HOW.blocks_m
    ROW: gl.constexpr = first_row(HALF // 2 % HOW.blocks_m, WIDTH, ME, HOW)
    HALVES: gl.constexpr = scale_halves(HOW)
    ROWS: gl.constexpr = 64 * HOW.workers * HOW.blocks_m
    GROUPS: gl.constexpr = 2 * HOW.depth
    made = scales.index(stage)
    if HALVES == 2:
        made = made.reshape([GROUPS, 2, ROWS // 16, 8]).permute([0, 2, 1, 3])
    made = made.reshape([GROUPS * ROWS]).slice((2 * PIECE + HALF % 2) * ROWS + ROW, 64)
    return made.load(gl.SliceLayout(1, _mma(unit_of(WIDTH)))).to(gl.float32)


@gluon.jit
def _half_decoded(
    lane, scales, stage, zero, HALF: gl.constexpr, ME: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """The operand of half number HALF of a stage's pieces, and if there are scales of groups, those of its
    sums, else `zero`.

    Codes wait for scales in groups: a load in flight when the stage is given back may be queued behind the
    loaders' cp.async until the next scales have come.
    """
    BLOCKS: gl.constexpr = HOW.blocks_m
    KIND: gl.constexpr = HOW.kind
    PIECE: gl.constexpr = piece_bytes(HOW)
    OWN: gl.constexpr = ME * BLOCKS * 64 * 128
    PLACE: gl.constexpr = HALF // 2 // BLOCKS * PIECE + HALF // 2 % BLOCKS * (64 * 128)
    rows = stage * (HOW.depth * PIECE) + OWN
    rows += PLACE
    if in_groups(HOW):
        scale = _group_scale(scales, stage, HALF, ME, WIDTH, HOW)
        zeros = (scale.to(gl.int32, bitcast=True) & zero,)
    else:
        scale = zero
        zeros = ()
    return decoded(lane, rows, zeros, HALF % 2, WIDTH, KIND), scale


@gluon.jit
def _added_group(acc, part, scale, BLOCK: gl.constexpr, WIDTH: gl.constexpr):
    """The accumulators plus the int32 sums of row block BLOCK, times a scale of each row."""
    UNITS: gl.constexpr = units_of(WIDTH)
    made = ()
    for i in gl.static_range(UNITS):
        made += (acc[BLOCK * UNITS + i] + part[i].to(gl.float32) * gl.expand_dims(scale, 1),)
    return acc[: BLOCK * UNITS] + made + acc[(BLOCK + 1) * UNITS :]


@gluon.jit
def _decoded_product(
    ring, stage, phase, steps, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """`_product` of weights that are decoded to the dtype of the tokens, half a piece of a row block at a
    time: the next ones while those before are multiplied. With scales in blocks or groups, sums of 128
    columns, a piece of FP8 or half a piece of INT4, are multiplied by them and added up outside of the tensor
    cores.
    """
    TOKENS: gl.constexpr = token_bytes(HOW)
    FIRST: gl.constexpr = HOW.stages * HOW.depth * piece_bytes(HOW)
    BLOCKS: gl.constexpr = HOW.blocks_m
    DEPTH: gl.constexpr = HOW.depth
    KIND: gl.constexpr = HOW.kind
    UNITS: gl.constexpr = units_of(WIDTH)
    HALVES: gl.constexpr = 2 * HOW.depth * HOW.blocks_m
    IN_GROUPS: gl.constexpr = in_groups(HOW)
    EARLY: gl.constexpr = decodes_early(HOW)
    _rows, _tokens, scales, full, empty = ring
    lane = lane_place(KIND)
    zero = zero_of_lanes(steps)
    acc = step_zeros(WIDTH, BLOCKS, "fp8")
    part = step_zeros(WIDTH, 1, KIND)
    if EARLY:
        _await(full, stage, phase, HOW)
        a, scale = _half_decoded(lane, scales, stage, zero, 0, ME, WIDTH, HOW)
    for step in range(steps):
        after, phase_after = _next(stage, phase, HOW)
        if not EARLY:
            _await(full, stage, phase, HOW)
        for half in gl.static_range(HALVES):
            if not EARLY:
                a, scale = _half_decoded(lane, scales, stage, zero, half, ME, WIDTH, HOW)
            tokens = stage * (DEPTH * TOKENS) + FIRST
            tokens += half // 2 // BLOCKS * TOKENS + half % 2 * (TOKENS // 2)
            if not HOW.promoted:
                sums = acc[half // 2 % BLOCKS * UNITS : (half // 2 % BLOCKS + 1) * UNITS]
                part = decoded_issued(a, tokens, sums, WIDTH, KIND, False)
            elif IN_GROUPS and BLOCKS == 2:
                part = decoded_issued(a, tokens, part, WIDTH, KIND, True)
            elif half % 2 == 0 or IN_GROUPS:
                part = decoded_issued(a, tokens, (), WIDTH, KIND, True)
            else:
                part = decoded_issued(a, tokens, part, WIDTH, KIND, False)
            scale_now = scale
            coming = ()
            if not EARLY:
                pass
            elif half + 1 < HALVES:
                coming, scale = _half_decoded(lane, scales, stage, zero, half + 1, ME, WIDTH, HOW)
            else:
                _await(full, after, phase_after, HOW, step + 1 < steps)
                # After the last step this stage again, as nothing else may be read.
                there = gl.where(step + 1 < steps, after, stage)
                coming, scale = _half_decoded(lane, scales, there, zero, 0, ME, WIDTH, HOW)
            part, ready = decoded_finished(part, a, coming, EARLY, WIDTH, KIND)
            if EARLY:
                a = ready
            if not HOW.promoted:
                acc = acc[: half // 2 % BLOCKS * UNITS] + part + acc[(half // 2 % BLOCKS + 1) * UNITS :]
            elif IN_GROUPS:
                acc = _added_group(acc, part, scale_now, half // 2 % BLOCKS, WIDTH)
            elif half % 2 == 1:
                acc = _added(acc, part, 1.0, scales, stage, half // 2, WIDTH, ME, HOW)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = after, phase_after
    return acc, stage, phase


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
    if _takes_turns(HOW) and ME == 1:
        _turn("arrive", 0)
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
                    acc, stage, phase = _decoded_product(ring, stage, phase, steps, _width(i, HOW), ME, HOW)
                elif HOW.promoted:
                    acc, stage, phase = _promoted_product(ring, stage, phase, steps, _width(i, HOW), ME, HOW)
                else:
                    acc, stage, phase = _product(ring, stage, phase, steps, _width(i, HOW), ME, HOW)
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
    if _takes_turns(HOW) and ME == 0:
        _turn("sync", 0)


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
    order = (board, SORTED, WEIGHTS, XS, TILES, COUNTER, count, steps, row_tiles, group_m)
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

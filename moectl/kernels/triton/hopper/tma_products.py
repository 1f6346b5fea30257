# mypy: ignore-errors
"""Products of a tile of `tma_kernels`: a worker's row blocks by the tile's tokens, over all columns.

Stages of the ring are multiplied as they are filled: both operands in shared memory (`product`, and
`promoted_product`, whose sums are added up outside of the tensor cores), or with weights that are decoded
into registers (`decoded_product`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .decoded_wgmma import decoded, decoded_finished, decoded_issued, lane_place
from .mid_loader import _next
from .prefill_tiles import _mma
from .shared_wgmma import await_all_but_last, step_issued, step_zeros, steps_finished, unit_of, units_of
from .tile_board import FIRST_TURN
from .tma_loader import (
    in_blocks,
    in_groups,
    piece_bytes,
    scale_halves,
    scales_apart,
    token_bytes,
    two_scales,
    zero_of_lanes,
)


@gluon.jit
def product(ring, stage, phase, steps, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr):
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
def _row_factors(pair, M: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr):
    """The scales of a worker's rows, one for all or ``[64, 1]``, of the two of a piece (`scales_apart`)."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if two_scales(HOW):
        up = gl.arange(0, 64, layout=gl.SliceLayout(1, M)) // 8 % 2 == 1
        gates, ups = gl.max(pair.slice(0, 1).load(L), 0), gl.max(pair.slice(1, 1).load(L), 0)
        scale = gl.expand_dims(gl.where(up, ups, gates), 1)
    else:
        scale = gl.max(pair.slice(ME, 1).load(L), 0)
    return scale


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
    elif scales_apart(HOW):
        weights = _row_factors(scales.index(place + 1), M, ME, HOW)
        for i in gl.static_range(UNITS):
            factor = weights
            if HOW.token_scales != "none":
                of_tokens = scales.index(place).slice(i * UNIT, UNIT).load(gl.SliceLayout(0, M))
                factor = gl.expand_dims(of_tokens, 0) * weights
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
def meet_for_turn(ACTION: gl.constexpr, WHOSE: gl.constexpr):
    """Awaits (``sync``) or gives (``arrive``) the turn of worker WHOSE to use the tensor cores."""
    ASM: gl.constexpr = _turn_asm(ACTION, WHOSE, True)
    gl.inline_asm_elementwise(ASM, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _turn_if(taken, ACTION: gl.constexpr, WHOSE: gl.constexpr, HOW: gl.constexpr):
    """`meet_for_turn` if it is `taken`, which all turns are if workers are not `_lag` steps apart."""
    if _lag(HOW):
        ASM: gl.constexpr = _turn_asm(ACTION, WHOSE, False)
        gl.inline_asm_elementwise(ASM, "=r,r", [taken.to(gl.int32)], gl.int32, is_pure=False, pack=1)
    else:
        meet_for_turn(ACTION, WHOSE)


@gluon.jit
def promoted_product(
    ring, stage, phase, steps, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """`product` whose sums of 128 columns are added up outside of the tensor cores, which sum FP8 products
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
def takes_turns(HOW):
    """Whether the two workers take turns to use the tensor cores (`promoted_product`)."""
    return HOW.promoted and HOW.workers == 2 and not HOW.decodes


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
def decoded_product(
    ring, stage, phase, steps, WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """`product` of weights that are decoded to the dtype of the tokens, half a piece of a row block at a
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
    EARLY: gl.constexpr = HOW.ahead
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
                # After the last step this stage again, as nothing else may be read; it is not used.
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

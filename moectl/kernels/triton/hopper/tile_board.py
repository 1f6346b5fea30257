# mypy: ignore-errors
"""Which tiles a program of `mid_kernels` or `tma_kernels` computes, and what their epilogues need to know.

One warp, the scheduler, takes tiles, mostly from a counter. It tells the other partitions by a board in
shared memory, which has room for ``HOW.jobs`` tiles and consists of

- ``jobs``: the expert of a tile, its first position, its tokens plus one, and its row tile, word by word: in
  one store, ptxas would spill a lane's address, which it computes before partitions begin; where a GEMM may
  be split along K, also the first step of the tile's part, its steps, and where its results go
  (`part_told`);
- ``notes``: slots, router weights and scales of the tokens of a tile; workers that quantize, and need no
  router weights, exchange the largest numbers of tokens in their place;
- barriers: ``told`` and ``noted``, by which the scheduler says that a job and its notes, if it has any, are
  there, ``spent``, by which the others say that they need neither any more, ``near``, that a tile's last
  steps begin, and ``met``, that both workers have put their largest numbers on the board.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .prefill_tiles import _placed

AHEAD = gl.constexpr(8)
"""Steps before the end of a tile at which the next one is taken, so that it is known when its first weights
can be copied."""

SCHEDULER_MEETS, LOADER_MEETS, FIRST_TURN = gl.constexpr(12), gl.constexpr(13), 14
"""Barriers of the hardware that are used by PTX, as Triton numbers its own from 0: threads of the scheduler
and of the weight loader meet at one each, and each of two workers awaits its turn at one."""


@gluon.constexpr_function
def _cached(HOW):
    """Cache modifier for the schedule: stage 2 reads it early, when L1 may still hold an earlier call's."""
    return ".cg" if HOW.stage == 2 else ""


@gluon.constexpr_function
def job_words(HOW):
    """Words of a tile in ``jobs``, a power of two."""
    return 8 if HOW.splits else 4


@gluon.constexpr_function
def notes_of(HOW):
    """Numbers by token of a tile, rounded up to a power of two."""
    return 1 << (HOW.widths[-1] - 1).bit_length()


@gluon.constexpr_function
def scaled_at_end(HOW):
    """Whether sums are multiplied by scales of rows, or a constant, and of tokens if they have any."""
    return HOW.scales in ("channel", "tensor", "group")


@gluon.constexpr_function
def tokens_scaled_at_end(HOW):
    """Whether sums are multiplied by scales of tokens, which are on the board."""
    return scaled_at_end(HOW) and HOW.token_scales != "none"


@gluon.constexpr_function
def notes_slots(HOW):
    """Whether a tile's slots are needed in its epilogue."""
    return HOW.stage == 2 or HOW.weighted or (scaled_at_end(HOW) and HOW.token_scales == "token")


@gluon.constexpr_function
def noted_of(HOW):
    """Whether the epilogue of a tile needs notes, and waits for them."""
    return notes_slots(HOW) or tokens_scaled_at_end(HOW)


@gluon.jit
def begin_board(told, noted, spent, near, HOW: gl.constexpr):
    """Initializes the board's barriers but `met`; both loaders and all workers give a place back."""
    JOBS: gl.constexpr = HOW.jobs
    for i in gl.static_range(JOBS):
        mbarrier.init(told.index(i), count=1)
        if noted_of(HOW):
            mbarrier.init(noted.index(i), count=1)
        mbarrier.init(spent.index(i), count=HOW.workers + 2)
    mbarrier.init(near.index(0), count=1)


@gluon.jit
def slots_of(SORTED, first, place, live, HOW: gl.constexpr):
    """The slots of a tile's tokens: for one token they are the positions."""
    slot = gl.where(live, first + place, 0)
    if not HOW.experts:
        slot = gl.load(SORTED + first + place, mask=live, other=0, cache_modifier=_cached(HOW))
    return slot


@gluon.jit
def _lanes(WARPS: gl.constexpr):
    """The number of each lane of WARPS warps."""
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def _number(numbers, i: gl.constexpr, HOW: gl.constexpr):
    """What lanes i, i + `job_words` and so on hold; it is not negative."""
    lane = gl.arange(0, 32, layout=numbers.type.layout)
    return gl.max(gl.where(lane % job_words(HOW) == i, numbers, 0), 0)


@gluon.constexpr_function
def _meeting_asm(ID):
    return f"bar.sync {ID}, 32; mov.u32 $0, 0;"


@gluon.jit
def warp_meets(ID: gl.constexpr):
    """Threads of a one-warp partition wait for each other at a barrier of the hardware. ptxas may leave out
    the one that Triton has before an arrival at an mbarrier."""
    ASM: gl.constexpr = _meeting_asm(ID)
    gl.inline_asm_elementwise(ASM, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def tile_told(board, job, WARPS: gl.constexpr, HOW: gl.constexpr):
    """(expert, first position, tokens, row tile) of the program's tile number `job`, once they are known.

    After the last tile there are -1 tokens.
    """
    _jobs, _notes, told, _noted, _near, _spent, _met = board
    mbarrier.wait(told.index(job % HOW.jobs), (job // HOW.jobs) & 1)
    return tile_again(board, job, WARPS, HOW)


@gluon.jit
def tile_again(board, job, WARPS: gl.constexpr, HOW: gl.constexpr):
    """`tile_told` of a tile that is on the board."""
    jobs, _notes, _told, _noted, _near, _spent, _met = board
    expert, first = _field(jobs, job, 0, WARPS, HOW), _field(jobs, job, 1, WARPS, HOW)
    tokens, nt = _field(jobs, job, 2, WARPS, HOW), _field(jobs, job, 3, WARPS, HOW)
    return expert, first, tokens - 1, nt


@gluon.jit
def part_told(board, job, WARPS: gl.constexpr, HOW: gl.constexpr):
    """(first step, steps, place) of the program's tile number `job`, which is on the board.

    The place is 0 if the reduction is not split. Otherwise it is 1 plus the rows of the parts before this
    one, by which results are farther down than their slots say.
    """
    jobs, _notes, _told, _noted, _near, _spent, _met = board
    begin, steps = _field(jobs, job, 4, WARPS, HOW), _field(jobs, job, 5, WARPS, HOW)
    return begin, steps, _field(jobs, job, 6, WARPS, HOW)


@gluon.jit
def steps_of(board, job, whole, WARPS: gl.constexpr, HOW: gl.constexpr):
    """The first step and the steps of the program's tile number `job`, which is on the board; a reduction has
    `whole` steps."""
    begin, steps = 0, whole
    if HOW.splits:
        begin, steps, _place = part_told(board, job, WARPS, HOW)
    return begin, steps


@gluon.jit
def _field(jobs, job, i: gl.constexpr, WARPS: gl.constexpr, HOW: gl.constexpr):
    """Number i of the program's tile number `job`."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(jobs.index(job % HOW.jobs * job_words(HOW) + i).load(L), 0)


@gluon.jit
def _looked_up(TILES, tile, total, count, of_all, split, HOW: gl.constexpr):
    """Begins to load what tile number `tile` is, by lanes in the order of ``jobs``; and whether there is one.

    TILES are tiles ``[count, 4]``, or for one token the ids of its experts. Past the last tile there are -1
    tokens, and of an expert id that is out of range 0.
    """
    steps, row_tiles, group_m = of_all
    lane = _lanes(1)
    word = lane % job_words(HOW)
    there = tile < total
    place = gl.minimum(tile, gl.maximum(total - 1, 0))
    if HOW.splits:
        # Parts of a tile follow each other.
        splits, slots = split
        part = place % splits
        place = place // splits
    mt, nt = _placed(place, count, row_tiles, group_m)
    if HOW.experts:
        expert = gl.load(TILES + mt + lane * 0, cache_modifier=_cached(HOW))
        known = (expert >= 0) & (expert < HOW.experts)
        numbers = gl.where(word == 0, gl.where(known, expert, 0), mt)
        numbers = gl.where(word == 2, known.to(gl.int32), numbers)
    else:
        numbers = gl.load(TILES + (mt * 4 + lane % 4), cache_modifier=_cached(HOW))
    numbers = gl.where(word == 2, gl.where(there, numbers + 1, 0), numbers)
    if HOW.splits:
        of_each, more = steps // splits, steps % splits
        numbers = gl.where(word == 4, part * of_each + gl.minimum(part, more), numbers)
        numbers = gl.where(word == 5, of_each + (part < more).to(gl.int32), numbers)
        numbers = gl.where(word == 6, gl.where(splits > 1, part * slots + 1, 0), numbers)
    return gl.where(word == 3, nt, numbers), there


@gluon.jit
def _slots(SORTED, first, tokens, HOW: gl.constexpr):
    """Begins to load the slots of a tile, if they are needed."""
    place = gl.arange(0, notes_of(HOW), layout=gl.BlockedLayout([1], [32], [1], [0]))
    slot = place
    if notes_slots(HOW):
        slot = slots_of(SORTED, first, place, place < tokens, HOW)
    return slot


@gluon.jit
def _note(notes, slot, WEIGHTS, XS, first, tokens, HOW: gl.constexpr):
    """Puts what the epilogue of a tile needs of its tokens on the board."""
    place = gl.arange(0, notes_of(HOW), layout=gl.BlockedLayout([1], [32], [1], [0]))
    live = place < tokens
    if notes_slots(HOW):
        notes[0].store(slot)
    if HOW.weighted:
        notes[1].store(gl.load(WEIGHTS + slot, mask=live, other=0.0, cache_modifier=_cached(HOW)))
    if tokens_scaled_at_end(HOW):
        row = place * 0
        if HOW.token_scales == "token":
            row = slot // HOW.top_k if HOW.stage == 1 else first + place
        notes[2].store(gl.load(XS + row, mask=live, other=0.0, cache_modifier=".cg"))


@gluon.jit
def _tell(board, job, numbers, HOW: gl.constexpr):
    """Puts the program's tile number `job` on the board once there is room for it."""
    jobs, _notes, told, _noted, _near, spent, _met = board
    mbarrier.wait(spent.index(job % HOW.jobs), ((job // HOW.jobs) & 1) ^ 1)
    WORDS: gl.constexpr = 7 if HOW.splits else 4
    for i in gl.static_range(WORDS):
        value = gl.full([1], _number(numbers, i, HOW), gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        jobs.index(job % HOW.jobs * job_words(HOW) + i).store(value)
    warp_meets(SCHEDULER_MEETS)
    mbarrier.arrive(told.index(job % HOW.jobs), count=1)


@gluon.jit
def tile_scheduler(work, HOW: gl.constexpr):
    """Takes tiles for the program and puts them on the board.

    Programs take tiles as late as they can, from a counter, and so begin them in order: tiles of the same
    weights are multiplied at the same time, and find these in L2. If tiles have few steps, or there is one
    for each program at most, and for a single token, a program takes every so many of them. It then looks up
    the tile after the next one, and loads the slots of the next, while it waits for the router's weights.

    `of_all` are the steps of the reduction, row tiles, and token tiles that sweep all of these together; of a
    GEMM that may be split, `work` ends with the number of parts, and of slots.
    """
    board, SORTED, WEIGHTS, XS, TILES, COUNTER, count, of_all = work[:8]
    steps, total = of_all[0], count * of_all[1]
    split = work[8:]
    if HOW.splits:
        total *= split[0]
        steps //= split[0]
    _jobs, notes, _told, noted, near, _spent, _met = board
    programs = gl.num_programs(0)
    late = (steps > AHEAD) & (total > programs)
    tile = gl.program_id(0)
    numbers, there = _looked_up(TILES, tile, total, count, of_all, split, HOW)
    job = 0
    _tell(board, job, numbers, HOW)
    numbers1, there1 = _looked_up(TILES, tile + programs, total, count, of_all, split, HOW)
    slot = _slots(SORTED, _number(numbers, 1, HOW), _number(numbers, 2, HOW) - 1, HOW)
    if tokens_scaled_at_end(HOW) and HOW.stage == 2:
        tl.extra.cuda.gdc_wait()  # for the scales of this GEMM's tokens
    while there:
        first, tokens = _number(numbers, 1, HOW), _number(numbers, 2, HOW) - 1
        # A single token's tiles are never taken late; a branch that is never reached would not compile.
        if HOW.experts or not late:
            slot1 = _slots(SORTED, _number(numbers1, 1, HOW), _number(numbers1, 2, HOW) - 1, HOW)
            tile += programs
            numbers2, there2 = _looked_up(TILES, tile + programs, total, count, of_all, split, HOW)
        else:
            slot = _slots(SORTED, first, tokens, HOW)
            slot1, numbers2, there2 = slot, numbers, there
        if noted_of(HOW):
            at = job % HOW.jobs
            own = (notes[0].index(at), notes[1].index(at), notes[2].index(at))
            _note(own, slot, WEIGHTS, XS, first, tokens, HOW)
            warp_meets(SCHEDULER_MEETS)
            mbarrier.arrive(noted.index(at), count=1)
        if not HOW.experts and late:
            mbarrier.wait(near.index(0), job & 1)
            lane = _lanes(1)
            taken = gl.atomic_add(COUNTER + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")
            after = programs + gl.max(gl.where(lane == 0, taken, 0), 0)
            numbers1, there1 = _looked_up(TILES, after, total, count, of_all, split, HOW)
        numbers, there = numbers1, there1
        numbers1, there1 = numbers2, there2
        slot = slot1
        job += 1
        _tell(board, job, numbers, HOW)

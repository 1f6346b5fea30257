# mypy: ignore-errors
"""Device code of the kernel family `prefill` for SM90: persistent, warp-specialized grouped GEMMs.

One program runs on each multiprocessor. A producer warpgroup takes tiles from a counter and fills a ring in
shared memory, whose stages hold 64 columns of the tile's tokens (gathered) and of its weight rows. Each
worker (consumer warpgroup) owns one or two blocks of 64 rows and dequantizes them into the registers of
wgmma's A operand. With two blocks, one is dequantized while the product of the other runs; with one block,
three workers share the tensor cores, each dequantizing while the others multiply.

A tile has as many token columns as its tokens need: one of ``HOW.widths``, each a branch of the kernel.
The product is transposed (swap-AB), ``acc[weight rows, tokens]``.

``N, K`` are the stored (padded) sizes of a weight matrix, ``KX`` its logical columns and ``NX`` the
logical columns of the output. `HOW` is a `prefill.PrefillVariant`, which has
all compile-time parameters.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .fragments import code_layout, code_lines, fragment, scale_layout, scale_words, tile_bytes
from .gluon_compat import reinterpret
from .mixed_width_wgmma import joint_finished, joint_issued, joint_operand, joint_zeros
from .prefill_epilogue import _store_all, _store_jointly
from .prefill_loader import _loader
from .prefill_tiles import FIELDS, _field, _mma, _narrow, _operand, _units, _wide


@gluon.jit
def _loaded(ring, stage, own: gl.constexpr, HOW: gl.constexpr):
    """Loads codes, scales and zero points of row block `own` of a stage."""
    _tokens, weights, _full, _empty = ring
    codes, scales, zeros = weights
    CODES: gl.constexpr = code_layout(HOW.format)
    SCALES: gl.constexpr = scale_layout(HOW.format, HOW.group)
    s = scales.index(stage * 4 + own).load(SCALES)
    z = zeros.index(stage * 4 + own).load(SCALES) if HOW.zeros else s
    return codes.index(stage * 4 + own).load(CODES), s, z


@gluon.jit
def _expanded(loaded, DTYPE: gl.constexpr, UNITS: gl.constexpr, HOW: gl.constexpr):
    """The weights that `_loaded` loaded, dequantized to an A operand."""
    FORMAT: gl.constexpr = HOW.format
    GROUP: gl.constexpr = HOW.group
    ZEROS: gl.constexpr = HOW.zeros
    EXACT: gl.constexpr = HOW.exact
    SPLIT: gl.constexpr = HOW.split
    codes, scales, zeros = loaded
    A: gl.constexpr = _operand(_wide(UNITS))
    return fragment(codes, scales, zeros, FORMAT, GROUP, ZEROS, EXACT, DTYPE, A, SPLIT)


@gluon.jit
def _issued(a, ring, stage, acc, low, UNITS: gl.constexpr):
    """Issues the products of `a` and a stage's tokens; returns the pending wide and narrow accumulators."""
    tokens, _weights, _full, _empty = ring
    x, more = tokens
    WIDE: gl.constexpr = _wide(UNITS)
    NARROW: gl.constexpr = _narrow(UNITS)
    run = hopper.warpgroup_mma(a, x.index(stage).slice(0, WIDE).permute((1, 0)), acc, is_async=True)
    flow = low
    if NARROW:
        rest = more.index(stage).slice(0, NARROW) if WIDE == 128 else x.index(stage).slice(WIDE, NARROW)
        a = gl.convert_layout(a, _operand(NARROW), assert_trivial=True)
        flow = hopper.warpgroup_mma(a, rest.permute((1, 0)), low, is_async=True)
    return run, flow


@gluon.jit
def _finished(run, flow, a, LATER: gl.constexpr, UNITS: gl.constexpr):
    """The accumulators once at most LATER later products are in flight; `a` stays live until then."""
    if _narrow(UNITS):
        run, flow, a = hopper.warpgroup_mma_wait(2 * LATER, deps=(run, flow, a))
    else:
        run, a = hopper.warpgroup_mma_wait(LATER, deps=(run, a))
    return run, flow


@gluon.jit
def _after(stage, phase, HOW: gl.constexpr):
    """The stage after `stage`, and the phase of its barriers."""
    last = stage == HOW.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _await(ring, stage, phase, there):
    """Wait until a stage is filled, if `there`.

    cp.async writes through the generic proxy and wgmma reads through the async one: hence the fence.
    """
    _tokens, _weights, full, _empty = ring
    mbarrier.wait(full.index(stage), phase, pred=there)
    hopper.fence_async_shared()


@gluon.jit
def _zeros(UNITS: gl.constexpr):
    """Zeroed accumulators of 64 rows, wide and narrow."""
    LOW: gl.constexpr = _narrow(UNITS) if _narrow(UNITS) else 16
    wide = gl.full([64, _wide(UNITS)], 0.0, gl.float32, _mma(_wide(UNITS)))
    return wide, gl.full([64, LOW], 0.0, gl.float32, _mma(LOW))


@gluon.jit
def _one_block(
    ring, it, steps, me: gl.constexpr, DTYPE: gl.constexpr, UNITS: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Wide and narrow accumulators of 64 rows of a tile whose first step is step `it` of the program."""
    _tokens, _weights, _full, empty = ring
    acc, low = _zeros(UNITS)
    stage = it % HOW.stages
    phase = (it // HOW.stages) & 1
    _await(ring, stage, phase, True)
    a = _expanded(_loaded(ring, stage, me, HOW), DTYPE, UNITS, HOW)
    for step in range(1, steps + 1):
        run, flow = _issued(a, ring, stage, acc, low, UNITS)
        following, phase = _after(stage, phase, HOW)
        there = step < steps
        _await(ring, following, phase, there)
        # The last step dequantizes its own stage again and discards the result: cheaper than peeling the
        # iteration, and the following stage may just be being filled.
        loaded = _loaded(ring, gl.where(there, following, stage), me, HOW)
        acc, low = _finished(run, flow, a, 0, UNITS)
        mbarrier.arrive(empty.index(HOW.workers * stage + me), count=1)
        a = _expanded(loaded, DTYPE, UNITS, HOW)
        stage = following
    return acc, low


@gluon.jit
def _two_blocks(
    ring, it, steps, me: gl.constexpr, DTYPE: gl.constexpr, UNITS: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """`_one_block` for two blocks of 64 rows; one is dequantized while the product of the other runs.

    The A registers that a product reads are dependencies of the wait for that product, so they are not
    overwritten before it.
    """
    _tokens, _weights, full, empty = ring
    acc0, low0 = _zeros(UNITS)
    acc1, low1 = _zeros(UNITS)
    stage = it % HOW.stages
    phase = (it // HOW.stages) & 1
    _await(ring, stage, phase, True)
    a0 = _expanded(_loaded(ring, stage, 2 * me, HOW), DTYPE, UNITS, HOW)
    for step in range(1, steps + 1):
        run0, flow0 = _issued(a0, ring, stage, acc0, low0, UNITS)
        a1 = _expanded(_loaded(ring, stage, 2 * me + 1, HOW), DTYPE, UNITS, HOW)
        run1, flow1 = _issued(a1, ring, stage, acc1, low1, UNITS)
        acc0, low0 = _finished(run0, flow0, a0, 1, UNITS)
        following, phase = _after(stage, phase, HOW)
        there = step < steps
        _await(ring, following, phase, there)
        # As in `_one_block`, the last step dequantizes its own weights again.
        a0 = _expanded(_loaded(ring, gl.where(there, following, stage), 2 * me, HOW), DTYPE, UNITS, HOW)
        # Never blocks: it ends the basic block, so that ptxas does not sink the dequantization below the
        # wait for the product that it should overlap with.
        mbarrier.wait(full.index(following), phase, pred=there)
        acc1, low1 = _finished(run1, flow1, a1, 0, UNITS)
        mbarrier.arrive(empty.index(HOW.workers * stage + me), count=1)
        stage = following
    return acc0, low0, acc1, low1


@gluon.jit
def _two_blocks_jointly(
    ring, it, steps, me: gl.constexpr, DTYPE: gl.constexpr, UNITS: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """`_two_blocks` with a single product for all columns."""
    tokens, _weights, full, empty = ring
    BYTES: gl.constexpr = tokens[0].shape[1] * 128  # of a stage
    acc0 = joint_zeros(UNITS)
    acc1 = joint_zeros(UNITS)
    stage = it % HOW.stages
    phase = (it // HOW.stages) & 1
    _await(ring, stage, phase, True)
    a0 = joint_operand(_expanded(_loaded(ring, stage, 2 * me, HOW), DTYPE, 1, HOW))
    for step in range(1, steps + 1):
        run0 = joint_issued(a0, stage * BYTES, acc0, UNITS)
        a1 = joint_operand(_expanded(_loaded(ring, stage, 2 * me + 1, HOW), DTYPE, 1, HOW))
        run1 = joint_issued(a1, stage * BYTES, acc1, UNITS)
        acc0, _a = joint_finished(run0, a0, 1, UNITS)
        following, phase = _after(stage, phase, HOW)
        there = step < steps
        _await(ring, following, phase, there)
        # As in `_one_block`, the last step dequantizes its own weights again.
        again = gl.where(there, following, stage)
        a0 = joint_operand(_expanded(_loaded(ring, again, 2 * me, HOW), DTYPE, 1, HOW))
        # Ends the basic block, as in `_two_blocks`.
        mbarrier.wait(full.index(following), phase, pred=there)
        acc1, _a = joint_finished(run1, a1, 0, UNITS)
        mbarrier.arrive(empty.index(HOW.workers * stage + me), count=1)
        stage = following
    return acc0, acc1


@gluon.jit
def _compute(
    ring, out, notes, Y, block, first, end, it, steps, NX, alpha, limit,
    me: gl.constexpr, UNITS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Products and epilogue of a tile, for the one or two row blocks from `block` on."""
    DTYPE: gl.constexpr = Y.dtype.element_ty
    if HOW.blocks == 1:
        acc, low = _one_block(ring, it, steps, me, DTYPE, UNITS, HOW)
        _store_all(acc, low, out, notes, Y, block, first, end, NX, alpha, limit, me, UNITS, HOW)
    elif UNITS < 8 and (UNITS & (UNITS - 1)):
        acc, acc1 = _two_blocks_jointly(ring, it, steps, me, DTYPE, UNITS, HOW)
        _store_jointly(acc, out, notes, Y, block, first, end, NX, alpha, limit, 2 * me, UNITS, HOW)
        _store_jointly(acc1, out, notes, Y, block + 1, first, end, NX, alpha, limit, 2 * me + 1, UNITS, HOW)
    else:
        acc, low, acc1, low1 = _two_blocks(ring, it, steps, me, DTYPE, UNITS, HOW)
        _store_all(acc, low, out, notes, Y, block, first, end, NX, alpha, limit, 2 * me, UNITS, HOW)
        _store_all(
            acc1, low1, out, notes, Y, block + 1, first, end, NX, alpha, limit, 2 * me + 1, UNITS, HOW
        )  # fmt: skip


@gluon.jit
def _pass_by(ring, it, steps, me: gl.constexpr, HOW: gl.constexpr):
    """Skip a tile in which this warpgroup's rows are past the end of the matrix."""
    _tokens, _weights, full, empty = ring
    STAGES: gl.constexpr = HOW.stages
    for _ in range(steps):
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
        mbarrier.arrive(empty.index(HOW.workers * (it % STAGES) + me), count=1)
        it += 1


@gluon.jit
def _computer(share, me: gl.constexpr, HOW: gl.constexpr):
    """A worker: its rows of every tile passed in `jobs`, until one of 0 units."""
    ring, notes, out, jobs, given, taken, Y, N, K, NX, stagger, alpha, limit = share
    _tokens, _weights, _full, empty = ring
    slots, weights, bias, factors = notes
    WIDTHS: gl.constexpr = len(HOW.widths)
    steps = K // 64
    it = 0
    job = 0
    mbarrier.wait(given.index(0), 0)
    units = _field(jobs, 0, 0)
    if me > 0:
        mbarrier.wait(empty.index(HOW.workers * (stagger - 1) + me - 1), 0, pred=(units > 0) & (stagger > 0))
    while units > 0:
        first = _field(jobs, job, 1)
        end = _field(jobs, job, 2)
        block = (_field(jobs, job, 3) * HOW.workers + me) * HOW.blocks
        if HOW.splits:
            steps = _field(jobs, job, 4)
        now = (slots.index(job % 2), weights.index(job % 2), bias.index(job % 2), factors.index(job % 2))
        for i in gl.static_range(WIDTHS):
            if (units > _units(i - 1, HOW)) & (units <= _units(i, HOW)) & (block < N // 64):
                _compute(
                    ring, out.index(me), now, Y, block, first, end, it, steps, NX, alpha, limit,
                    me, _units(i, HOW), HOW,
                )  # fmt: skip
        if block >= N // 64:
            _pass_by(ring, it, steps, me, HOW)
        mbarrier.arrive(taken.index(job % 2), count=1)
        it += steps
        job += 1
        mbarrier.wait(given.index(job % 2), (job // 2) & 1)
        units = _field(jobs, job, 0)


@gluon.jit(do_not_specialize=["group_m", "splits", "T", "stagger"])
def _prefill_kernel(
    X, W, S, Z, B, F, Y, WEIGHTS, SORTED, TILES, COUNT, COUNTER,
    N, K, KX, NX, spans, group_m, splits, T, stagger, alpha, limit,
    HOW: gl.constexpr,
):  # fmt: skip
    """One GEMM of a layer over the tiles of TILES; works with any grid, fastest with one program per SM.

    GEMM 1 gathers tokens by slot and writes activations in sorted order; GEMM 2 reads those and writes one
    row for each slot; if HOW.splits, ``[splits, T, NX]`` in fp32, a part of the reduction each, whatever the
    type of Y's pointer.
    """
    DTYPE: gl.constexpr = X.dtype.element_ty
    WORDS: gl.constexpr = scale_words(HOW.format, HOW.group)
    LINES: gl.constexpr = code_lines(HOW.format)
    BYTES: gl.constexpr = tile_bytes(HOW.format)
    STAGES: gl.constexpr = HOW.stages
    WORKERS: gl.constexpr = HOW.workers
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = gl.allocate_shared_memory(DTYPE, [STAGES, 128, 64], ROWS)
    more = x
    if HOW.rest:
        more = gl.allocate_shared_memory(DTYPE, [STAGES, HOW.rest, 64], ROWS)
    codes = gl.allocate_shared_memory(gl.uint8, [STAGES, 4, BYTES], PLAIN)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, 4, WORDS], PLAIN)
    zeros = scales
    if HOW.zeros:
        zeros = gl.allocate_shared_memory(gl.int32, [STAGES, 4, WORDS], PLAIN)
    out = gl.allocate_shared_memory(DTYPE, [WORKERS, 64, 64], ROWS)
    jobs = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], LINE)
    slots = gl.allocate_shared_memory(gl.int32, [2, 256], LINE)
    weights = gl.allocate_shared_memory(gl.float32, [2, 256], LINE)
    bias = gl.allocate_shared_memory(gl.float32, [2, 256], LINE)
    factors = bias
    if HOW.halves:
        factors = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [WORKERS * STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(taken.index(i), count=WORKERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
    for i in gl.static_range(WORKERS * STAGES):
        mbarrier.init(empty.index(i), count=1)
    hopper.fence_async_shared()
    # The next kernel may start: like this one, it waits before it reads or writes.
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    # The loader fills all weights of a stage at once; the workers read blocks of 64 rows.
    read_codes = reinterpret(codes, gl.uint8, [STAGES * 4, LINES, 128], PLAIN)
    read_scales = reinterpret(scales, gl.int32, [STAGES * 4, WORDS], LINE)
    read_zeros = reinterpret(zeros, gl.int32, [STAGES * 4, WORDS], LINE)
    notes = (slots, weights, bias, factors)
    filled = ((x, more), (codes, scales, zeros), full, empty)
    ring = ((x, more), (read_codes, read_scales, read_zeros), full, empty)
    load = (filled, notes, jobs, given, taken, X, W, S, Z, B, F, WEIGHTS, SORTED, TILES, COUNT, COUNTER)
    size = (N, K, KX, spans, group_m, splits, T)
    share = (ring, notes, out, jobs, given, taken, Y, N, K, NX, stagger, alpha, limit)
    if WORKERS == 2:
        gl.warp_specialize(
            [(_computer, (share, 0, HOW)), (_computer, (share, 1, HOW)), (_loader, (load, size, HOW))],
            [4, 4],
            [HOW.registers[0], HOW.registers[1]],
        )
    else:
        gl.warp_specialize(
            [
                (_computer, (share, 0, HOW)),
                (_computer, (share, 1, HOW)),
                (_computer, (share, 2, HOW)),
                (_loader, (load, size, HOW)),
            ],
            [4, 4, 4],
            [HOW.registers[0], HOW.registers[0], HOW.registers[1]],
        )

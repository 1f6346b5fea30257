# mypy: ignore-errors
"""Device code of the prefill kernels for SM90: persistent, warp-specialized grouped GEMMs.

One program per multiprocessor. A producer warpgroup takes tiles from a counter and fills a ring of
stages in shared memory: 64 columns of the tile's tokens, gathered, and of 256 weight rows. Two consumer
warpgroups own 128 of the rows each, as two blocks of 64, and expand one block's weights to the registers
that wgmma takes as A while the other block's product runs. The second consumer trails the first one by
some steps, so that one of them has products to run while the other one stores a tile.

A token tile is some units of 16 tokens wide. `_schedule_kernel` gives an expert tiles that are equally
wide and hardly padded; a width between two powers of two is computed as two accumulators, wide and
narrow, that share the expanded weights. The product is transposed, ``acc[weight rows, tokens]``.

``N, K`` are the stored (padded) sizes of a weight matrix, ``KX`` its logical columns and ``NX`` the
logical columns of the output.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .epilogue import activate, activate_one
from .fragments import FOLD_FACTOR, code_layout, code_lines, fragment, scale_layout, scale_words, tile_bytes
from .names import async_load, reinterpret


@triton.jit
def _schedule_kernel(OFFSETS, TILES, COUNT, E: tl.constexpr, EPAD: tl.constexpr, MOST: tl.constexpr):
    """Token tiles (expert, first, end, units) ``[COUNT[0], 4]``, expert by expert; one program.

    An expert's tokens are cut into the fewest tiles of at most `MOST` units of 16 tokens, and its
    units are shared out so that its tiles differ by one at most. COUNT[1:3] become 0.
    """
    i = tl.arange(0, EPAD)
    low = tl.load(OFFSETS + i, mask=i < E, other=0)
    high = tl.load(OFFSETS + i + 1, mask=i < E, other=0)
    units = (high - low + 15) // 16
    tiles = (units + MOST - 1) // MOST
    before = tl.cumsum(tiles, 0) - tiles
    tl.store(COUNT, tl.sum(tiles, 0))
    tl.store(COUNT + 1, 0)
    tl.store(COUNT + 2, 0)
    least = units // tl.maximum(tiles, 1)
    wider = units - least * tiles
    for j in range(tl.max(tiles, 0)):
        at = TILES + (before + j) * 4
        start = low + 16 * (j * least + tl.minimum(j, wider))
        width = least + (j < wider).to(tl.int32)
        mine = j < tiles
        tl.store(at, i, mask=mine)
        tl.store(at + 1, start, mask=mine)
        tl.store(at + 2, tl.minimum(start + 16 * width, high), mask=mine)
        tl.store(at + 3, width, mask=mine)


@gluon.constexpr_function
def _mma(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def _operand(tokens):
    return gl.DotOperandLayout(0, _mma(tokens), 2)


@gluon.constexpr_function
def _has(widths, units):
    """Whether the set of bits `widths` has a width of `units`."""
    return widths >> units & 1 == 1


@gluon.constexpr_function
def _below(widths, units):
    """The next smaller width that `widths` has, or 0."""
    return max([0] + [v for v in range(1, units) if widths >> v & 1])


@gluon.constexpr_function
def _wide(units):
    """Tokens of the first part of a width: the largest power of two that fits."""
    return 16 << (units.bit_length() - 1)


@gluon.constexpr_function
def _rows_layout():
    """16 bytes a lane of ``[rows, 64]`` values of 16 bits: 128 bytes of four rows a warp."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _placed(tile, count, whole, LEAP: gl.constexpr):
    """(token tile, row tile) number `tile`: LEAP token tiles run through the `whole` row tiles together.

    A row tile that lies partly past the matrix comes last: it is shorter, and evens out the end.
    """
    group = tile // gl.maximum(LEAP * whole, 1)
    within = tile - group * (LEAP * whole)
    tokens = gl.maximum(gl.minimum(count - group * LEAP, LEAP), 1)
    rest = tile - count * whole
    mt = gl.where(rest < 0, group * LEAP + within % tokens, rest)
    return mt, gl.where(rest < 0, within // tokens, whole)


@gluon.jit
def _field(jobs, job, i: gl.constexpr):
    """Field i of the entry of `job`, a scalar."""
    return gl.max(jobs.index((job % 2) * 8 + i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _set_field(jobs, job, i: gl.constexpr, value):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    jobs.index((job % 2) * 8 + i).store(gl.full([1], 0, gl.int32, L) + value)


@gluon.jit
def _finished_rows(
    acc, block, B, weight, expert, N,
    STAGE: gl.constexpr, FOLDED: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Sums of 64 rows with fold factor, bias and router weight: the weight first on GEMM 1's input."""
    if FOLDED:
        acc = acc * FOLD_FACTOR
    if WEIGHTED and STAGE == 1:
        acc = acc * weight
    if BIAS:
        rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _mma(TOKENS)))
        acc = acc + gl.expand_dims(gl.load(B + expert.to(gl.int64) * N + rows).to(gl.float32), 1)
    if WEIGHTED and STAGE == 2:
        acc = acc * weight
    return acc


@gluon.jit
def _gated(acc, alpha, limit, ACT: gl.constexpr, TOKENS: gl.constexpr):
    """[32, TOKENS]: the activation of 64 rows, 8 gates and 8 ups in each block of 16."""
    gate, up = gl.split(acc.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    return activate(gate, up, alpha, limit, ACT).reshape([32, TOKENS])


@gluon.jit
def _write(out, Y, SORTED, first, end, column, NX, STAGE: gl.constexpr, TOKENS: gl.constexpr):
    """Store `out` as 64 columns from `column` on: of rows from `first` on, in GEMM 2 of their slots."""
    L: gl.constexpr = _rows_layout()
    rows = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))
    live = rows < end
    if STAGE == 2:
        rows = gl.load(SORTED + rows, mask=live, other=0)
    columns = column + gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    p = Y + gl.expand_dims(rows.to(gl.int64) * NX, 1) + gl.expand_dims(columns, 0)
    gl.store(p, out.load(L), mask=gl.expand_dims(live, 1) & gl.expand_dims(columns < NX, 0))


@gluon.jit
def _store(
    acc0, acc1, out, block, Y, B, WEIGHTS, SORTED, expert, first, end, N, NX, alpha, limit,
    STAGE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, FOLDED: gl.constexpr,
    BIAS: gl.constexpr, WEIGHTED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Epilogue of the 128 weight rows from block `block` on and TOKENS tokens from position `first`."""
    DTYPE: gl.constexpr = Y.dtype.element_ty
    out = out.slice(0, TOKENS)
    weight = 1.0
    if WEIGHTED:
        positions = first + gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        slots = gl.load(SORTED + positions, mask=positions < end, other=0)
        weight = gl.load(WEIGHTS + slots, mask=positions < end, other=0.0)
        weight = gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(0, _mma(TOKENS))), 0)
    acc0 = _finished_rows(acc0, block, B, weight, expert, N, STAGE, FOLDED, BIAS, WEIGHTED, TOKENS)
    acc1 = _finished_rows(
        acc1, gl.minimum(block + 1, N // 64 - 1), B, weight, expert, N, STAGE, FOLDED, BIAS, WEIGHTED, TOKENS
    )
    if GATED:
        gated0 = _gated(acc0, alpha, limit, ACT, TOKENS).to(DTYPE)
        gated1 = _gated(acc1, alpha, limit, ACT, TOKENS).to(DTYPE)
        out.slice(0, 32, 1).permute((1, 0)).store(gated0)
        out.slice(32, 32, 1).permute((1, 0)).store(gated1)
        _write(out, Y, SORTED, first, end, block * 32, NX, STAGE, TOKENS)
    else:
        if ACT != "none":
            acc0 = activate_one(acc0, ACT)
            acc1 = activate_one(acc1, ACT)
        out.permute((1, 0)).store(acc0.to(DTYPE))
        _write(out, Y, SORTED, first, end, block * 64, NX, STAGE, TOKENS)
        if block * 64 + 64 < NX:
            out.permute((1, 0)).store(acc1.to(DTYPE))
            _write(out, Y, SORTED, first, end, block * 64 + 64, NX, STAGE, TOKENS)


@gluon.jit
def _parted(acc):
    """The accumulators of 128 tokens as two of 64; stored one by one they need fewer registers."""
    left, right = gl.split(acc.reshape([64, 2, 64]).permute((0, 2, 1)))
    left = gl.convert_layout(left, _mma(64), assert_trivial=True)
    return left, gl.convert_layout(right, _mma(64), assert_trivial=True)


@gluon.jit
def _expanded(
    ws, ss, zs, stage, block: gl.constexpr, DTYPE: gl.constexpr, TOKENS: gl.constexpr,
    FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """The stage's weights of 64 rows, number `block` of the tile, in the registers of A."""
    S: gl.constexpr = scale_layout(FORMAT, GROUP)
    codes = ws.index(stage * 4 + block).load(code_layout(FORMAT))
    scales = ss.index(stage * 4 + block).load(S)
    zeros = scales
    if ZEROS:
        zeros = zs.index(stage * 4 + block).load(S)
    return fragment(codes, scales, zeros, FORMAT, GROUP, ZEROS, EXACT, DTYPE, _operand(TOKENS))


@gluon.jit
def _issued(a, xw, xn, stage, acc, low, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """Start the product of `a` and the stage's tokens: pending accumulators, wide and narrow."""
    run = hopper.warpgroup_mma(a, xw.index(stage).slice(0, WIDE).permute((1, 0)), acc, is_async=True)
    flow = low
    if NARROW:
        x = xn.index(stage).slice(0, NARROW) if WIDE == 128 else xw.index(stage).slice(WIDE, NARROW)
        a = gl.convert_layout(a, _operand(NARROW), assert_trivial=True)
        flow = hopper.warpgroup_mma(a, x.permute((1, 0)), low, is_async=True)
    return run, flow


@gluon.jit
def _finished(run, flow, a, LATER: gl.constexpr, NARROW: gl.constexpr):
    """The accumulators once at most LATER products after theirs are in flight; `a` lives until then."""
    if NARROW:
        run, flow, a = hopper.warpgroup_mma_wait(2 * LATER, deps=(run, flow, a))
    else:
        run, a = hopper.warpgroup_mma_wait(LATER, deps=(run, a))
    return run, flow, a


@gluon.jit
def _consume_tile(
    me: gl.constexpr, xw, xn, ws, ss, zs, full, empty, out, it, block, steps,
    Y, B, WEIGHTS, SORTED, expert, first, end, N, NX, alpha, limit,
    WIDE: gl.constexpr, NARROW: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
    ZEROS: gl.constexpr, EXACT: gl.constexpr, STAGE: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of this warpgroup: 128 weight rows from block `block` on, WIDE + NARROW tokens.

    The registers of A that a product reads are written again only after a wait for that product, and
    keep their value up to there by being among what it waits for.
    """
    DTYPE: gl.constexpr = Y.dtype.element_ty
    FOLDED: gl.constexpr = FORMAT == "mxfp4" and not EXACT
    LOW: gl.constexpr = NARROW if NARROW else 16
    acc0 = gl.full([64, WIDE], 0.0, gl.float32, _mma(WIDE))
    low0 = gl.full([64, LOW], 0.0, gl.float32, _mma(LOW))
    acc1 = acc0
    low1 = low0
    mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
    a0 = _expanded(ws, ss, zs, it % STAGES, 2 * me, DTYPE, WIDE, FORMAT, GROUP, ZEROS, EXACT)
    for step in range(steps):
        stage = it % STAGES
        run0, flow0 = _issued(a0, xw, xn, stage, acc0, low0, WIDE, NARROW)
        a1 = _expanded(ws, ss, zs, stage, 2 * me + 1, DTYPE, WIDE, FORMAT, GROUP, ZEROS, EXACT)
        run1, flow1 = _issued(a1, xw, xn, stage, acc1, low1, WIDE, NARROW)
        acc0, low0, a0 = _finished(run0, flow0, a0, 1, NARROW)
        it += 1
        # The last step expands stale bytes that nothing uses: cheaper than a second copy of the body.
        more = step + 1 < steps
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1, pred=more)
        a0 = _expanded(ws, ss, zs, it % STAGES, 2 * me, DTYPE, WIDE, FORMAT, GROUP, ZEROS, EXACT)
        # Waits for nothing: ends the basic block, so that ptxas does not move the expansion behind the
        # wait for the product that it is to overlap with.
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1, pred=more)
        acc1, low1, a1 = _finished(run1, flow1, a1, 0, NARROW)
        mbarrier.arrive(empty.index(2 * stage + me), count=1)
    if NARROW:
        _store(
            low0, low1, out, block, Y, B, WEIGHTS, SORTED, expert, first + WIDE, end, N, NX, alpha, limit,
            STAGE, ACT, GATED, FOLDED, BIAS, WEIGHTED, NARROW,
        )  # fmt: skip
    if WIDE == 128:
        left0, right0 = _parted(acc0)
        left1, right1 = _parted(acc1)
        _store(
            left0, left1, out, block, Y, B, WEIGHTS, SORTED, expert, first, end, N, NX, alpha, limit,
            STAGE, ACT, GATED, FOLDED, BIAS, WEIGHTED, 64,
        )  # fmt: skip
        _store(
            right0, right1, out, block, Y, B, WEIGHTS, SORTED, expert, first + 64, end, N, NX, alpha, limit,
            STAGE, ACT, GATED, FOLDED, BIAS, WEIGHTED, 64,
        )  # fmt: skip
    else:
        _store(
            acc0, acc1, out, block, Y, B, WEIGHTS, SORTED, expert, first, end, N, NX, alpha, limit,
            STAGE, ACT, GATED, FOLDED, BIAS, WEIGHTED, WIDE,
        )  # fmt: skip


@gluon.jit
def _pass_tile(me: gl.constexpr, full, empty, it, steps, STAGES: gl.constexpr):
    """Let a tile go by whose rows of this warpgroup lie past the matrix."""
    for _ in range(steps):
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
        mbarrier.arrive(empty.index(2 * (it % STAGES) + me), count=1)
        it += 1


@gluon.jit
def _consumer(
    me: gl.constexpr, xw, xn, ws, ss, zs, full, empty, out, jobs, given, taken,
    Y, B, WEIGHTS, SORTED, N, K, NX, alpha, limit,
    WIDTHS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    EXACT: gl.constexpr, STAGE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, WEIGHTED: gl.constexpr, STAGES: gl.constexpr, TRAIL: gl.constexpr,
):  # fmt: skip
    """Computes tiles as `jobs` gives them, until one of 0 units."""
    steps = K // 64
    it = 0
    job = 0
    mbarrier.wait(given.index(0), 0)
    units = _field(jobs, 0, 0)
    if TRAIL and me == 1:
        mbarrier.wait(empty.index(2 * TRAIL - 2), 0, pred=units > 0)
    while units > 0:
        expert = _field(jobs, job, 1)
        first = _field(jobs, job, 2)
        end = _field(jobs, job, 3)
        block = _field(jobs, job, 4) * 4 + 2 * me
        mbarrier.arrive(taken.index(job % 2), count=1)
        for w in gl.static_range(1, 11):
            if _has(WIDTHS, w):  # noqa: SIM102 - one is decided when compiling, one when running
                if (units > _below(WIDTHS, w)) & (units <= w) & (block < N // 64):
                    _consume_tile(
                        me, xw, xn, ws, ss, zs, full, empty, out.index(me), it, block, steps,
                        Y, B, WEIGHTS, SORTED, expert, first, end, N, NX, alpha, limit,
                        _wide(w), 16 * w - _wide(w), FORMAT, GROUP, ZEROS, EXACT, STAGE, ACT, GATED,
                        BIAS, WEIGHTED, STAGES,
                    )  # fmt: skip
        if block >= N // 64:
            _pass_tile(me, full, empty, it, steps, STAGES)
        it += steps
        job += 1
        mbarrier.wait(given.index(job % 2), (job // 2) & 1)
        units = _field(jobs, job, 0)


@gluon.jit
def _consumer_0(
    xw, xn, ws, ss, zs, full, empty, out, jobs, given, taken,
    Y, B, WEIGHTS, SORTED, N, K, NX, alpha, limit,
    WIDTHS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    EXACT: gl.constexpr, STAGE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, WEIGHTED: gl.constexpr, STAGES: gl.constexpr, TRAIL: gl.constexpr,
):  # fmt: skip
    _consumer(
        0, xw, xn, ws, ss, zs, full, empty, out, jobs, given, taken,
        Y, B, WEIGHTS, SORTED, N, K, NX, alpha, limit,
        WIDTHS, FORMAT, GROUP, ZEROS, EXACT, STAGE, ACT, GATED, BIAS, WEIGHTED, STAGES, TRAIL,
    )  # fmt: skip


@gluon.jit
def _consumer_1(
    xw, xn, ws, ss, zs, full, empty, out, jobs, given, taken,
    Y, B, WEIGHTS, SORTED, N, K, NX, alpha, limit,
    WIDTHS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    EXACT: gl.constexpr, STAGE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, WEIGHTED: gl.constexpr, STAGES: gl.constexpr, TRAIL: gl.constexpr,
):  # fmt: skip
    _consumer(
        1, xw, xn, ws, ss, zs, full, empty, out, jobs, given, taken,
        Y, B, WEIGHTS, SORTED, N, K, NX, alpha, limit,
        WIDTHS, FORMAT, GROUP, ZEROS, EXACT, STAGE, ACT, GATED, BIAS, WEIGHTED, STAGES, TRAIL,
    )  # fmt: skip


@gluon.jit
def _token_rows(SORTED, first, end, KX, GATHER: gl.constexpr, TOKENS: gl.constexpr):
    """Where TOKENS rows from position `first` on begin, in units of 8 values, and which rows are live."""
    rows = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, _rows_layout()))
    live = rows < end
    if GATHER:
        rows = gl.load(SORTED + rows, mask=live, other=0) // GATHER
    return rows.to(gl.uint32) * (KX // 8).to(gl.uint32), live


@gluon.jit
def _block_offsets(nt, blocks, stride, LENGTH: gl.constexpr, L: gl.constexpr):
    """[4, LENGTH] offsets of the first bytes or words of row tile `nt`; the last block stands for others."""
    block = gl.minimum(nt * 4 + gl.arange(0, 4, layout=gl.SliceLayout(1, L)), blocks - 1)
    inner = gl.arange(0, LENGTH, layout=gl.SliceLayout(0, L))
    return gl.expand_dims(block * stride, 1) + gl.expand_dims(inner, 0)


@gluon.jit
def _copy_tokens(x, X, rows, live, step, KX, TOKENS: gl.constexpr, EVEN_K: gl.constexpr):
    """64 columns of step `step` of the rows at `rows`; columns past the matrix become zero.

    Addresses are made anew from 32 bits a row: 64 bits would take registers that the consumers need.
    """
    L: gl.constexpr = _rows_layout()
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    at = (rows + (step * 8).to(gl.uint32)).to(gl.int64) * 8
    mask, _ = gl.broadcast(gl.expand_dims(live, 1), gl.full([TOKENS, 64], 0, gl.int1, L))
    if not EVEN_K:
        mask = mask & gl.expand_dims(step * 64 + columns < KX, 0)
    async_load(x, X + gl.expand_dims(at, 1) + gl.expand_dims(columns, 0), mask=mask)


@gluon.jit
def _producer(
    xw, xn, ws, ss, zs, full, empty, jobs, given, taken,
    X, W, S, Z, SORTED, TILES, COUNT, COUNTER, N, K, KX, spans,
    WIDTHS: gl.constexpr, GATHER: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
    SPAN: gl.constexpr, ZEROS: gl.constexpr, STAGES: gl.constexpr, LEAP: gl.constexpr,
    EVEN_K: gl.constexpr,
):  # fmt: skip
    """Takes tiles from COUNTER, gives them to the consumers and fills the ring for them; last one of 0 units.

    A scale word covers SPAN tiles along K. GATHER is the number of slots of a token when rows are
    gathered by slot, 0 when they are in sorted order.
    """
    BYTES: gl.constexpr = tile_bytes(FORMAT)
    WORDS: gl.constexpr = scale_words(FORMAT, GROUP)
    WL: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    SL: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [4, 1], [1, 0])
    steps = K // 64
    blocks = N // 64
    it = 0
    job = 0
    tile = gl.program_id(0)
    count = gl.load(COUNT)
    total = count * ((blocks + 3) // 4)
    units = 1
    while units > 0:
        mt, nt = _placed(tile, count, blocks // 4, LEAP)
        real = tile < total
        expert = gl.load(TILES + mt * 4, mask=real, other=0)
        first = gl.load(TILES + mt * 4 + 1, mask=real, other=0)
        end = gl.load(TILES + mt * 4 + 2, mask=real, other=0)
        units = gl.load(TILES + mt * 4 + 3, mask=real, other=0)
        mbarrier.wait(taken.index(job % 2), ((job // 2) & 1) ^ 1)
        _set_field(jobs, job, 0, units)
        _set_field(jobs, job, 1, expert)
        _set_field(jobs, job, 2, first)
        _set_field(jobs, job, 3, end)
        _set_field(jobs, job, 4, nt)
        mbarrier.arrive(given.index(job % 2), count=1)
        job += 1
        tile = gl.num_programs(0) + gl.atomic_add(COUNTER, 1, sem="relaxed")
        rows, live = _token_rows(SORTED, first, end, KX, GATHER, 128)
        if WIDTHS >> 9:
            more, live_more = _token_rows(SORTED, first + 128, end, KX, GATHER, 32)
        w_expert = W + expert.to(gl.int64) * blocks * steps * BYTES
        s_expert = expert.to(gl.int64) * blocks * spans * WORDS
        w_at = _block_offsets(nt, blocks, steps * BYTES, BYTES, WL)
        s_at = _block_offsets(nt, blocks, spans * WORDS, WORDS, SL)
        for kt in range(gl.where(real, steps, 0)):
            stage = it % STAGES
            free = ((it // STAGES) & 1) ^ 1
            mbarrier.wait(empty.index(2 * stage), free)
            mbarrier.wait(empty.index(2 * stage + 1), free)
            _copy_tokens(xw.index(stage), X, rows, live, kt, KX, 128, EVEN_K)
            if WIDTHS >> 9:
                _copy_tokens(xn.index(stage), X, more, live_more, kt, KX, 32, EVEN_K)
            async_load(ws.index(stage), w_expert + kt * BYTES + w_at)
            s_step = s_expert + kt // SPAN * WORDS
            async_load(ss.index(stage), S + s_step + s_at)
            if ZEROS:
                async_load(zs.index(stage), Z + s_step + s_at)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            it += 1


@gluon.jit
def _prefill_kernel(
    X, W, S, Z, B, Y, WEIGHTS, SORTED, TILES, COUNT, COUNTER, N, K, KX, NX, spans, alpha, limit,
    STAGE: gl.constexpr, GATHER: gl.constexpr, WIDTHS: gl.constexpr, FORMAT: gl.constexpr,
    GROUP: gl.constexpr, SPAN: gl.constexpr, ZEROS: gl.constexpr, EXACT: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    EVEN_K: gl.constexpr, STAGES: gl.constexpr, LEAP: gl.constexpr, TRAIL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM number STAGE of the layer over the tiles of TILES; any grid, best one program an SM.

    GEMM 1 gathers tokens by slot and writes activations in sorted order; GEMM 2 reads those and writes
    each slot's row. WIDTHS is the set of widths, bit u for 16 u tokens.
    """
    DTYPE: gl.constexpr = X.dtype.element_ty
    WORDS: gl.constexpr = scale_words(FORMAT, GROUP)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = code_lines(FORMAT)
    xw = gl.allocate_shared_memory(DTYPE, [STAGES, 128, 64], ROWS)
    xn = xw
    if WIDTHS >> 9:
        xn = gl.allocate_shared_memory(DTYPE, [STAGES, 32, 64], ROWS)
    ws = gl.allocate_shared_memory(gl.uint8, [STAGES, 4, tile_bytes(FORMAT)], PLAIN)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES, 4, WORDS], PLAIN)
    zs = ss
    if ZEROS:
        zs = gl.allocate_shared_memory(gl.int32, [STAGES, 4, WORDS], PLAIN)
    out = gl.allocate_shared_memory(DTYPE, [2, 64, 64], ROWS)
    jobs = gl.allocate_shared_memory(gl.int32, [16, 1], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(2 * i), count=1)
        mbarrier.init(empty.index(2 * i + 1), count=1)
    hopper.fence_async_shared()
    # The producer fills the four row blocks of a stage at once, a consumer reads them one by one.
    wb = reinterpret(ws, gl.uint8, [STAGES * 4, LINES, 128], PLAIN)
    sb = reinterpret(ss, gl.int32, [STAGES * 4, WORDS], LINE)
    zb = reinterpret(zs, gl.int32, [STAGES * 4, WORDS], LINE)
    gl.warp_specialize(
        [
            (_consumer_0, (xw, xn, wb, sb, zb, full, empty, out, jobs, given, taken,
                           Y, B, WEIGHTS, SORTED, N, K, NX, alpha, limit,
                           WIDTHS, FORMAT, GROUP, ZEROS, EXACT, STAGE, ACT, GATED, BIAS, WEIGHTED,
                           STAGES, TRAIL)),
            (_consumer_1, (xw, xn, wb, sb, zb, full, empty, out, jobs, given, taken,
                           Y, B, WEIGHTS, SORTED, N, K, NX, alpha, limit,
                           WIDTHS, FORMAT, GROUP, ZEROS, EXACT, STAGE, ACT, GATED, BIAS, WEIGHTED,
                           STAGES, TRAIL)),
            (_producer, (xw, xn, ws, ss, zs, full, empty, jobs, given, taken,
                         X, W, S, Z, SORTED, TILES, COUNT, COUNTER, N, K, KX, spans,
                         WIDTHS, GATHER, FORMAT, GROUP, SPAN, ZEROS, STAGES, LEAP, EVEN_K)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip

# mypy: ignore-errors
# ruff: noqa: RUF005 (device code has no starred expressions)
"""Device code for few tokens per expert on SM90: weights stream from memory straight into registers.

A lane's 16 bytes of a ``moectl-mtile64`` tile are its share of the A operands of four m16n8k16 instructions,
so a warp loads 16 rows x 64 columns with one instruction, several tiles ahead of their use, without shared
memory or barriers. The warps of a program split rows and columns; the sums of the column parts are added
once, at the end. Tokens (up to TOKENS of one expert) are in shared memory, from which B operands are read.

Codes are dequantized with as few instructions as possible: scales apply to the sums of a group instead of the
weights, and an integer's offset is subtracted from those sums as well (offset times the sum of the group's
tokens, one more mma). MXFP4 codes become 2^-126 times their value; tokens are stored times 2^64, which keeps
sums far from the limits of the range.

Names of tensor dimensions: S column parts (one per group of warps), RW row warps, 32 lanes, R row blocks of
16 per warp. Words of X are pairs of 16-bit values. A program's *record* has its expert, the number of its
tokens, and their slots (slot: index of an assignment in the flattened ids).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .activation_epilogue import activate, activate_one
from .gluon_compat import reinterpret, thread_barrier
from .stream_layouts import (
    _factor,
    _input_scaled,
    _only,
    _output_factor,
    _run_words,
    _scale_stride,
    _smaller,
    _sums_layout,
    _sums_shape,
    _tile_words,
    _words_layout,
)
from .stream_operands import _fill, _keep_order, _record, _slots, _sum_tokens, _tile, _tile_loads


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _summed(a, FACTOR: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr):
    """The sum over column parts, as [RW, 8, 4, R, 2, 2]."""
    if S > 1:
        a = gl.reduce(a, 0, _plus)
    if FACTOR != 1.0:
        a = a * FACTOR
    return gl.convert_layout(a.reshape([RW, 8, 4, R, 2, 2]), _sums_layout(S * RW, R))


@gluon.jit
def _wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_next_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for(counter, many):
    """Spins until the int32 at `counter` is at least `many`, with acquire semantics."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .s32 v; AGAIN: ld.acquire.gpu.global.s32 v, [$1]; setp.lt.s32 p, v, $2; "
        "@p bra AGAIN; mov.s32 $0, v; }",
        "=r,l,r", [counter, many], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _store_first(
    acc, NTH: gl.constexpr, B, factors, H, PLAN, WEIGHTS, N, NX, alpha, limit, p, expert, count, tile,
    ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, HALVES: gl.constexpr, WEIGHTED: gl.constexpr,
    TOKENS: gl.constexpr,
    S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """H[slots] = the activation of `acc`, the sums of one row tile for token block NTH."""
    LH: gl.constexpr = gl.SliceLayout(4, _sums_layout(S * RW, R))  # [RW, 8, 4, R, 2 b]
    rw = gl.arange(0, RW, layout=_only(LH, 0, 5))[:, None, None, None, None]
    g = gl.arange(0, 8, layout=_only(LH, 1, 5))[None, :, None, None, None]
    c = gl.arange(0, 4, layout=_only(LH, 2, 5))[None, None, :, None, None]
    r = gl.arange(0, R, layout=_only(LH, 3, 5))[None, None, None, :, None]
    b = gl.arange(0, 2, layout=_only(LH, 4, 5))[None, None, None, None, :]
    block = tile * (RW * R) + rw * R + r
    token = NTH * 8 + 2 * c + b
    slot = _slots(PLAN, p, token, count, TOKENS, PLANNED)
    gate, up = gl.split(acc.permute((0, 1, 2, 3, 5, 4)))
    gate = gl.convert_layout(gate, LH, assert_trivial=True)
    up = gl.convert_layout(up, LH, assert_trivial=True)
    if HALVES:
        gate = gate * factors[0]
        up = up * factors[1]
    if WEIGHTED:
        weight = gl.load(WEIGHTS + slot, mask=token < count, other=0.0)
        gate = gate * weight
        up = up * weight
    inside = block < N // 16
    if BIAS:
        at = B + (expert.to(gl.int64) * N + block * 16 + g)
        gate = gate + gl.load(at, mask=inside, other=0.0).to(gl.float32)
        up = up + gl.load(at + 8, mask=inside, other=0.0).to(gl.float32)
    valid = (token < count) & inside
    row = H + slot.to(gl.int64) * NX
    if GATED:
        column = block * 8 + g
        h = activate(gate, up, alpha, limit, ACT)
        gl.store(row + column, h.to(H.dtype.element_ty), mask=valid & (column < NX))
    else:
        column = block * 16 + g
        gl.store(row + column, activate_one(gate, ACT).to(H.dtype.element_ty), mask=valid & (column < NX))
        column += 8
        gl.store(row + column, activate_one(up, ACT).to(H.dtype.element_ty), mask=valid & (column < NX))


@gluon.jit
def _store_second(
    acc, NTH: gl.constexpr, B, factors, Y, PLAN, WEIGHTS, T, N, NX, p, expert, count, tile, pid_k,
    BIAS: gl.constexpr, HALVES: gl.constexpr, WEIGHTED: gl.constexpr, TOKENS: gl.constexpr, S: gl.constexpr,
    RW: gl.constexpr,
    R: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """Y[pid_k, slots] = `acc`, one row tile's sums for token block NTH, times router weights if WEIGHTED."""
    LS: gl.constexpr = _sums_layout(S * RW, R)
    rw = gl.arange(0, RW, layout=_only(LS, 0, 6))[:, None, None, None, None, None]
    g = gl.arange(0, 8, layout=_only(LS, 1, 6))[None, :, None, None, None, None]
    c = gl.arange(0, 4, layout=_only(LS, 2, 6))[None, None, :, None, None, None]
    r = gl.arange(0, R, layout=_only(LS, 3, 6))[None, None, None, :, None, None]
    h = gl.arange(0, 2, layout=_only(LS, 4, 6))[None, None, None, None, :, None]
    b = gl.arange(0, 2, layout=_only(LS, 5, 6))[None, None, None, None, None, :]
    row = (tile * (RW * R) + rw * R + r) * 16 + h * 8 + g
    token = NTH * 8 + 2 * c + b
    slot = _slots(PLAN, p, token, count, TOKENS, PLANNED)
    if HALVES:
        acc = acc * factors[0]
    if BIAS:
        at = B + (expert.to(gl.int64) * N + row)
        acc = acc + gl.load(at, mask=(row < N) & (pid_k == 0), other=0.0).to(gl.float32)
    if WEIGHTED:
        acc = acc * gl.load(WEIGHTS + slot, mask=token < count, other=0.0)
    to = Y + ((pid_k * T.to(gl.int64) + slot) * NX + row)
    gl.store(to, acc, mask=(token < count) & (row < NX))


@gluon.jit
def _tokens(
    filled, summed, X, PLAN, p, count, begin, end, KX2, TOP_K: gl.constexpr, PLANNED: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, NT: gl.constexpr, TR: gl.constexpr,
    S: gl.constexpr, RW: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Copies tokens to shared memory, STEPS steps from tile column `begin` on, and computes their sums."""
    last = gl.minimum(KX2, end * 32)
    SCALED: gl.constexpr = _input_scaled(KIND)
    if TR <= 2:
        _fill(
            filled, X, PLAN, p, count, begin, last, KX2,
            TOP_K, PLANNED, SCALED, D, NT, TR, S, RW, STEPS, 1, TR,
        )  # fmt: skip
    elif count <= 2:
        _fill(
            filled, X, PLAN, p, count, begin, last, KX2,
            TOP_K, PLANNED, SCALED, D, NT, TR, S, RW, STEPS, 1, 2,
        )  # fmt: skip
    else:
        _fill(
            filled, X, PLAN, p, count, begin, last, KX2,
            TOP_K, PLANNED, SCALED, D, NT, TR, S, RW, STEPS, NT, TR,
        )  # fmt: skip
    thread_barrier()
    if _factor(KIND) != 0:
        _sum_tokens(filled, summed, KIND, GROUP, D * NT * S, TR, S * RW, STEPS)
        thread_barrier()


@gluon.jit
def _stream(
    X, W, SC, ZP, B, F, OUT, IDS, PLAN, WEIGHTS, T, N, K, KX2, NX, alpha, limit, p, expert, count, pid_n,
    pid_k, before, FIRST: gl.constexpr, TOP_K: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, HALVES: gl.constexpr, WEIGHTED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    STEPS: gl.constexpr, TILES: gl.constexpr, SPLIT: gl.constexpr, PLANNED: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """One record's tokens times TILES row tiles (of 16 * RW * R rows), one after the other without a bubble.

    WAIT is what to wait for before reading tokens: "launch" (the previous one), "record" (until its third
    word is `before`), or "" (nothing).
    """
    NT: gl.constexpr = (TOKENS + 7) // 8
    TR: gl.constexpr = _smaller(TOKENS, 8)
    L: gl.constexpr = _words_layout(S, RW, R)
    L4: gl.constexpr = gl.SliceLayout(4, L)
    TW: gl.constexpr = _tile_words(KIND)
    RUN: gl.constexpr = _run_words(KIND, GROUP)
    STRIDE: gl.constexpr = _scale_stride(KIND, GROUP)
    BLOCKS: gl.constexpr = RW * R
    KT = K // 64
    spans = KT
    if GROUP == -1:
        spans = 1
    elif GROUP > 64:
        spans = KT // (GROUP // 64)
    begin = (KT * pid_k) // SPLIT
    end = (KT * (pid_k + 1)) // SPLIT
    s_ = gl.arange(0, S, layout=_only(L4, 0, 4))[:, None, None, None]
    rw = gl.arange(0, RW, layout=_only(L4, 1, 4))[None, :, None, None]
    lane = gl.arange(0, 32, layout=_only(L4, 2, 4))[None, None, :, None]
    r = gl.arange(0, R, layout=_only(L4, 3, 4))[None, None, None, :]
    tile0 = pid_n * TILES
    tiles = gl.minimum(gl.cdiv(N // 16, BLOCKS) - tile0, TILES)
    block = tile0 * BLOCKS + rw * R + r
    row = expert * (N // 64) + block // 4
    word = gl.arange(0, 4, layout=_only(L, 4, 5))[None, None, None, None, :]
    offset = row.to(gl.int64) * KT * TW + ((block % 4) * (TW // 4) + lane * 4 + (begin + s_) * TW)
    wp = (gl.expand_dims(W + offset, 4) + word).to(gl.int64)
    at = row.to(gl.int64) * (spans * RUN) + (
        ((block % 4) * 8 + lane // 4) * (RUN // 32) + (begin + s_) * STRIDE
    )
    sp = SC + at
    zp = ZP + at
    k0 = begin + s_ + rw * 0 + lane * 0 + r * 0
    k = k0
    inside = gl.where(block < N // 16, end, 0)
    left = inside - k0
    factors = (0.0, 0.0)
    if HALVES:
        factors = (gl.load(F + expert * HALVES), gl.load(F + expert * HALVES + HALVES - 1))
    w = ()
    s = ()
    z = ()
    for d in gl.static_range(D):
        w1, s1, z1 = _tile_loads(wp, sp, zp, k, left, KIND, GROUP, d * S, S, RW, R)
        w = w + (w1,)
        s = s + (s1,)
        z = z + (z1,)
    if WAIT == "launch":
        _wait()
    elif WAIT == "record":
        _wait_for((PLAN + p.to(gl.int64) * (TOKENS + 8) + 2).to(gl.int64), before)
    UNITS: gl.constexpr = D * NT * S
    EIGHTS: gl.constexpr = (STEPS + 7) // 8
    filled = gl.allocate_shared_memory(
        gl.int32, [STEPS, D, NT * S, TR, 32], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    xs = reinterpret(
        filled, gl.int32, [STEPS * D * NT, S, TR, 32], gl.SwizzledSharedLayout(4, 1, TR, [2, 1, 0])
    )
    summed = filled
    qs = xs
    if _factor(KIND) != 0:
        Q: gl.constexpr = _sums_shape(GROUP)
        summed = gl.allocate_shared_memory(
            gl.float32, [EIGHTS, 8, UNITS, 4, Q], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        )
        qs = reinterpret(
            summed, gl.float32, [EIGHTS * 8 * D * NT, S, 4, Q], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
    _tokens(
        filled, summed, X, PLAN, p, count, begin, end, KX2,
        TOP_K, PLANNED, KIND, GROUP, D, NT, TR, S, RW, STEPS,
    )  # fmt: skip
    # Pointer increments from the last step of a row tile to the first step of the next.
    wrap_w = (BLOCKS // 4) * KT * TW - (STEPS - 1) * (D * S * TW)
    wrap_s = (BLOCKS // 4) * spans * RUN - (STEPS - 1) * (D * S * STRIDE)
    for tile in range(tiles):
        acc = ()
        for _ in gl.static_range(NT):
            acc = acc + (gl.full([S, RW, 32, R, 4], 0.0, gl.float32, L),)
        block += BLOCKS
        inside = gl.where((block < N // 16) & (tile + 1 < tiles), end, 0)
        for i in range(STEPS):
            wraps = i == STEPS - 1
            wp += gl.where(wraps, wrap_w, D * S * TW) * 4
            step_s = gl.where(wraps, wrap_s, D * S * STRIDE)
            sp += step_s
            zp += step_s
            k = gl.where(wraps, k0, k + D * S)
            left = gl.where(wraps, inside - k0, left - D * S)
            wn = ()
            sn = ()
            zn = ()
            for d in gl.static_range(D):
                acc = _tile(w[d], s[d], z[d], xs, qs, (i * D + d) * NT, acc, KIND, GROUP, NT, TR, S, RW, R)
                w1, s1, z1 = _tile_loads(wp, sp, zp, k, left, KIND, GROUP, d * S, S, RW, R)
                _keep_order()
                wn = wn + (w1,)
                sn = sn + (s1,)
                zn = zn + (z1,)
            w = wn
            s = sn
            z = zn
        for n in gl.static_range(NT):
            sums = _summed(acc[n], _output_factor(KIND), S, RW, R)
            if FIRST:
                _store_first(
                    sums, n, B, factors, OUT, PLAN, WEIGHTS, N, NX, alpha, limit, p, expert, count,
                    tile0 + tile, ACT, GATED, BIAS, HALVES, WEIGHTED, TOKENS, S, RW, R, PLANNED,
                )  # fmt: skip
            else:
                _store_second(
                    sums, n, B, factors, OUT, PLAN, WEIGHTS, T, N, NX, p, expert, count, tile0 + tile, pid_k,
                    BIAS, HALVES, WEIGHTED, TOKENS, S, RW, R, PLANNED,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["T"])
def _stream_gemm1_kernel(
    X, W, SC, ZP, B, F, H, IDS, PLAN, WEIGHTS, T, N, K, KX2, NX, RUNS, alpha, limit,
    E: gl.constexpr, TOP_K: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    HALVES: gl.constexpr, WEIGHTED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, S: gl.constexpr,
    RW: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr,
    TILES: gl.constexpr,
    PLANNED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """H ``[T, NX]`` by slot = the activation of the first GEMM; grid (records * runs of row tiles)."""
    p = gl.program_id(0) // RUNS
    if PDL:
        _wait()
        _let_next_start()
    expert, count = _record(IDS, PLAN, p, T, TOKENS, PLANNED)
    if (expert >= 0) & (expert < E):
        _stream(
            X, W, SC, ZP, B, F, H, IDS, PLAN, WEIGHTS, T, N, K, KX2, NX, alpha, limit, p, expert, count,
            gl.program_id(0) % RUNS, 0, 0, True, TOP_K, ACT, GATED, BIAS, HALVES, WEIGHTED, KIND, GROUP,
            TOKENS, S, RW, R, D, STEPS, TILES, 1, PLANNED, "",
        )  # fmt: skip


@gluon.jit(do_not_specialize=["T"])
def _stream_gemm2_kernel(
    H, W, SC, ZP, B, F, Y, IDS, PLAN, WEIGHTS, T, N, K, KX2, NX, RUNS,
    E: gl.constexpr, BIAS: gl.constexpr, HALVES: gl.constexpr, WEIGHTED: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    STEPS: gl.constexpr, TILES: gl.constexpr, SPLIT: gl.constexpr, PLANNED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Y ``[SPLIT, T, NX]`` fp32 parts by slot; grid (records * runs of row tiles, SPLIT)."""
    p = gl.program_id(0) // RUNS
    if PDL:
        _let_next_start()
    # The plan and the ids were complete before the first GEMM started.
    expert, count = _record(IDS, PLAN, p, T, TOKENS, PLANNED)
    if (expert >= 0) & (expert < E):
        _stream(
            H, W, SC, ZP, B, F, Y, IDS, PLAN, WEIGHTS, T, N, K, KX2, NX, 0.0, 0.0, p, expert, count,
            gl.program_id(0) % RUNS, gl.program_id(1), 0, False, 1, "", False, BIAS, HALVES, WEIGHTED, KIND,
            GROUP, TOKENS, S, RW, R, D, STEPS, TILES, SPLIT, PLANNED, "launch" if PDL else "",
        )  # fmt: skip
    elif PDL:
        _wait()

# mypy: ignore-errors
# ruff: noqa: RUF005 (device code has no starred expressions)
"""Operands of the streaming kernels: loads of weights and scales, tokens in shared memory, a tile's products.

`stream_kernels` explains the names of dimensions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import async_copy, async_load, reinterpret
from .stream_layouts import (
    _factor,
    _fill_batch,
    _fill_layout,
    _is_wide,
    _keeps_nan,
    _only,
    _pairs_layout,
    _quads_layout,
    _run_words,
    _scale_stride,
    _smaller,
    _sums_asm,
    _sums_shape,
    _tile_asm,
    _tile_words,
    _tokens_layout,
    _words_layout,
)


@gluon.jit
def _spread(v, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr):
    """[S, RW, 32, R] broadcast to [S, RW, 32, R, 4]: four copies of a lane's value."""
    L: gl.constexpr = _words_layout(S, RW, R)
    v, _ = gl.broadcast(gl.expand_dims(v, 4), gl.full([S, RW, 32, R, 4], 0, v.dtype, L))
    return v


@gluon.jit
def _b_operand(xs, N: gl.constexpr, TR: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr):
    """B operands from `xs` [N, TR, 32] in shared memory, N <= S: a lane's words as two [N, RW, 32, R, 4]."""
    L: gl.constexpr = _words_layout(S, RW, R)
    P: gl.constexpr = _tokens_layout(S, RW, TR)
    x = gl.expand_dims(gl.expand_dims(xs.load(gl.SliceLayout(1, gl.SliceLayout(2, P))), 1), 2)
    x, _ = gl.broadcast(x, gl.full([N, RW, 8 // TR, TR, 32], 0, gl.int32, P))
    x = x.reshape([N, RW, 8, 2, 4, 4]).permute((0, 1, 2, 5, 4, 3)).reshape([N, RW, 32, 4, 2])
    lo, hi = gl.split(x)
    lo = gl.convert_layout(lo, gl.SliceLayout(3, L), assert_trivial=True)
    hi = gl.convert_layout(hi, gl.SliceLayout(3, L), assert_trivial=True)
    like = gl.full([N, RW, 32, R, 4], 0, gl.int32, L)
    lo, _ = gl.broadcast(gl.expand_dims(lo, 3), like)
    hi, _ = gl.broadcast(gl.expand_dims(hi, 3), like)
    return lo, hi


@gluon.jit
def _quads(q, GROUP: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr):
    """Token sums from `q` [S, 4, Q] in shared memory, as one or two [S, RW, 32, R, 4]."""
    L: gl.constexpr = _words_layout(S, RW, R)
    Q: gl.constexpr = _sums_shape(GROUP)
    P: gl.constexpr = _quads_layout(S, RW, Q)
    v = q.load(gl.SliceLayout(1, gl.SliceLayout(2, P)))
    v = gl.expand_dims(gl.expand_dims(v, 1), 2)
    v, _ = gl.broadcast(v, gl.full([S, RW, 8, 4, Q], 0.0, gl.float32, P))
    like = gl.full([S, RW, 32, R, 4], 0.0, gl.float32, L)
    if GROUP == 32:
        lo, hi = gl.split(v.reshape([S, RW, 32, 2, 4]).permute((0, 1, 2, 4, 3)))
        lo, _ = gl.broadcast(
            gl.expand_dims(gl.convert_layout(lo, gl.SliceLayout(3, L), assert_trivial=True), 3), like
        )
        hi, _ = gl.broadcast(
            gl.expand_dims(gl.convert_layout(hi, gl.SliceLayout(3, L), assert_trivial=True), 3), like
        )
        quads = (lo, hi)
    else:
        v = gl.convert_layout(v.reshape([S, RW, 32, 4]), gl.SliceLayout(3, L), assert_trivial=True)
        v, _ = gl.broadcast(gl.expand_dims(v, 3), like)
        quads = (v,)
    return quads


@gluon.jit
def _tile(w, s, z, xs, qs, at, acc, KIND: gl.constexpr, GROUP: gl.constexpr, NT: gl.constexpr,
          TR: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """`acc` (a tuple of NT) plus the products of one tile.

    In shared memory are the tokens, `xs` [at, S, TR, 32], and their sums, `qs` [at, S, 4, Q].
    """
    ASM: gl.constexpr = _tile_asm(KIND, GROUP, NT)
    args = w + s + z
    for n in gl.static_range(NT):
        lo, hi = _b_operand(xs.index(at + n), S, TR, S, RW, R)
        args = args + (lo, hi, acc[n])
        if _factor(KIND) != 0:
            args = args + _quads(qs.index(at + n), GROUP, S, RW, R)
    if NT == 1:
        sums = (gl.inline_asm_elementwise(ASM[0], ASM[1], args, dtype=gl.float32, is_pure=True, pack=4),)
    else:
        gl.static_assert(NT == 2, "one or two blocks of 8 tokens")
        sums = gl.inline_asm_elementwise(
            ASM[0], ASM[1], args, dtype=(gl.float32, gl.float32), is_pure=True, pack=4
        )
    return sums


@gluon.jit
def _sum_tokens(filled, qs, KIND: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, TR: gl.constexpr,
                W: gl.constexpr, STEPS: gl.constexpr):  # fmt: skip
    """Sums the tokens over each group of columns, times the factor.

    From `filled` [STEPS, UNITS, TR, 32] to `qs` [STEPS up to a multiple of 8, UNITS, 4, Q]. A warp sums 8
    steps of one unit at a time, each in separate rows of the accumulator.
    """
    G: gl.constexpr = _smaller(UNITS, W)
    SHARE: gl.constexpr = UNITS // G
    L: gl.constexpr = _words_layout(W, 1, 1)
    ASM: gl.constexpr = _sums_asm(KIND, GROUP)
    Q: gl.constexpr = _sums_shape(GROUP)
    lane = gl.arange(0, 32, layout=_only(L, 2, 5))[None, None, :, None, None]
    xs = reinterpret(
        filled, gl.int32, [STEPS * SHARE, G, TR, 32], gl.SwizzledSharedLayout(4, 1, TR, [2, 1, 0])
    )
    for first in gl.static_range(0, STEPS, 8):
        for share in gl.static_range(SHARE):
            q = gl.full([G, 1, 32, 1, 4], 0.0, gl.float32, L)
            for chain in gl.static_range(4):  # sums in different rows are independent
                some = gl.full([G, 1, 32, 1, 4], 0.0, gl.float32, L)
                for i in gl.static_range(chain, _smaller(8, STEPS - first), 4):
                    lo, hi = _b_operand(xs.index((first + i) * SHARE + share), G, TR, W, 1, 1)
                    select, _ = gl.broadcast(gl.where(lane // 4 == i, _factor(KIND), 0), lo)
                    some = gl.inline_asm_elementwise(
                        ASM[0], ASM[1], [lo, hi, select, some], dtype=gl.float32, is_pure=True, pack=4
                    )
                q += some
            # Rows g are steps. A pair initializes the sums of rows g and of rows g + 8, hence twice.
            q = q.reshape([G, 8, 4, 2, 2])
            q = gl.join(q, q).permute((1, 0, 2, 3, 5, 4))
            if GROUP != 32:
                q, _ = gl.split(q.permute((0, 1, 2, 4, 5, 3)))
            to = qs.index(first // 8).slice(share * G, G, dim=1)
            to.store(q.reshape([8, G, 4, Q]))


@gluon.constexpr_function
def _load_asm(ahead, offset, cleared):
    """PTX that loads 16 bytes at `offset` if more than `ahead` columns are left; else it loads nothing, or
    zeros if they are to be `cleared`."""
    zeros = " ".join(f"@!p mov.b32 ${i}, 0;" for i in range(4)) if cleared else ""
    return (
        f"{{ .reg .pred p; setp.gt.s32 p, $8, {ahead}; {zeros} "
        f"@p ld.global.cg.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}]; }}"
    )


@gluon.jit
def _code_words(wp, left, KIND: gl.constexpr, AHEAD: gl.constexpr, S: gl.constexpr, RW: gl.constexpr,
                R: gl.constexpr):  # fmt: skip
    """Loads a lane's code words of one tile for `_tile`: one tensor, or two for 8-bit codes.

    By inline PTX, as Triton's masked loads clear their registers first. That is needed only where codes can
    be NaN: any other code times a token of 0 is 0.
    """
    L: gl.constexpr = _words_layout(S, RW, R)
    left, _ = gl.broadcast(gl.expand_dims(left, 4), gl.full([S, RW, 32, R, 4], 0, gl.int32, L))
    OFFSET: gl.constexpr = AHEAD * _tile_words(KIND) * 4
    CLEARED: gl.constexpr = _keeps_nan(KIND)
    w = ()
    for half in gl.static_range(2 if _is_wide(KIND) else 1):
        words = gl.inline_asm_elementwise(
            _load_asm(AHEAD, OFFSET + half * 512, CLEARED), "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [wp, left],
            dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
        w = w + (words,)
    return w


@gluon.jit
def _scale_words(sp, k, valid, KIND: gl.constexpr, GROUP: gl.constexpr,
                 S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Loads the scale (or zero-point) words of a tile, [S, RW, 32, R], for `_tile`: two tensors.

    `sp` points to tile column `k`, or to column 0 if groups are wider than a tile. Columns past the end get a
    scale of 0, so their codes do not matter.
    """
    if _run_words(KIND, GROUP) == 64:
        P: gl.constexpr = _pairs_layout(S, RW, R)
        P4: gl.constexpr = gl.SliceLayout(4, P)
        pair = gl.expand_dims(gl.convert_layout(sp, P4, assert_trivial=True), 4)
        pair = pair + gl.arange(0, 2, layout=_only(P, 4, 5))[None, None, None, None, :]
        valid, _ = gl.broadcast(
            gl.expand_dims(gl.convert_layout(valid, P4, assert_trivial=True), 4),
            gl.full([S, RW, 32, R, 2], 0, gl.int32, P),
        )
        lo, hi = gl.split(gl.load(pair, mask=valid, other=0))
        L: gl.constexpr = gl.SliceLayout(4, _words_layout(S, RW, R))
        lo = _spread(gl.convert_layout(lo, L, assert_trivial=True), S, RW, R)
        hi = _spread(gl.convert_layout(hi, L, assert_trivial=True), S, RW, R)
    else:
        if GROUP > 64:
            sp = sp + (k // (GROUP // 64)) * 32
        lo = _spread(gl.load(sp, mask=valid, other=0), S, RW, R)
        hi = lo
    return (lo, hi)


@gluon.jit
def _tile_loads(wp, sp, zp, k, left, KIND: gl.constexpr, GROUP: gl.constexpr, AHEAD: gl.constexpr,
                S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Issues the loads of codes, scales and zero points of the tile AHEAD columns after `k`.

    `left` is the number of columns from `k` to the end.
    """
    STRIDE: gl.constexpr = _scale_stride(KIND, GROUP)
    valid = left > AHEAD
    w = _code_words(wp, left, KIND, AHEAD, S, RW, R)
    s = _scale_words(sp + AHEAD * STRIDE, k + AHEAD, valid, KIND, GROUP, S, RW, R)
    z = ()
    if KIND[3]:
        z = _scale_words(zp + AHEAD * STRIDE, k + AHEAD, valid, KIND, GROUP, S, RW, R)
    return w, s, z


@gluon.jit
def _record(IDS, PLAN, p, T, TOKENS: gl.constexpr, PLANNED: gl.constexpr):
    """(expert, number of tokens) of program `p`; the expert is -1 if there is none.

    Read from L2: the second GEMM reads it before its wait, when L1 may still hold an earlier call's records.
    """
    if PLANNED:
        expert = gl.load(PLAN + p.to(gl.int64) * (TOKENS + 8), cache_modifier=".cg")
        count = gl.load(PLAN + p.to(gl.int64) * (TOKENS + 8) + 1, cache_modifier=".cg")
    else:
        expert = gl.load(IDS + p, cache_modifier=".cg")
        count = 1
    return expert, count


@gluon.jit
def _slots(PLAN, p, n, count, TOKENS: gl.constexpr, PLANNED: gl.constexpr):
    """Slots of tokens `n` (any shape) of a program; 0 past its last token."""
    if PLANNED:
        slots = gl.load(PLAN + p.to(gl.int64) * (TOKENS + 8) + 8 + n, mask=n < count, other=0)
    else:
        slots = n * 0 + p
    return slots


@gluon.jit
def _times_2_64(v):
    """Multiplies pairs of bf16 by 2^64."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 m, n; mov.b32 m, 0x5F805F80; mov.b32 n, 0x80008000; fma.rn.bf16x2 $0, $1, m, n; }",
        "=r,r", [v], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _fill(filled, X, PLAN, p, count, begin, last, KX2, TOP_K: gl.constexpr, PLANNED: gl.constexpr,
          SCALED: gl.constexpr, D: gl.constexpr, NT: gl.constexpr, TR: gl.constexpr, S: gl.constexpr,
          RW: gl.constexpr, STEPS: gl.constexpr, NF: gl.constexpr, TT: gl.constexpr):  # fmt: skip
    """Copies the first TT tokens of NF blocks, from tile column `begin` on, into `filled`.

    `filled` is shared memory [STEPS, D, NT * S, TR, 32]. Words from `last` on become zero; entries past the
    last token do not affect the sums of others. A token's row of X is its slot divided by TOP_K. One or two
    tokens are copied through registers, more by cp.async.
    """
    L: gl.constexpr = _fill_layout(D, S, RW, TT)
    HOW: gl.constexpr = _fill_batch(D, S, RW, STEPS, NF, TT)
    BATCH: gl.constexpr = HOW[0]
    AT_ONCE: gl.constexpr = HOW[1]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    to = reinterpret(filled, gl.int32, [STEPS // BATCH, BATCH, D, NT * S, TR, 8, 4], PLAIN)
    i = gl.arange(0, BATCH, layout=_only(L, 0, 6))[:, None, None, None, None, None]
    d = gl.arange(0, D, layout=_only(L, 1, 6))[None, :, None, None, None, None]
    ns = gl.arange(0, NF * S, layout=_only(L, 2, 6))[None, None, :, None, None, None]
    t = gl.arange(0, TT, layout=_only(L, 3, 6))[None, None, None, :, None, None]
    piece = gl.arange(0, 8, layout=_only(L, 4, 6))[None, None, None, None, :, None]
    word = gl.arange(0, 4, layout=_only(L, 5, 6))[None, None, None, None, None, :]
    n = (ns // S) * 8 + t
    live = n < count
    slot = _slots(PLAN, p, n, count, (NT - 1) * 8 + TR, PLANNED)
    # The B operand's swizzle, written out: swizzled shared memory cannot be sliced between tokens.
    column = (begin + (i * D + d) * S + ns % S) * 32 + (piece ^ t) * 4
    from_ = X + ((slot // TOP_K).to(gl.int64) * KX2 + (column + word))
    if TT <= 2:
        for first in gl.static_range(0, STEPS // BATCH, AT_ONCE):
            x = ()
            for batch in gl.static_range(_smaller(AT_ONCE, STEPS // BATCH - first)):
                forward = (first + batch) * (BATCH * D * S * 32)
                valid, _ = gl.broadcast(live & (column + forward < last), column + word)
                x = x + (gl.load(from_ + forward, mask=valid, other=0),)
            for batch in gl.static_range(_smaller(AT_ONCE, STEPS // BATCH - first)):
                part = to.index(first + batch).slice(0, NF * S, dim=2).slice(0, TT, dim=3)
                part.store(_times_2_64(x[batch]) if SCALED else x[batch])
    else:
        for batch in gl.static_range(STEPS // BATCH):
            forward = batch * (BATCH * D * S * 32)
            valid, _ = gl.broadcast(live & (column + forward < last), column + word)
            part = to.index(batch).slice(0, NF * S, dim=2).slice(0, TT, dim=3)
            async_load(part, from_ + forward, mask=valid)
        async_copy.commit_group()
        async_copy.wait_group(0)
        if SCALED:
            for batch in gl.static_range(STEPS // BATCH):
                part = to.index(batch).slice(0, NF * S, dim=2).slice(0, TT, dim=3)
                part.store(_times_2_64(part.load(L)))


@gluon.jit
def _keep_order():
    """Memory accesses before this are issued before those after it; no access is waited for.

    Otherwise ptxas dequantizes several tiles at once, whose registers become free for loads only after the
    last one, with no load in flight meanwhile.
    """
    gl.inline_asm_elementwise("bar.warp.sync -1; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

# mypy: ignore-errors
"""Device code that streams int4 tiles of ``moectl-mtile64`` into matrix instructions, one tile per warp.

As in `marlin_product_kernels`, weights go from memory directly to the registers where the products need them,
warps split a reduction or have separate tiles, and no loop has a barrier. A warp takes the four 512-byte
pieces of a 64x64 tile, 16 rows each; word j of lane ``4 g + c`` holds rows g + 8 h and columns
``16 j + 2 c + 8 k8 + b``, with code (k8, h, b) at bits ``16 b + 8 k8 + 4 h``. Rows g and rows g + 8 are
separate products: for experts with a gate, these are gates and their ups.
"""

import triton
import triton.language as tl

from .marlin_kernels import _put, _tile_rows
from .marlin_product_kernels import _added, _by_element, _operand_b, _raised
from .mtile64_kernels import _nearest
from .portable_kernels import _gated, _ungated


@triton.jit
def _row_pairs(v, G: tl.constexpr, W: tl.constexpr):
    """Rows g and rows g + 8, each [c, g, W, G, rb], of per-row values as loaded, [c, g, W, rb, (h, G)]."""
    v = tl.permute(tl.reshape(v, (4, 8, W, 4, 2, G)), (0, 1, 2, 5, 3, 4))
    return tl.split(v)


@triton.jit
def _as_operand(q, W: tl.constexpr, G: tl.constexpr):
    """[G * W, 32, 32 / G] from axes (W, rb, g, c, (G, j), b)."""
    q = tl.permute(tl.reshape(q, (W, 4, 8, 4, G, 4 // G, 2)), (4, 0, 1, 2, 5, 3, 6))
    return tl.reshape(q, (G * W, 32, 32 // G))


@triton.jit
def _tile_sums(
    codes, scales, zeros, x0, x1, BASE: tl.constexpr, ZEROS: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
    BM: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Each warp's tile times its tokens, by group: [G * W, 32, BM] fp32 for rows g and for rows g + 8."""
    k0h0, k0h1, k1h0, k1h1 = _raised(tl.reshape(codes, (W, 4, 8, 4, 4, 2)), BASE, INTERP)
    b0 = _operand_b(x0, W, G, 4 // G, BM)
    b1 = _operand_b(x1, W, G, 4 // G, BM)
    if INTERP:
        b0 = b0.to(tl.float32)
        b1 = b1.to(tl.float32)
    ones = tl.full((G * W, 16, 32 // G), 1.0 if ZEROS else -8.0 - BASE, dtype=b0.dtype)
    total = tl.reshape(tl.dot(ones, b1, tl.dot(ones, b0)), (G * W, 1, 16, BM))
    total = tl.reshape(tl.broadcast_to(total, (G * W, 2, 16, BM)), (G * W, 32, BM))
    start = tl.zeros((G * W, 32, BM), dtype=tl.float32) if ZEROS else total
    low = tl.dot(_as_operand(k1h0, W, G), b1, tl.dot(_as_operand(k0h0, W, G), b0, start))
    high = tl.dot(_as_operand(k1h1, W, G), b1, tl.dot(_as_operand(k0h1, W, G), b0, start))
    if ZEROS:
        z0, z1 = _row_pairs(zeros.to(tl.float32) + BASE, G, W)
        low -= total * _by_element(z0, BM, G, W)
        high -= total * _by_element(z1, BM, G, W)
    s0, s1 = _row_pairs(scales, G, W)
    low = low * _by_element(s0.to(tl.float32), BM, G, W)
    high = high * _by_element(s1.to(tl.float32), BM, G, W)
    return low, high


@triton.jit
def _unpacked(x, W: tl.constexpr, G: tl.constexpr, BM: tl.constexpr):
    """Axes (c, token, W, G, j, BM/8, b) from (c, token, W, BM/8, (G, j, b))."""
    return tl.permute(tl.reshape(x, (4, 8, W, BM // 8, G, 4 // G, 2)), (0, 1, 2, 4, 5, 3, 6))


@triton.jit
def _streamed(
    X, W, S, Z, x_rows, live, expert, first, N, K, KX, LX, BASE: tl.constexpr, ZEROS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, V: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr,
    WAIT: tl.constexpr, ORDERED: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """[V, 4 rb, 8 g, BM] fp32 for rows ``16 rb + g``, and for ``16 rb + g + 8``, of V tiles from `first` on.

    The KW warps of a tile split the reduction; GROUP is the columns per scale, 0 for one scale per row. EVEN
    says that KW divides the tiles of a row and tokens are as wide. With WAIT, waits for the tokens. ORDERED
    tokens are in the order of `sort_and_combine_kernels._order`.
    """
    G: tl.constexpr = 2 if GROUP == 32 else 1
    NW: tl.constexpr = V * KW
    tiles = K // 64
    SPAN: tl.constexpr = GROUP // 64 if GROUP > 32 else 1
    runs = 1 if GROUP == 0 else tiles // SPAN
    warp = tl.arange(0, NW)
    share = warp % KW
    row = tl.minimum(first + warp // KW, N // 64 - 1)
    base = expert.to(tl.int64) * (N // 64)

    part = tl.arange(0, 4)[None, :, None] * 256 + tl.arange(0, 256)[None, None, :]
    w_ptr = W + base * tiles * 1024 + ((row * tiles + share) * 1024)[:, None, None] + part

    # Scales and zero points: axes (c, g, W, rb, (h, G)).
    q = tl.arange(0, 2 * G)[None, None, None, None, :]
    of_row = (tl.arange(0, 4) * 8)[None, None, None, :, None] + tl.arange(0, 8)[None, :, None, None, None]
    of_row = of_row * (2 * G) + tl.zeros((4, 1, 1, 1, 1), dtype=tl.int32)
    s_ptr = S + base * runs * (64 * G) + (row * runs * (64 * G))[None, None, :, None, None] + of_row
    z_ptr = Z + base * runs * (64 * G) + (row * runs * (64 * G))[None, None, :, None, None] + of_row

    x_row = tl.permute(tl.reshape(x_rows.to(tl.int64), (BM // 8, 8)), (1, 0)) * KX
    x_live = tl.permute(tl.reshape(live, (BM // 8, 8)), (1, 0))
    if ORDERED:
        # Tokens: axes (c, token, W, BM/8, (G, j, b)).
        x_at = (tl.arange(0, 4) * 16)[:, None, None, None, None]
        x_at += (share * 64)[None, None, :, None, None]
        x_at += tl.arange(0, 8)[None, None, None, None, :]
        place = tl.arange(0, 8)[None, None, None, None, :]
        column = (place >> 1) * 16 + (place & 1) + (share * 64)[None, None, :, None, None]
        column += (tl.arange(0, 4) * 2)[:, None, None, None, None]
        x_live = x_live[None, :, None, :, None]
        x_ptr = X + x_row[None, :, None, :, None] + x_at
    else:
        # Tokens: axes (c, token, W, G, j, BM/8, b).
        x_at = (tl.arange(0, 4) * 2)[:, None, None, None, None, None, None]
        x_at += (share * 64)[None, None, :, None, None, None, None]
        x_at += (tl.arange(0, G) * (64 // G))[None, None, None, :, None, None, None]
        x_at += (tl.arange(0, 4 // G) * 16)[None, None, None, None, :, None, None]
        x_at += tl.arange(0, 2)[None, None, None, None, None, None, :]
        x_live = x_live[None, :, None, None, None, :, None]
        x_ptr = X + x_row[None, :, None, None, None, :, None] + x_at

    low = tl.zeros((NW, 32, BM), dtype=tl.float32)
    high = tl.zeros((NW, 32, BM), dtype=tl.float32)
    z = tl.zeros((4, 8, NW, 4, 2 * G), dtype=tl.int16)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    for step in tl.range(0, tl.cdiv(tiles, KW), num_stages=1):
        at = step * KW
        inside = None if EVEN else (share + at < tiles)
        w = tl.load(w_ptr + at * 1024, mask=None if EVEN else inside[:, None, None], cache_modifier=".cg")
        run = (share + at) // SPAN if GROUP > 0 else share * 0
        run = (run * (64 * G))[None, None, :, None, None] + q
        in_run = None if EVEN else inside[None, None, :, None, None]
        s = tl.load(s_ptr + run) if EVEN else tl.load(s_ptr + run, mask=in_run, other=0.0)
        if ZEROS:
            z = tl.load(z_ptr + run) if EVEN else tl.load(z_ptr + run, mask=in_run, other=0)
        if EVEN:
            in_x0 = x_live
            in_x1 = x_live
        elif ORDERED:
            in_x0 = x_live & inside[None, None, :, None, None]
            in_x1 = in_x0
        else:
            in_x0 = x_live & (x_at + at * 64 < LX)
            in_x1 = x_live & (x_at + at * 64 + 8 < LX)
        x0 = tl.load(x_ptr + at * 64, mask=in_x0, other=0.0)
        x1 = tl.load(x_ptr + at * 64 + 8, mask=in_x1, other=0.0)
        if ORDERED:
            if not EVEN:  # columns past the last one were never written
                x0 = tl.where(column + at * 64 < LX, x0, 0.0)
                x1 = tl.where(column + at * 64 + 8 < LX, x1, 0.0)
            x0 = _unpacked(x0, NW, G, BM)
            x1 = _unpacked(x1, NW, G, BM)
        a, b = _tile_sums(w, s, z, x0, x1, BASE, ZEROS, G, NW, BM, INTERP)
        low = _added(low, a, G)
        high = _added(high, b, G)
    low = tl.sum(tl.reshape(low, (V, KW, 4, 8, BM)), 1)
    high = tl.sum(tl.reshape(high, (V, KW, 4, 8, BM)), 1)
    return low, high


@triton.jit
def _biased(v, rows, B, expert, N, BIAS: tl.constexpr):
    """The sums v [V, 4, 8, BM] of `rows` plus their bias."""
    if BIAS:
        b = tl.load(B + expert.to(tl.int64) * N + rows, mask=rows < N, other=0.0)
        v += b.to(tl.float32)[:, :, :, None]
    return v


@triton.jit
def _record(PLAN, p, BM: tl.constexpr, PLANNED: tl.constexpr):
    """(expert, slots [BM], live [BM]) of record `p`; an expert outside ``[0, E)`` means no work.

    With PLANNED, PLAN has the records of `sort_and_combine.records_of`; else it has ids, one record each.
    Loads bypass L1: the second GEMM reads before it waits, when L1 may still hold data of an earlier call.
    """
    n = tl.arange(0, BM)
    if PLANNED:
        record = PLAN + p * (8 + BM)
        expert = tl.load(record, cache_modifier=".cg")
        live = n < tl.load(record + 1, cache_modifier=".cg")
        slots = tl.load(record + 8 + n, mask=live, other=0, cache_modifier=".cg")
    else:
        expert = tl.load(PLAN + p, cache_modifier=".cg")
        live = n < 1
        slots = n * 0 + p
    return expert, slots, live


@triton.jit
def _keep(ptr, v, columns, live, NX, INTERP: tl.constexpr):
    """Stores v [..., BM] to `columns` [...] of the rows at `ptr` [BM], ordered as `_streamed` reads them."""
    BM: tl.constexpr = ptr.shape[0]
    C: tl.constexpr = columns.numel
    columns = tl.reshape(columns, (C,))
    place = (
        (columns & ~63) | ((columns >> 1) & 3) * 16 | (columns & 8) | ((columns >> 4) & 3) * 2 | (columns & 1)
    )
    v = _nearest(tl.trans(tl.reshape(v, (C, BM))), ptr.dtype.element_ty, INTERP).to(ptr.dtype.element_ty)
    mask = live[:, None] & (columns < NX)[None, :]
    tl.store(ptr[:, None] + place[None, :], v, mask=mask)


@triton.jit
def _first(
    X, W, S, Z, B, H, WEIGHTS, expert, pid_n, slots, live, N, K, KX, LX, NX, HX, alpha, limit,
    TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    BASE: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, V: tl.constexpr,
    KW: tl.constexpr, EVEN: tl.constexpr, ORDERED: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H ``[T, HX]`` by slot: activations of V tiles of 64 rows."""
    low, high = _streamed(
        X, W, S, Z, slots // TOP_K, live, expert, pid_n * V, N, K, KX, LX,
        BASE, ZEROS, GROUP, BM, V, KW, EVEN, False, ORDERED, INTERP,
    )  # fmt: skip
    if WEIGHTED:
        weights = tl.load(WEIGHTS + slots, mask=live, other=0.0)[None, None, None, :]
        low = low * weights
        high = high * weights
    rows = _tile_rows(pid_n * V, 1, V)
    low = _biased(low, rows, B, expert, N, BIAS)
    high = _biased(high, rows + 8, B, expert, N, BIAS)
    h_ptr = H + slots.to(tl.int64) * HX
    if GATED:
        tile = pid_n * V + tl.arange(0, V)[:, None, None]
        columns = tile * 32 + tl.arange(0, 4)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        _keep(h_ptr, _gated(low, high, alpha, limit, ACT), columns, live, NX, INTERP)
    else:
        _keep(h_ptr, _ungated(low, ACT), rows, live, NX, INTERP)
        _keep(h_ptr, _ungated(high, ACT), rows + 8, live, NX, INTERP)


@triton.jit
def _second(
    H, W, S, Z, B, Y, WEIGHTS, expert, pid_n, slots, live, N, K, KX, LX, NX,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr, BASE: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, V: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr, WAIT: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """Y ``[T, NX]`` by slot: weight * (second GEMM of H), for V tiles of 64 rows."""
    low, high = _streamed(
        H, W, S, Z, slots, live, expert, pid_n * V, N, K, KX, LX,
        BASE, ZEROS, GROUP, BM, V, KW, EVEN, WAIT, True, INTERP,
    )  # fmt: skip
    rows = _tile_rows(pid_n * V, 1, V)
    low = _biased(low, rows, B, expert, N, BIAS)
    high = _biased(high, rows + 8, B, expert, N, BIAS)
    if WEIGHTED:
        weights = tl.load(WEIGHTS + slots, mask=live, other=0.0)[None, None, None, :]
        low = low * weights
        high = high * weights
    y_ptr = Y + slots.to(tl.int64) * NX
    _put(y_ptr, low, rows, live, NX, INTERP)
    _put(y_ptr, high, rows + 8, live, NX, INTERP)


@triton.jit
def _warpwise_gemm1_kernel(
    X, W, S, Z, B, H, PLAN, WEIGHTS, N, K, KX, LX, NX, HX, row_tiles, alpha, limit,
    E: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr, BASE: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    V: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr, PLANNED: tl.constexpr, PDL: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """`_first`; grid (records * row_tiles)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    expert, slots, live = _record(PLAN, program // row_tiles, BM, PLANNED)
    if (expert >= 0) & (expert < E):
        _first(
            X, W, S, Z, B, H, WEIGHTS, expert, program % row_tiles, slots, live, N, K, KX, LX, NX, HX,
            alpha, limit, TOP_K, ACT, GATED, BIAS, WEIGHTED, BASE, ZEROS, GROUP, BM, V, KW, EVEN,
            PLANNED, INTERP,
        )  # fmt: skip


@triton.jit
def _warpwise_gemm2_kernel(
    H, W, S, Z, B, Y, PLAN, WEIGHTS, N, K, KX, LX, NX, row_tiles,
    E: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, BASE: tl.constexpr, ZEROS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, V: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr,
    PLANNED: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """`_second`; grid (records * row_tiles).

    The routing was written before the first GEMM started, so that only H has to be waited for.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    expert, slots, live = _record(PLAN, program // row_tiles, BM, PLANNED)
    if (expert >= 0) & (expert < E):
        _second(
            H, W, S, Z, B, Y, WEIGHTS, expert, program % row_tiles, slots, live, N, K, KX, LX, NX,
            BIAS, WEIGHTED, BASE, ZEROS, GROUP, BM, V, KW, EVEN, PDL, INTERP,
        )  # fmt: skip
    elif PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["records"])
def _warpwise_layer_kernel(
    X, W, S, Z, B, H, W_2, S_2, Z_2, B_2, Y, PLAN, WEIGHTS, records, N, K, KX, LX, NX, HX, row_tiles,
    N_2, K_2, LX_2, NX_2, row_tiles_2, alpha, limit,
    E: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    ON_INPUT: tl.constexpr, BASE: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    V: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr, V_2: tl.constexpr, KW_2: tl.constexpr,
    EVEN_2: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """`_first`, then `_second`, in one launch; grid (records * (row_tiles + row_tiles_2)).

    A record's third word counts the programs that have written its part of H. A program of the second GEMM
    only waits for programs earlier in the grid, which the GPU has started before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    first = records * row_tiles
    if program < first:
        p = program // row_tiles
        expert, slots, live = _record(PLAN, p, BM, True)
        if (expert >= 0) & (expert < E):
            _first(
                X, W, S, Z, B, H, WEIGHTS, expert, program % row_tiles, slots, live, N, K, KX, LX, NX, HX,
                alpha, limit, TOP_K, ACT, GATED, BIAS, ON_INPUT, BASE, ZEROS, GROUP, BM, V, KW, EVEN, True,
                INTERP,
            )  # fmt: skip
            tl.debug_barrier()
            tl.atomic_add(PLAN + p * (8 + BM) + 2, 1, sem="release")
    else:
        p = (program - first) // row_tiles_2
        expert, slots, live = _record(PLAN, p, BM, True)
        if (expert >= 0) & (expert < E):
            while tl.atomic_add(PLAN + p * (8 + BM) + 2, 0, sem="acquire") < row_tiles:
                pass
            _second(
                H, W_2, S_2, Z_2, B_2, Y, WEIGHTS, expert, (program - first) % row_tiles_2, slots, live,
                N_2, K_2, HX, LX_2, NX_2, BIAS, not ON_INPUT, BASE, ZEROS, GROUP, BM, V_2, KW_2, EVEN_2,
                False, INTERP,
            )  # fmt: skip

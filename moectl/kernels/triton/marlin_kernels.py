# mypy: ignore-errors
"""Device code of a fused-MoE layer in the layout ``marlin-int4``: the two GEMMs with their epilogues.

For names see `portable_kernels`. Rows are in the checkpoint's order: for experts with a gate, a program has a
tile of gates and the tile of their ups, or 128 rows if gates and ups are interleaved. Biases, and scales of
whole rows, are permuted within 32 rows.
"""

import triton
import triton.language as tl

from .marlin_product_kernels import _product
from .mtile64_kernels import _nearest
from .portable_kernels import _gated, _ungated


@triton.jit
def _stored_place(rows):
    """Stored position of a row's value in per-row tensors: biases, and scales of whole rows.

    Within 32 rows, row ``8 a + 2 i + b`` is stored at ``8 i + 2 a + b``.
    """
    return (rows & ~31) | (((rows >> 1) & 3) * 8) | (((rows >> 3) & 3) * 2) | (rows & 1)


@triton.jit
def _tile_rows(first, stride, TILES: tl.constexpr):
    """[TILES, 4 i, 8 g]: rows g of the 16-row blocks i of the tiles; rows g + 8 follow 8 rows later."""
    t = tl.arange(0, TILES)[:, None, None]
    row = tl.arange(0, 4)[None, :, None] * 16 + tl.arange(0, 8)[None, None, :]
    return (first + t * stride) * 64 + row


@triton.jit
def _finished(v, rows, S, B, weights, expert, N, GROUP: tl.constexpr, BIAS: tl.constexpr,
              WEIGHT_FIRST: tl.constexpr, WEIGHT_LAST: tl.constexpr):  # fmt: skip
    """Applies the scale, bias and token weights of `rows` to the sums v [TILES, 4, 8, BM]."""
    place = expert.to(tl.int64) * N + _stored_place(tl.minimum(rows, N - 1))
    if GROUP == 0:
        v = v * tl.load(S + place).to(tl.float32)[:, :, :, None]
    if WEIGHT_FIRST:
        v = v * weights[None, None, None, :]
    if BIAS:
        v += tl.load(B + place).to(tl.float32)[:, :, :, None]
    if WEIGHT_LAST:
        v = v * weights[None, None, None, :]
    return v


@triton.jit
def _pairs(v, ROWS: tl.constexpr):
    """Gate and up of [2, 4, 8, BM]: the two tiles [4, 8, BM], or the even and odd rows of both [8, 4, BM]."""
    BM: tl.constexpr = v.shape[3]
    if ROWS == "interleaved":
        first, second = tl.split(tl.permute(tl.reshape(v, (8, 4, 2, BM)), (0, 1, 3, 2)))
    else:  # Triton also compiles code after a return in the branch, and requires equal shapes.
        first, second = tl.split(tl.permute(v, (1, 2, 3, 0)))
    return first, second


@triton.jit(do_not_specialize=["bound"])
def _items_kernel(
    OFFSETS, ITEMS, bound, E: tl.constexpr, EPAD: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr
):
    """ITEMS ``[3, bound]``: expert, first position and end of each block of tokens; (E, 0, 0) if unused."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.arange(0, EPAD)
    lo = tl.load(OFFSETS + e, mask=e < E, other=0)
    hi = tl.load(OFFSETS + e + 1, mask=e < E, other=0)
    blocks = (hi - lo + BM - 1) // BM
    place = tl.cumsum(blocks, 0) - blocks
    for i in range(tl.max(blocks, 0)):
        there = i < blocks
        tl.store(ITEMS + place + i, e, mask=there)
        tl.store(ITEMS + bound + place + i, lo + i * BM, mask=there)
        tl.store(ITEMS + 2 * bound + place + i, hi, mask=there)
    for i in range(tl.sum(blocks, 0), bound, EPAD):
        spare = i + e < bound
        tl.store(ITEMS + i + e, E, mask=spare)
        tl.store(ITEMS + bound + i + e, 0, mask=spare)
        tl.store(ITEMS + 2 * bound + i + e, 0, mask=spare)


@triton.jit
def _work(SORTED, ITEMS, row_tiles, bound, E: tl.constexpr, BM: tl.constexpr):
    """This program's (expert, row tile, slots [BM], rows of H [BM], live [BM], whether it has any work).

    Loads bypass L1: the second GEMM reads before it waits, when L1 may still hold data of an earlier call.
    """
    pid = tl.program_id(0)
    item = pid // row_tiles
    expert = tl.load(ITEMS + item, cache_modifier=".cg")
    work = expert < E
    h_rows = tl.load(ITEMS + bound + item, cache_modifier=".cg") + tl.arange(0, BM)
    live = (h_rows < tl.load(ITEMS + 2 * bound + item, cache_modifier=".cg")) & work
    slots = tl.load(SORTED + h_rows, mask=live, other=0, cache_modifier=".cg")
    return expert, pid % row_tiles, slots, h_rows, live, work


@triton.jit(do_not_specialize=["bound"])
def _marlin_gemm1_kernel(
    X, W, S, Z, B, H, SORTED, ITEMS, WEIGHTS, N, K, KX, NX, row_tiles, bound, alpha, limit,
    E: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr, BASE: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    DEPTH: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H ``[T, NX]``: activations in sorted order. A program has 64 gates with their ups.

    For experts without a gate (`ROWS` "single") it has 128 rows.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, pid_n, slots, h_rows, live, work = _work(SORTED, ITEMS, row_tiles, bound, E, BM)
    if work:
        first = pid_n if ROWS == "concatenated" else pid_n * 2
        stride = N // 128 if ROWS == "concatenated" else 1
        low, high = _product(
            X, W, S, Z, slots // TOP_K, live, expert, first, stride, N, K, KX,
            BASE, ZEROS, GROUP, BM, DEPTH, 2, KW, EVEN, False, INTERP,
        )  # fmt: skip
        rows = _tile_rows(first, stride, 2)
        weights = tl.load(WEIGHTS + slots, mask=live, other=0.0) if WEIGHTED else live.to(tl.float32)
        low = _finished(low, rows, S, B, weights, expert, N, GROUP, BIAS, WEIGHTED, False)
        high = _finished(high, rows + 8, S, B, weights, expert, N, GROUP, BIAS, WEIGHTED, False)
        h_ptr = H + h_rows.to(tl.int64) * NX
        if ROWS == "single":
            _put(h_ptr, _ungated(low, ACT), rows, live, NX, INTERP)
            _put(h_ptr, _ungated(high, ACT), rows + 8, live, NX, INTERP)
        else:
            g0, u0 = _pairs(low, ROWS)
            g1, u1 = _pairs(high, ROWS)
            h0 = _gated(g0, u0, alpha, limit, ACT)
            h1 = _gated(g1, u1, alpha, limit, ACT)
            if ROWS == "interleaved":
                columns = pid_n * 64 + tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 4)[None, :]
                _put(h_ptr, h0, columns, live, NX, INTERP)
                _put(h_ptr, h1, columns + 4, live, NX, INTERP)
            else:
                columns = pid_n * 64 + tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 8)[None, :]
                _put(h_ptr, h0, columns, live, NX, INTERP)
                _put(h_ptr, h1, columns + 8, live, NX, INTERP)


@triton.jit
def _put(ptr, v, columns, live, NX, INTERP: tl.constexpr):
    """Stores v [..., BM] to `columns` [...] of the rows at `ptr` [BM]."""
    BM: tl.constexpr = ptr.shape[0]
    C: tl.constexpr = columns.numel
    columns = tl.reshape(columns, (C,))
    v = _nearest(tl.trans(tl.reshape(v, (C, BM))), ptr.dtype.element_ty, INTERP).to(ptr.dtype.element_ty)
    mask = live[:, None] & (columns < NX)[None, :]
    tl.store(ptr[:, None] + columns[None, :], v, mask=mask)


@triton.jit(do_not_specialize=["bound"])
def _marlin_gemm2_kernel(
    H, W, S, Z, B, Y, SORTED, ITEMS, WEIGHTS, N, K, KX, NX, row_tiles, bound,
    E: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, BASE: tl.constexpr, ZEROS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, DEPTH: tl.constexpr, V: tl.constexpr,
    KW: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Y ``[T, NX]`` by slot: weight * (second GEMM of H). A program has V tiles of 64 rows.

    The routing was written before the first GEMM started, so that only H has to be waited for.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, pid_n, slots, h_rows, live, work = _work(SORTED, ITEMS, row_tiles, bound, E, BM)
    if work:
        first = pid_n * (V)
        low, high = _product(
            H, W, S, Z, h_rows, live, expert, first, 1, N, K, KX,
            BASE, ZEROS, GROUP, BM, DEPTH, V, KW, EVEN, PDL, INTERP,
        )  # fmt: skip
        rows = _tile_rows(first, 1, V)
        weights = tl.load(WEIGHTS + slots, mask=live, other=0.0) if WEIGHTED else live.to(tl.float32)
        low = _finished(low, rows, S, B, weights, expert, N, GROUP, BIAS, False, WEIGHTED)
        high = _finished(high, rows + 8, S, B, weights, expert, N, GROUP, BIAS, False, WEIGHTED)
        y_ptr = Y + slots.to(tl.int64) * NX
        _put(y_ptr, low, rows, live, NX, INTERP)
        _put(y_ptr, high, rows + 8, live, NX, INTERP)
    elif PDL:
        tl.extra.cuda.gdc_wait()

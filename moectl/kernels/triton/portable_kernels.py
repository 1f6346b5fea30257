# mypy: ignore-errors
"""Device code of the portable kernels: the two GEMMs with their epilogues.

Names used throughout: `IDS` and `WEIGHTS` are flat, one entry per assignment (token, choice); a *slot* is
an index into them. ``N, K`` are the stored (padded) sizes of a weight matrix, ``KX`` its logical columns
and ``NX`` the logical columns of the output. `XS` are the scales of 8-bit tokens (see `row_product_kernels`).
*Live* columns of a tile hold tokens, the others are padding.
"""

import triton
import triton.language as tl

from .mtile64_kernels import _nearest
from .portable_product_kernels import _factored, _is_in_rows, _product


@triton.jit
def _softly_limited(x, limit):
    """limit * tanh(x / limit), by a series near zero, where the sigmoid would cancel; `x` for infinity."""
    scaled = x * (1.0 / limit)
    square = scaled * scaled
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
    near = scaled + scaled * square * (-0.3333333333333333 + square * series)
    tanh = tl.where(square < 0.0625, near, 2.0 / (1.0 + tl.exp(-2.0 * scaled)) - 1.0)
    return tl.where(limit == float("inf"), x, limit * tanh)


@triton.jit
def _gated(gate, up, alpha, limit, ACT: tl.constexpr):
    """activation(gate) * up in fp32. `limit` is infinite if there is none; unlike a minimum, it keeps NaN.

    `situ` softly limits the gate by `alpha` and up by `limit`.
    """
    if ACT == "situ":
        return _softly_limited(up, limit) * _softly_limited(gate, alpha) / (1.0 + tl.exp(-gate))
    if ACT == "gelu_tanh":
        alpha = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)  # tanh written as a sigmoid
    else:
        if ACT == "swiglustep":
            gate = gate / (1.0 + tl.exp(-gate))
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
        if ACT == "swigluoai":
            up += 1.0
    result = up * gate
    if ACT != "swiglustep":
        result = result / (1.0 + tl.exp(-alpha * gate))
    return result


@triton.jit
def _ungated(x, ACT: tl.constexpr):
    """activation(x) in fp32, for experts without a gate."""
    tl.static_assert(ACT == "relu2")
    return tl.where(x < 0, 0.0, x * x)  # NaN stays NaN


@triton.jit
def _matrix_rows(pid_n, N, NX, GATED: tl.constexpr, FORMAT: tl.constexpr, BN: tl.constexpr):
    """(rows of the matrix [BN], inside [BN]) of a row tile: in each block of 16, 8 gates, then the 8 ups.

    Tiles are stored in this order. Weights in rows have all NX gates, then all ups.
    """
    i = tl.arange(0, BN)
    rows = pid_n * BN + i
    inside = rows < N
    if GATED and _is_in_rows(FORMAT):
        column = pid_n * (BN // 2) + (i // 16) * 8 + i % 8
        inside = column < NX
        rows = tl.where(i % 16 < 8, column, NX + column)
    return rows, inside


@triton.jit
def _gemm1_tile(
    X, XS, W, S, Z, B, F, H, WEIGHTS, slots, h_rows, live, expert, pid_n, N, K, KX, NX, alpha, limit,
    TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    HALVES: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H[h_rows] = activation(first GEMM of the tokens of `slots`); NX is the intermediate size."""
    rows, inside = _matrix_rows(pid_n, N, NX, GATED, FORMAT, BN)
    acc = _product(
        X, XS, W, S, Z, slots // TOP_K, live, expert, rows, inside, pid_n, 0, N, K, KX, NX,
        FORMAT, GROUP, ZERO, SCALE, TOKENS, BM, BN, BK, 1, STAGES, EVEN_N, EVEN_K, INTERP,
    )  # fmt: skip
    acc = _factored(acc, F, expert, HALVES)
    if WEIGHTED:
        acc = acc * tl.load(WEIGHTS + slots, mask=live, other=0.0)[None, :]
    if BIAS:
        b = tl.load(B + expert.to(tl.int64) * N + rows, mask=inside, other=0.0)
        acc += b.to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        h = _gated(tl.reshape(gate, (BN // 2, BM)), tl.reshape(up, (BN // 2, BM)), alpha, limit, ACT)
        columns = pid_n * (BN // 2) + tl.arange(0, BN // 2)
    else:
        h = _ungated(acc, ACT)
        columns = pid_n * BN + tl.arange(0, BN)
    h_ptr = H + h_rows.to(tl.int64)[:, None] * NX + columns[None, :]
    h = _nearest(tl.trans(h), H.dtype.element_ty, INTERP).to(H.dtype.element_ty)
    tl.store(h_ptr, h, mask=live[:, None] & (columns < NX)[None, :])


@triton.jit
def _gemm2_tile(
    H, XS, W, S, Z, B, F, Y, WEIGHTS, slots, h_rows, live, expert, pid_n, pid_k, N, K, KX, NX,
    BIAS: tl.constexpr, HALVES: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """Y[slots] = weight * (second GEMM of H[h_rows]), or its part for one K split; NX is the hidden size."""
    rows, inside = _matrix_rows(pid_n, N, NX, False, FORMAT, BN)
    acc = _product(
        H, XS, W, S, Z, h_rows, live, expert, rows, inside, pid_n, pid_k, N, K, KX, NX,
        FORMAT, GROUP, ZERO, SCALE, TOKENS, BM, BN, BK, SPLIT_K, STAGES, EVEN_N, EVEN_K, INTERP,
    )  # fmt: skip
    acc = _factored(acc, F, expert, HALVES)
    if BIAS:
        b = tl.load(B + expert.to(tl.int64) * N + rows, mask=inside & (pid_k == 0), other=0.0)
        acc += b.to(tl.float32)[:, None]
    if WEIGHTED:
        acc = acc * tl.load(WEIGHTS + slots, mask=live, other=0.0)[None, :]
    y = _nearest(tl.trans(acc), Y.dtype.element_ty, INTERP)
    y_ptr = Y + slots.to(tl.int64)[:, None] * NX + rows[None, :]
    tl.store(y_ptr, y.to(Y.dtype.element_ty), mask=live[:, None] & (rows < NX)[None, :])


@triton.jit
def _assigned(IDS, T, p, m0, BY_SLOT, E: tl.constexpr, TPAD: tl.constexpr, BM: tl.constexpr):
    """Assignments m0 to m0 + BM of program p's expert: (expert, slots [BM], live [BM], whether any).

    With `BY_SLOT` program p belongs to assignment p, and has work if that is the first assignment of its
    expert; otherwise it belongs to expert p. Every program reads all ids, which replaces a sort.
    """
    t = tl.arange(0, TPAD)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    expert = p
    if BY_SLOT:
        expert = tl.load(IDS + p)
    earlier = tl.sum(((ids == expert) & (t < p * BY_SLOT)).to(tl.int32), 0)
    mine = (expert >= 0) & (expert < E) & (earlier == 0)
    match = (ids == expert) & (t < T)
    count = tl.sum(match.to(tl.int32), 0)
    rank = tl.cumsum(match.to(tl.int32), 0) - 1
    wanted = m0 + tl.arange(0, BM)
    chosen = match[:, None] & (rank[:, None] == wanted[None, :])
    slots = tl.sum(tl.where(chosen, t[:, None], 0), 0)
    return expert, slots, wanted < count, mine & (count > m0)


@triton.jit(do_not_specialize=["T", "M_BLOCKS", "BY_SLOT"])
def _decode_gemm1_kernel(
    X, XS, W, S, Z, B, F, H, IDS, WEIGHTS, T, M_BLOCKS, BY_SLOT, N, K, KX, NX, alpha, limit,
    E: tl.constexpr, TPAD: tl.constexpr,
    TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    HALVES: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H ``[T, NX]`` by slot; grid (row tiles, programs * M_BLOCKS)."""
    pid_n = tl.program_id(0)
    p = tl.program_id(1) // M_BLOCKS
    m0 = (tl.program_id(1) % M_BLOCKS) * BM
    expert, slots, live, work = _assigned(IDS, T, p, m0, BY_SLOT, E, TPAD, BM)
    if work:
        _gemm1_tile(
            X, XS, W, S, Z, B, F, H, WEIGHTS, slots, slots, live, expert, pid_n, N, K, KX, NX, alpha, limit,
            TOP_K, ACT, GATED, BIAS, HALVES, WEIGHTED,
            FORMAT, GROUP, ZERO, SCALE, TOKENS, BM, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "M_BLOCKS", "BY_SLOT"])
def _decode_gemm2_kernel(
    H, XS, W, S, Z, B, F, Y, IDS, WEIGHTS, T, M_BLOCKS, BY_SLOT, N, K, KX, NX,
    E: tl.constexpr, TPAD: tl.constexpr,
    BIAS: tl.constexpr, HALVES: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """Y ``[SPLIT_K, T, NX]`` parts by slot; grid (row tiles, programs * M_BLOCKS, SPLIT_K)."""
    pid_n = tl.program_id(0)
    p = tl.program_id(1) // M_BLOCKS
    m0 = (tl.program_id(1) % M_BLOCKS) * BM
    pid_k = tl.program_id(2)
    expert, slots, live, work = _assigned(IDS, T, p, m0, BY_SLOT, E, TPAD, BM)
    if work:
        _gemm2_tile(
            H, XS, W, S, Z, B, F, Y + pid_k.to(tl.int64) * T * NX, WEIGHTS, slots, slots, live, expert,
            pid_n, pid_k, N, K, KX, NX, BIAS, HALVES, WEIGHTED,
            FORMAT, GROUP, ZERO, SCALE, TOKENS, BM, BN, BK, SPLIT_K, STAGES, EVEN_N, EVEN_K, INTERP,
        )  # fmt: skip


@triton.jit
def _scheduled(OFFSETS, pid, row_tiles, E: tl.constexpr, EPAD: tl.constexpr, BM: tl.constexpr):
    """Tile of program `pid`: (expert, row tile, first position, end position); expert E means no tile.

    Tiles are ordered by expert, then by row tile, so that neighbouring programs share weights. The grid is an
    upper bound that depends on the number of tokens only.
    """
    i = tl.arange(0, EPAD)
    lo = tl.load(OFFSETS + i, mask=i < E, other=0)
    hi = tl.load(OFFSETS + i + 1, mask=i < E, other=0)
    tiles = ((hi - lo + BM - 1) // BM) * row_tiles
    expert = tl.sum((tl.cumsum(tiles, 0) <= pid).to(tl.int32), 0)
    expert = tl.minimum(expert, E)
    before = tl.sum(tl.where(i < expert, tiles, 0), 0)
    start = tl.sum(tl.where(i == expert, lo, 0), 0)
    end = tl.sum(tl.where(i == expert, hi, 0), 0)
    m_tiles = tl.maximum((end - start + BM - 1) // BM, 1)
    r = pid - before
    return expert, r // m_tiles, start + (r % m_tiles) * BM, end


@triton.jit
def _is_as_wide(tokens, WIDTH: tl.constexpr, WIDEST: tl.constexpr, NARROWEST: tl.constexpr):
    """Whether a tile of `tokens` tokens runs in WIDTH columns: the smallest width that is sufficient."""
    return (WIDEST | (tokens <= WIDTH)) & (NARROWEST | (tokens > WIDTH // 2))


@triton.jit
def _positions(SORTED, m0, end, BM: tl.constexpr):
    """(slots, positions, live) of the tokens of one tile, each [BM]."""
    positions = m0 + tl.arange(0, BM)
    live = positions < end
    return tl.load(SORTED + positions, mask=live, other=0), positions, live


@triton.jit
def _grouped_gemm1_kernel(
    X, XS, W, S, Z, B, F, H, SORTED, OFFSETS, WEIGHTS, N, K, KX, NX, row_tiles, alpha, limit,
    E: tl.constexpr, EPAD: tl.constexpr, TAILS: tl.constexpr,
    TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    HALVES: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H ``[T, NX]`` in sorted order. Partial last tiles run in fewer columns, with less padding."""
    expert, pid_n, m0, end = _scheduled(OFFSETS, tl.program_id(0), row_tiles, E, EPAD, BM)
    if expert < E:
        for halved in tl.static_range(TAILS + 1):
            if _is_as_wide(end - m0, BM >> halved, halved == 0, halved == TAILS):
                slots, positions, live = _positions(SORTED, m0, end, BM >> halved)
                _gemm1_tile(
                    X, XS, W, S, Z, B, F, H, WEIGHTS, slots, positions, live, expert, pid_n, N, K, KX, NX,
                    alpha, limit, TOP_K, ACT, GATED, BIAS, HALVES, WEIGHTED,
                    FORMAT, GROUP, ZERO, SCALE, TOKENS, BM >> halved, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
                )  # fmt: skip


@triton.jit
def _grouped_gemm2_kernel(
    H, XS, W, S, Z, B, F, Y, SORTED, OFFSETS, WEIGHTS, N, K, KX, NX, row_tiles,
    E: tl.constexpr, EPAD: tl.constexpr, TAILS: tl.constexpr,
    BIAS: tl.constexpr, HALVES: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Y ``[T, NX]`` by slot, from H in sorted order."""
    expert, pid_n, m0, end = _scheduled(OFFSETS, tl.program_id(0), row_tiles, E, EPAD, BM)
    if expert < E:
        for halved in tl.static_range(TAILS + 1):
            if _is_as_wide(end - m0, BM >> halved, halved == 0, halved == TAILS):
                slots, positions, live = _positions(SORTED, m0, end, BM >> halved)
                _gemm2_tile(
                    H, XS, W, S, Z, B, F, Y, WEIGHTS, slots, positions, live, expert, pid_n, 0, N, K, KX, NX,
                    BIAS, HALVES, WEIGHTED, FORMAT, GROUP, ZERO, SCALE, TOKENS,
                    BM >> halved, BN, BK, 1, STAGES, EVEN_N, EVEN_K, INTERP,
                )  # fmt: skip

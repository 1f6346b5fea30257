# mypy: ignore-errors
"""Device code of the product of a tile of stored weights and a tile of tokens: `_product`, and that of tiles.

Weights are the A operand of the matrix instructions, so that the product is computed transposed, ``acc[rows,
tokens]``. ``N, K`` are the stored (padded) sizes of the weight matrix, ``KX`` its logical columns; for the
other names see `mtile64_kernels`.

Codes are exact in the tokens' dtype. Scales are applied at one of three places: to the ``weights``, if a
weight times its scale takes one rounding in that dtype; else to the ``sums``, the fp32 product of each group;
at the ``end``, to the whole product, if there is one scale per row.
"""

import triton
import triton.language as tl

from .mtile64_kernels import _dequantized, _is_wide, _row_scales
from .row_product_kernels import _dot, _keep, _row_product, _tokens


@triton.constexpr_function
def _scaled_at(FORMAT, GROUP, SCALE, half):
    """Where scales are applied: ``weights``, ``sums`` or ``end``; `half` means fp16 tokens."""
    if GROUP == -1:
        return "end"
    if SCALE == "e4m3":
        return "weights"
    if SCALE == "e8m0":
        return "sums" if half else "weights"  # fp16's exponent range is too small
    return "weights" if half == (SCALE == "fp16") else "sums"


@triton.constexpr_function
def _is_in_rows(FORMAT):
    """Whether weights are stored row by row (`row_product_kernels`), and not in tiles."""
    return FORMAT in ("plain", "fp8", "s8", "s4")


@triton.jit
def _product(
    X, XS, W, S, Z, x_rows, live, expert, rows, inside, pid_n, pid_k, N, K, KX, NX,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr,
    TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """[BN, BM] fp32: `rows` of the expert's matrix times the tokens `x_rows` of X, over one K split."""
    if _is_in_rows(FORMAT):
        acc = _row_product(
            X, XS, W, S, x_rows, live, expert, rows, inside, pid_k, N, KX, NX,
            FORMAT, SCALE, TOKENS, BM, BN, DEPTH, SPLIT_K, STAGES, EVEN_K, INTERP,
        )  # fmt: skip
    else:
        acc = _tile_product(
            X, W, S, Z, x_rows, live, expert, pid_n, pid_k, N, K, KX,
            FORMAT, GROUP, ZERO, SCALE, BM, BN, DEPTH, SPLIT_K, STAGES, EVEN_N, EVEN_K, INTERP,
        )  # fmt: skip
    return acc


@triton.jit
def _tile_product(
    X, W, S, Z, x_rows, live, expert, pid_n, pid_k, N, K, KX,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """`_product` with weights in tiles.

    If scales are applied to ``sums``, a step has 64 columns, whatever `DEPTH` is.
    """
    DTYPE: tl.constexpr = X.dtype.element_ty
    AT: tl.constexpr = _scaled_at(FORMAT, GROUP, SCALE, tl.float16 == DTYPE)
    BK: tl.constexpr = 64 if AT == "sums" else DEPTH
    NB: tl.constexpr = BN // 64
    KB: tl.constexpr = BK // 64
    TILE: tl.constexpr = 1024 if _is_wide(FORMAT) else 512  # words
    SPAN: tl.constexpr = 64 if GROUP == 16 or GROUP == 32 else GROUP  # columns of one run of words, or -1
    WORDS: tl.constexpr = 64 if GROUP == 16 or (GROUP == 32 and SCALE != "e8m0") else 32
    SK: tl.constexpr = BK // SPAN if SPAN > 0 and SPAN <= BK else 1
    tiles = K // 64
    spans = 1 if SPAN == -1 else K // SPAN
    nb = pid_n * NB + tl.arange(0, NB)
    if not EVEN_N:
        nb = tl.minimum(nb, N // 64 - 1)  # surplus rows read the last tile; the store masks them
    kb = tl.arange(0, KB)
    ks = tl.arange(0, SK)
    offs_w = nb[:, None, None] * (tiles * TILE) + kb[None, :, None] * TILE + tl.arange(0, TILE)[None, None, :]
    offs_s = (
        nb[:, None, None] * (spans * WORDS) + ks[None, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    )
    w_base = W + expert.to(tl.int64) * (N // 64) * tiles * TILE
    first_word = expert.to(tl.int64) * (N // 64) * spans * WORDS
    s_base = S + first_word
    z_base = Z + first_word
    x_base = X + x_rows.to(tl.int64)[:, None] * KX
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    steps = tl.cdiv(K, BK)
    first = (steps * pid_k) // SPLIT_K
    last = (steps * (pid_k + 1)) // SPLIT_K
    for step in tl.range(first, last, num_stages=STAGES):
        span = 0 if SPAN == -1 else (step * BK) // SPAN
        if EVEN_K:
            w = tl.load(w_base + step * (KB * TILE) + offs_w, cache_modifier=".cg")
        else:
            in_w = (step * KB + kb < tiles)[None, :, None] & (offs_w >= 0)
            w = tl.load(w_base + step * (KB * TILE) + offs_w, mask=in_w, other=0, cache_modifier=".cg")
        s = _words(s_base, offs_s, span, spans, ks, WORDS, EVEN_K)
        z = _words(z_base, offs_s, span, spans, ks, WORDS, EVEN_K) if ZERO else s
        a = _dequantized(w, s, z, FORMAT, GROUP, ZERO, SCALE, AT, DTYPE, BN, BK, SK, INTERP)
        if AT == "sums":
            acc = _summed(acc, a, s, x_base, live, step, KX, GROUP, SCALE, BM, BN, EVEN_K, INTERP)
        else:
            x = _tokens(x_base, live, step * BK, KX, BK, EVEN_K)
            acc = _dot(a, x, acc, INTERP)
            acc = _keep(acc, INTERP)
    if AT == "end":
        s, _ = _row_scales(tl.load(s_base + offs_s), GROUP, SCALE, NB)
        acc = acc * s[:, None]
    return acc


@triton.jit
def _factored(acc, F, expert, HALVES: tl.constexpr):
    """Sums [BN, BM] times the expert's one factor or two: of 8 gates and 8 ups in turn; HALVES 0: none."""
    if HALVES:
        row = tl.arange(0, acc.shape[0])
        acc = acc * tl.load(F + expert * HALVES + row // 8 % HALVES)[:, None]
    return acc


@triton.jit
def _words(base, offs, span, spans, ks, WORDS: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of scales or zero points [NB, SK, WORDS], starting with run `span`; zero beyond the last run."""
    if EVEN_K:
        words = tl.load(base + span * WORDS + offs)
    else:
        inside = (span + ks < spans)[None, :, None] & (offs >= 0)
        words = tl.load(base + span * WORDS + offs, mask=inside, other=0)
    return words


@triton.jit
def _summed(
    acc, a, s, x_base, live, step, KX,
    GROUP: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """acc plus the product of a column of unscaled weight tiles [BN, 64]; scales multiply group sums."""
    none = tl.zeros((BN, BM), dtype=tl.float32)
    first, second = _row_scales(s, GROUP, SCALE, BN // 64)
    if GROUP == 32:
        a0, a1 = tl.split(tl.permute(tl.reshape(a, (BN, 2, 32)), (0, 2, 1)))
        x0 = _tokens(x_base, live, step * 64, KX, 32, EVEN_K)
        x1 = _tokens(x_base, live, step * 64 + 32, KX, 32, EVEN_K)
        acc += _dot(a0, x0, none, INTERP) * first[:, None]
        acc += _dot(a1, x1, none, INTERP) * second[:, None]
    else:
        x = _tokens(x_base, live, step * 64, KX, 64, EVEN_K)
        acc += _dot(a, x, none, INTERP) * first[:, None]
    return acc

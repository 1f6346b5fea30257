# mypy: ignore-errors
"""Compile-time functions of the streaming kernels: constants of a format, and register layouts.

`stream_kernels` explains the names of dimensions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fragments import scale_words
from .stream_asm import CODES, SOURCE, SumsAsm, TileAsm

FILL_AT_ONCE = gl.constexpr(8)
"""16-byte loads of tokens that a thread keeps in flight."""


@gluon.constexpr_function
def _tile_asm(KIND, GROUP, NT):
    """(PTX, constraints, source hash) of a tile; kernels depend on the hash, see `SOURCE`."""
    weight, tokens, scale, zeros, whole = KIND
    return (*TileAsm(weight, tokens, scale, GROUP == 32, zeros, whole, NT), SOURCE)


@gluon.constexpr_function
def _sums_asm(KIND, GROUP):
    """(PTX, constraints, source hash) of the token sums over one tile."""
    weight, tokens, scale, zeros, whole = KIND
    return (*SumsAsm(TileAsm(weight, tokens, scale, GROUP == 32, zeros, whole, 1)), SOURCE)


@gluon.constexpr_function
def _factor(KIND):
    """Factor on the token sums, a pair of 16-bit floats in an int; 0 if none are needed."""
    weight, tokens, scale, zeros, whole = KIND
    factor = TileAsm(weight, tokens, scale, False, zeros, whole, 1).factor
    return factor - (1 << 32 if factor >> 31 else 0)


@gluon.constexpr_function
def _is_wide(KIND):
    """Whether codes have 8 bits."""
    return CODES[KIND[0], KIND[1]].words == 2


@gluon.constexpr_function
def _keeps_nan(KIND):
    """Whether codes may be NaN, and stay that."""
    return KIND[4] and CODES[KIND[0], KIND[1]].whole != ""


@gluon.constexpr_function
def _tile_words(KIND):
    """Code words in a tile."""
    return 1024 if _is_wide(KIND) else 512


@gluon.constexpr_function
def _run_words(KIND, GROUP):
    """Scale words of 64 rows over a tile or a wider group."""
    return scale_words(KIND[0], GROUP)


@gluon.constexpr_function
def _input_scaled(KIND):
    """Whether tokens are stored times 2^64."""
    return CODES[KIND[0], KIND[1]].shift != 0 and KIND[1] == "bf16"


@gluon.constexpr_function
def _output_factor(KIND):
    """Factor on the sums that undoes the powers of two in codes and tokens."""
    return 1.0 if KIND[1] == "bf16" and KIND[4] else 2.0 ** CODES[KIND[0], KIND[1]].shift


@gluon.constexpr_function
def _only(layout, dim, rank):
    """Layout of one dimension of a tensor of `rank` dimensions in `layout`."""
    for i in reversed(range(rank)):
        if i != dim:
            layout = gl.SliceLayout(i, layout)
    return layout


@gluon.constexpr_function
def _words_layout(S, RW, R):
    """[S, RW, 32, R, 4]: a lane's four words."""
    return gl.BlockedLayout([1, 1, 1, R, 4], [1, 1, 32, 1, 1], [S, RW, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _pairs_layout(S, RW, R):
    """[S, RW, 32, R, 2]: a lane's two scale words."""
    return gl.BlockedLayout([1, 1, 1, R, 2], [1, 1, 32, 1, 1], [S, RW, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _tokens_layout(S, RW, TR):
    """[S, RW, 8 / TR, TR, 32]: TR tokens x 64 columns as words of B operands, each token 8 / TR times."""
    return gl.BlockedLayout([1, 1, 1, 1, 1], [1, 1, 8 // TR, TR, 4], [S, RW, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _fill_layout(D, S, RW, TT):
    """[steps, D, blocks * S, TT, 8, 4]: a lane has 16 bytes of a token."""
    tokens = min(TT, 4)
    wd = min(D, RW)
    return gl.BlockedLayout(
        [1, 1, 1, 1, 1, 4],
        [1, 1, 4 // tokens, tokens, 8, 1],
        [1, wd, S * RW // wd, 1, 1, 1],
        [5, 4, 3, 2, 1, 0],
    )


@gluon.constexpr_function
def _fill_batch(D, S, RW, STEPS, NF, TT):
    """(steps per copy, copies in flight); steps per copy is a power of two that divides STEPS."""
    each = max(1, D * NF * S * TT * 8 // (32 * S * RW))
    batch = 1
    while STEPS % (2 * batch) == 0 and 2 * batch * each <= FILL_AT_ONCE.value:
        batch *= 2
    return batch, max(1, FILL_AT_ONCE.value // (batch * each))


@gluon.constexpr_function
def _smaller(a, b):
    return min(a, b)


@gluon.constexpr_function
def _sums_layout(W, R):
    """[RW, 8 g, 4 c, R, 2 h, 2 b]: a warp's sums after the reduction over column parts."""
    return gl.BlockedLayout([1, 1, 1, R, 2, 2], [1, 8, 4, 1, 1, 1], [W, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0])


@gluon.constexpr_function
def _sums_shape(GROUP):
    """Registers of token sums that a tile needs: a quad for each of its scales per row."""
    return 8 if GROUP == 32 else 4


@gluon.constexpr_function
def _quads_layout(S, RW, Q):
    """[S, RW, 8 g, 4 c, Q]: token sums, equal for all g."""
    return gl.BlockedLayout([1, 1, 1, 1, Q], [1, 1, 8, 4, 1], [S, RW, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _scale_stride(KIND, GROUP):
    """Scale words from one tile column to the next; 0 if it is not constant."""
    return _run_words(KIND, GROUP) if GROUP in (16, 32, 64) else 0

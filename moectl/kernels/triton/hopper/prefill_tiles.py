# mypy: ignore-errors
"""Device code of the kernel family `prefill`: splitting tokens into tiles, and register layouts of a tile.

The width of a token tile is a multiple of 16 tokens (a unit). A width that is not a power of two has two
accumulators, wide and narrow, that share the dequantized weights.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit(do_not_specialize=["MOST"])
def _schedule_kernel(OFFSETS, TILES, COUNT, MOST, E: tl.constexpr, EPAD: tl.constexpr, PDL: tl.constexpr):
    """Writes token tiles ``[COUNT[0], 4]``, (expert, first, end, units), expert by expert; one program.

    An expert's tokens are split into the fewest tiles of at most `MOST` units of 16 tokens, whose widths
    differ by at most one unit. COUNT[1:3] are set to 0.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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


@gluon.jit
def _placed(tile, count, whole, group_m):
    """(token tile, row tile) of tile number `tile`: `group_m` token tiles sweep `whole` row tiles together.

    Partial row tiles come last: they are shorter, which balances the tail.
    """
    group = tile // gl.maximum(group_m * whole, 1)
    within = tile - group * (group_m * whole)
    tokens = gl.maximum(gl.minimum(count - group * group_m, group_m), 1)
    rest = tile - count * whole
    mt = gl.where(rest < 0, group * group_m + within % tokens, rest)
    return mt, gl.where(rest < 0, within // tokens, whole)


@gluon.constexpr_function
def _mma(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def _operand(tokens):
    return gl.DotOperandLayout(0, _mma(tokens), 2)


@gluon.constexpr_function
def _units(i, HOW):
    """The kernel's i-th width in units; 0 before the first."""
    return HOW.widths[i] if i >= 0 else 0


@gluon.constexpr_function
def _start(i, HOW):
    """The first token of piece i of a tile."""
    return sum(HOW.pieces[:i])


@gluon.constexpr_function
def _wide(units):
    """Tokens of the wide accumulator: the largest power of two that fits."""
    return 16 << (units.bit_length() - 1)


@gluon.constexpr_function
def _narrow(units):
    """Tokens of the narrow accumulator, or 0."""
    return 16 * units - _wide(units)


@gluon.constexpr_function
def _once():
    """One value per thread."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.constexpr_function
def _rows_layout(COLUMNS):
    """Layout of 16-bit ``[rows, COLUMNS]``, 32 or 64 columns: 16 bytes per lane, whole rows per warp."""
    return gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])


@gluon.jit
def _field(jobs, job, i: gl.constexpr):
    """Field i of entry `job`, a scalar."""
    return gl.max(jobs.index((job % 2) * 4 + i).load(_once()), 0)


@gluon.jit
def _set_field(jobs, job, i: gl.constexpr, value):
    jobs.index((job % 2) * 4 + i).store(gl.full([1], 0, gl.int32, _once()) + value)

# mypy: ignore-errors
"""Device code of the kernel family `prefill`: order of tiles, and register layouts of one.

The width of a token tile is a multiple of 16 tokens (a unit). A width that is not a power of two has two
accumulators, wide and narrow, that share the dequantized weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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


FIELDS = gl.constexpr(8)
"""Room for fields of a tile: units, first position, end, row tile and, of a split GEMM, steps."""


@gluon.jit
def _field(jobs, job, i: gl.constexpr):
    """Field i of entry `job`, a scalar."""
    return gl.max(jobs.index((job % 2) * FIELDS + i).load(_once()), 0)


@gluon.jit
def _set_field(jobs, job, i: gl.constexpr, value):
    jobs.index((job % 2) * FIELDS + i).store(gl.full([1], 0, gl.int32, _once()) + value)

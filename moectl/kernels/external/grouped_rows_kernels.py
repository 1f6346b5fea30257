# mypy: ignore-errors
"""Device code that puts tokens into rows by expert for grouped GEMMs, quantized on the way.

A *slot* is an index of the flat assignments (token, choice); `ROWS` is the row of each slot, -1 for skipped
ones. `PDL` as in `sort_and_combine_kernels`.
"""

import triton
import triton.language as tl

from ..triton.mtile64_kernels import _nearest
from ..triton.portable_kernels import _gated, _ungated
from ..triton.sort_and_combine_kernels import _await_inputs
from ..triton.token_codes_kernels import _scale_of, _to_codes


@triton.jit(do_not_specialize=["T"])
def _place_rows_kernel(
    IDS, SORTED, OFFSETS, ROWS, ENDS, COUNTS, T,
    E: tl.constexpr, BINS: tl.constexpr, ALIGN: tl.constexpr, APART: tl.constexpr, BT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS of an expert's slots; its rows begin at a multiple of `ALIGN`, or at ``e * APART`` if set."""
    _await_inputs(PDL)
    e, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    bins = tl.arange(0, BINS)
    start = tl.load(OFFSETS + bins, mask=bins < E, other=0)
    counts = tl.load(OFFSETS + bins + 1, mask=bins < E, other=0) - start
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    begin = tl.load(OFFSETS + e)
    count = tl.load(OFFSETS + e + 1) - begin
    first = e * APART if APART else tl.sum(tl.where(bins < e, padded, 0), 0)
    i = tl.arange(0, BT)
    for at in range(part * BT, count, parts * BT):
        slots = tl.load(SORTED + begin + at + i, mask=at + i < count, other=0)
        tl.store(ROWS + slots, first + at + i, mask=at + i < count)
    for at in range((e * parts + part) * BT, T, E * parts * BT):
        ids = tl.load(IDS + at + i, mask=at + i < T, other=0)
        tl.store(ROWS + at + i, tl.zeros((BT,), tl.int32) - 1, mask=(at + i < T) & ((ids < 0) | (ids >= E)))
    if part == 0:
        tl.store(ENDS + e, first + count)
        tl.store(COUNTS + e, count)


@triton.jit
def _coded(x, OUT, POWERS: tl.constexpr):
    """E4M3 codes of the blocks of `x` ``[blocks, columns]`` as `OUT` holds them, and a scale for each."""
    scale = _scale_of(tl.max(tl.abs(x), 1), POWERS)
    return _to_codes(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), OUT), scale


@triton.jit
def _store_scales(SCALES, row, first, scale, COUNT, SPAN, B: tl.constexpr):
    """Scales of one row from block `first` on, ``[row // SPAN, block, row % SPAN]``."""
    g = first + tl.arange(0, B)
    at = (row // SPAN) * SPAN * COUNT + g.to(tl.int64) * SPAN + row % SPAN
    tl.store(SCALES + at, scale, mask=g < COUNT)


@triton.jit
def _scatter_kernel(
    X, OUT, SCALES, ROWS, N, SPAN,
    TOP_K: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, QUANTIZED: tl.constexpr,
    POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row ROWS[slot] of OUT is the token of `slot`; with `QUANTIZED` a scale for each `GROUP` columns, with
    `POWERS` a power of two."""
    _await_inputs(PDL)
    token = tl.program_id(0)
    first = tl.program_id(1) * BLOCKS
    columns = (first + tl.arange(0, BLOCKS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(X + token.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
    if QUANTIZED:
        y, scale = _coded(x.to(tl.float32), OUT, POWERS)
    else:
        y = x
    for k in tl.static_range(TOP_K):
        row = tl.load(ROWS + token * TOP_K + k).to(tl.int64)
        if row >= 0:
            tl.store(OUT + row * N + columns, y, mask=columns < N)
            if QUANTIZED:
                _store_scales(SCALES, row, first, scale, tl.cdiv(N, GROUP), SPAN, BLOCKS)


@triton.jit
def _activate_rows_kernel(
    X, OUT, SCALES, ROWS, N, SPAN, alpha, limit,
    ACT: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    QUANTIZED: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """The activation of the row of each slot, gates before ups; with `QUANTIZED` as in `_scatter_kernel`."""
    _await_inputs(PDL)
    row = tl.load(ROWS + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        first = tl.program_id(1) * BLOCKS
        columns = (first + tl.arange(0, BLOCKS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = columns < N
        if GATED:
            gate = tl.load(X + row * 2 * N + columns, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(X + row * 2 * N + N + columns, mask=inside, other=0.0).to(tl.float32)
            y = _gated(gate, up, alpha, limit, ACT)
        else:
            y = _ungated(tl.load(X + row * N + columns, mask=inside, other=0.0).to(tl.float32), ACT)
        if QUANTIZED:
            codes, scale = _coded(y, OUT, POWERS)
            tl.store(OUT + row * N + columns, codes, mask=inside)
            _store_scales(SCALES, row, first, scale, tl.cdiv(N, GROUP), SPAN, BLOCKS)
        else:
            rounded = _nearest(y, OUT.dtype.element_ty, INTERP).to(OUT.dtype.element_ty)
            tl.store(OUT + row * N + columns, rounded, mask=inside)

# mypy: ignore-errors
"""Producer of token rows for `tma_kernels` that takes 16-bit tokens and fills the ring with E4M3 codes.

It replaces a kernel that would quantize them before. Each program quantizes what it reads, so this is for
tiles of few tokens. A stage is quantized while the values of the next one are on their way.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..token_codes_kernels import _scale_of
from .mid_loader import _next
from .tma_codes import codes_of
from .tma_loader import (
    batch_rows,
    bytes_layout,
    in_blocks,
    piece_bytes,
    scale_places,
    tile_at,
    token_sources,
)


@gluon.jit
def _ahead(base, source, column, S, of_rows, k, KX, blocks, HOW: gl.constexpr):
    """For each piece of a stage the tokens' values, zeros past their columns, and two scales of rows."""
    DEPTH: gl.constexpr = HOW.depth
    at, there, other_at, other_there = of_rows
    offsets, live = source
    loaded = ()
    for d in gl.static_range(DEPTH):
        block = k * DEPTH + d
        start = block * 128
        inside = live & (column < KX - start)
        loaded += (gl.load(base + start + (offsets + column), mask=inside, other=0.0, cache_modifier=".cg"),)
        if in_blocks(HOW):
            known = block < blocks
            loaded += (gl.load(S + (at + block), mask=there & known, other=0.0),)
            loaded += (gl.load(S + (other_at + block), mask=other_there & known, other=0.0),)
        else:
            loaded += (k, k)
    return loaded


@gluon.jit
def _coded(x, scale, HOW: gl.constexpr):
    """Codes of `x` ``[tokens, 128]`` as bytes, and the scale of each token."""
    x = x.to(gl.float32)
    if in_blocks(HOW):
        scale = _scale_of(gl.max(gl.abs(x), 1), HOW.powers)
        codes = codes_of(x, gl.expand_dims(scale, 1), True)
    else:
        codes = codes_of(x, scale, False)
    return codes, scale


@gluon.jit
def coding_loader(work, HOW: gl.constexpr):
    """Producer of codes of tokens, which have `KX` columns, and of the scales of products."""
    ring, X, _COPIES, XS, S, SORTED, TILES, count, N, steps, KX, row_tiles, group_m = work
    DEPTH: gl.constexpr = HOW.depth
    ROWS: gl.constexpr = batch_rows(HOW)
    BEFORE: gl.constexpr = HOW.stages * HOW.depth * piece_bytes(HOW) // (128 * batch_rows(HOW))
    gl.static_assert(HOW.widths[-1] == ROWS, "tokens of a tile are one batch")
    L: gl.constexpr = bytes_layout(HOW)
    _rows, into, scales, full, empty = ring
    if HOW.stage == 2:
        tl.extra.cuda.gdc_wait()  # for the first GEMM; weight loads are already in flight
    given = 1.0
    if not in_blocks(HOW):
        given = gl.load(XS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, L)), 0)
    total = count * row_tiles
    blocks = (KX + 127) // 128
    expert, first, tokens, nt = tile_at(TILES, gl.program_id(0), total, count, row_tiles, group_m, HOW)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        after = tile + gl.num_programs(0)
        expert1, first1, tokens1, nt1 = tile_at(TILES, after, total, count, row_tiles, group_m, HOW)
        base = X
        if HOW.stage == 2:
            base = X + first.to(gl.int64) * KX
        source = token_sources(SORTED, first, tokens, KX, 0, ROWS, HOW)
        of_rows = scale_places(expert, nt, N, blocks, HOW)
        coming = _ahead(base, source, column, S, of_rows, 0, KX, blocks, HOW)
        for k in range(gl.where(tokens > 0, steps, 0)):
            now = coming
            coming = _ahead(base, source, column, S, of_rows, k + 1, KX, blocks, HOW)
            made = ()
            for d in gl.static_range(DEPTH):
                made += (_coded(now[3 * d], given, HOW),)
            mbarrier.wait(empty.index(stage), phase)
            for d in gl.static_range(DEPTH):
                codes, scale = made[d]
                into.index(BEFORE + stage * DEPTH + d).store(codes)
                if in_blocks(HOW):
                    pair = (stage * DEPTH + d) * 2
                    scales.index(pair).store(scale * now[3 * d + 1])
                    scales.index(pair + 1).store(scale * now[3 * d + 2])
            mbarrier.arrive(full.index(stage), count=1)
            stage, phase = _next(stage, phase, HOW)
        expert, first, tokens, nt = expert1, first1, tokens1, nt1

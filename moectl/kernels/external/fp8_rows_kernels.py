# mypy: ignore-errors
"""Device code that quantizes rows to E4M3: tokens, or activations of what the first GEMM left.

`SCALING` is ``group`` (of `GROUP` columns), ``token``, ``static`` (`SCALE` is given), ``find`` (only the
largest magnitude of all rows, as the bits of a float) or ``found`` (scaled by that). `LIVE` says which rows
count: ``all``, ``ids`` (row r's id is an expert's) or ``sorted`` (those before the last expert's end).
"""

import triton
import triton.language as tl

from ..triton.sort_and_combine_kernels import _await_inputs
from ..triton.token_codes_kernels import _scale_of, _to_codes
from .gemm_glue_kernels import _activated


@triton.jit
def _quantize_kernel(
    X, Q, S, SCALE, LARGEST, IDS, OFFSETS, SLOTS, N, alpha, limit,
    E: tl.constexpr, TOP_K: tl.constexpr, LIVE: tl.constexpr, GATHER: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr,
    SCALING: tl.constexpr, POWERS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Q ``[rows, N]`` E4M3 with scales S; row r is that of X, or of the token of slot SLOTS[r] (GATHER)."""
    _await_inputs(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = 1.0
    if SCALING == "static":
        scale = tl.load(SCALE).to(tl.float32)
    if SCALING == "found":
        scale = _scale_of(tl.load(LARGEST).to(tl.float32, bitcast=True), POWERS)
        if (row == 0) & (part == 0):
            tl.store(S, scale)
    live = row >= 0
    if LIVE == "ids":
        expert = tl.load(IDS + row)
        live = (expert >= 0) & (expert < E)
    if LIVE == "sorted":
        live = row < tl.load(OFFSETS + E)
    if live:
        source = row
        if GATHER:
            source = (tl.load(SLOTS + row) // TOP_K).to(tl.int64)
        at = part * BLOCK + tl.arange(0, BLOCK)
        if ACT == "":
            v = tl.load(X + source * N + at, mask=at < N, other=0.0).to(tl.float32)
        else:
            v = _activated(X, source, part, N, alpha, limit, ACT, GATED, PAIRS, BLOCK)
            v = tl.where(at < N, v, 0.0)
        if SCALING == "find":
            tl.atomic_max(LARGEST, tl.max(tl.abs(v), 0).to(tl.int32, bitcast=True))
        else:
            if SCALING == "group":
                groups = tl.reshape(v, (BLOCK // GROUP, GROUP))
                scales = _scale_of(tl.max(tl.abs(groups), 1), POWERS)
                g = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                tl.store(S + row * (N // GROUP) + g, scales, mask=g * GROUP < N)
                v = tl.reshape(tl.div_rn(groups, tl.broadcast_to(scales[:, None], groups.shape)), (BLOCK,))
            else:
                if SCALING == "token":
                    scale = _scale_of(tl.max(tl.abs(v), 0), POWERS)
                    tl.store(S + row, scale)
                v = tl.div_rn(v, tl.zeros_like(v) + scale)
            tl.store(Q + row * N + at, _to_codes(v, Q), mask=at < N)


@triton.jit(do_not_specialize=["T"])
def _places_kernel(
    IDS, SLOTS, OFFSETS, PLACES, STARTS, T, E: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """PLACES: sorted position of each valid slot; STARTS ``[E + 1]`` int64: OFFSETS."""
    _await_inputs(PDL)
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    total = tl.load(OFFSETS + E)
    slot = tl.load(SLOTS + i, mask=i < total, other=-1)
    tl.store(PLACES + slot, i, mask=i < total)
    tl.store(STARTS + i, tl.load(OFFSETS + i, mask=i <= E, other=0).to(tl.int64), mask=i <= E)

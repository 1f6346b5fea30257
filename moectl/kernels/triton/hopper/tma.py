"""Kernel family `tma`: grouped GEMMs for SM90 on weights that are stored row by row; host code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....capabilities.own_kernels import token_format
from ....later import Later
from ....problem.moe_problem import MoEProblem
from ...choice.launch_plan import MOST_TOKENS
from ...choice.tile_family import weight_scales
from ...choice.tma_launches import (
    LINE,
    TMA_TILES,
    TmaTile,
    decodes,
    decodes_ahead,
    is_promoted,
    launch_registers,
    registers,
    shares_rows,
)
from ..kernel_family import KernelCall, KernelFamily, activation_numbers, multiprocessors
from ..row_matrix import RowLayer, RowMatrix
from ..sort_and_combine import Split, TokenTiles, finish, token_tiles_of
from ..token_codes import ALL_ROWS, LiveRows, empty_block_codes, quantize_rows, scale_kind

kernels = Later(f"{__package__}.tma_kernels")

_ROWS = gl.NVMMASharedLayout(128, 8, 5)
_TOKENS = gl.NVMMASharedLayout(128, 8, 2)


@dataclass(frozen=True)
class TmaVariant:
    """Compile-time parameters of a GEMM kernel.

    Attributes:
        stage: 1 or 2, the first or the second GEMM.
        kind: operand type, a key of `shared_wgmma.KINDS`; if `decodes`, one of `decoded_wgmma.KINDS`.
        scales: what has a scale in the weights: ``none``, a ``block``, a ``group`` of 128 columns of a row, a
            ``channel``, or the ``tensor``.
        token_scales: what has one in the tokens: ``none``, a ``block``, a ``token``, or the ``tensor``.
        weighted: whether the router's weights are applied in this GEMM.
        experts: the number of experts if tiles are a single token's ids, otherwise 0.
        even: whether every stage of the ring ends within the tokens' columns.
        wide: whether offsets of rows, in bytes of the first GEMM's input or columns of the second's output,
            need more than 32 bits, at up to `MOST_TOKENS` tokens.
        copied: whether TMA copies the tokens, which lie one after the other; otherwise they are gathered.
        shares_rows: whether the rows of a tile's tokens are in shared memory while they are gathered.
        decodes: whether FP8 or INT4 weights are decoded to the dtype of the tokens.
        ahead: whether the next operand is decoded while the last one is multiplied. Tiles with many sums lack
            the registers for that, and have two workers: one decodes and adds while the other multiplies.
        promoted: whether sums of 128 columns are added outside of the tensor cores.
        turned: whether tokens are the rows of products.
        codes: the dtype to which activations are rounded before they are stored as E4M3 codes with scales;
            ``none`` if they are stored in 16 bits.
        powers: whether scales of codes are powers of two.
        jobs: tiles that a program has been told of and has not finished yet, at most.
        registers: registers per thread of a worker, of a token loader, and of the weight loader and the
            scheduler.
    """

    stage: int
    kind: str
    scales: str
    token_scales: str
    bias: bool
    weighted: bool
    top_k: int
    experts: int
    even: bool
    wide: bool
    activation: str
    gated: bool
    widths: tuple[int, ...]
    workers: int
    blocks_m: int
    stages: int
    depth: int
    loaders: int
    copied: bool
    shares_rows: bool
    decodes: bool
    ahead: bool
    promoted: bool
    turned: bool
    codes: str
    powers: bool
    jobs: int
    registers: tuple[int, int, int]

    @property
    def exact(self) -> bool:
        """Nothing is folded into the weights (`mid_epilogue`)."""
        return True

    @property
    def splits(self) -> bool:
        """Programs have all steps of a reduction (`tile_board`)."""
        return False

    @property
    def halves(self) -> int:
        """Experts have no factors that the epilogue applies (`mid_epilogue`)."""
        return 0


def _farthest(layer: RowLayer, stage: int, plan: TokenTiles, x: Tensor) -> int:
    """The largest offset of a row of `x` that is gathered by token, or stored by slot."""
    if stage == 1:
        return max(len(x), MOST_TOKENS) * x.shape[1] * x.element_size()
    return max(len(plan.slots), MOST_TOKENS * layer.problem.top_k) * layer.problem.dims.hidden


def _variant(layer: RowLayer, stage: int, plan: TokenTiles, x: Tensor, tile: TmaTile) -> TmaVariant:
    p, act = layer.problem, layer.problem.activation
    m = layer.w13 if stage == 1 else layer.w2
    form, promoted, scales = token_format(p), is_promoted(p, tile), weight_scales(p)
    makes_codes = stage == 1 and tile.quantizes
    return TmaVariant(
        stage=stage,
        kind=p.dtype if form is None else p.scheme.weight.name,
        scales=scales,
        token_scales="none" if form is None else scale_kind(form),
        bias=m.bias is not None,
        weighted=p.routing.weight_on_input == (stage == 1),
        top_k=p.top_k,
        experts=p.local_experts if plan.tiles.ndim == 1 else 0,
        even=_row_bytes(m) % (LINE * tile.depth) == 0,
        wide=_farthest(layer, stage, plan, x) >= 2**31,
        activation=act.name,
        gated=act.gated,
        widths=tile.widths,
        workers=tile.workers,
        blocks_m=tile.blocks_m,
        stages=tile.stages,
        depth=tile.depth,
        loaders=tile.loaders,
        copied=_copied(stage, tile),
        shares_rows=shares_rows(p, tile) and not _copied(stage, tile),
        decodes=decodes(p),
        ahead=decodes_ahead(p, tile),
        promoted=promoted,
        turned=bool(tile.turned),
        codes=p.dtype if makes_codes else "none",
        powers=form is not None and form.rounds_scales and makes_codes,
        jobs=tile.jobs,
        registers=registers(p, tile, stage),
    )


def _copied(stage: int, tile: TmaTile) -> bool:
    """Whether TMA copies tokens. Those of the second GEMM lie one after the other; few are there sooner if
    threads gather them."""
    return stage == 2 and tile.tokens > 32


def _row_bytes(m: RowMatrix) -> int:
    return m.weights.shape[2] * m.weights.element_size()


def rows_descriptor(m: RowMatrix, gated: bool, blocks: int) -> TensorDescriptor:
    """The rows of `blocks` row blocks, in the order in which a copy brings them.

    Dimensions are experts, groups of 16 rows, the two halves of a group, 8 rows, and bytes. If `gated`, a
    group has 8 gate rows, then the 8 up rows that belong to them.
    """
    weights = m.weights.view(torch.uint8)
    experts, n, k = len(weights), m.n, _row_bytes(m)
    group, half = (8, n // 2) if gated else (16, 8)
    strides = [n * k, group * k, half * k, k, 1]
    shape = [experts, n // 16, 2, 8, k]
    return TensorDescriptor(weights, shape, strides, [1, 4 * blocks, 2, 8, LINE], _ROWS)


def scales_descriptor(m: RowMatrix, gated: bool, tile: TmaTile) -> TensorDescriptor:
    """Scales by groups: experts, groups of columns, gates and ups if `gated`, and rows."""
    assert m.scales is not None
    experts, groups, n = m.scales.shape
    halves = 2 if gated else 1
    shape = [experts, groups, halves, n // halves]
    box = [1, 2 * tile.depth, halves, tile.rows // halves]
    layout = gl.NVMMASharedLayout(0, 8 * m.scales.element_size(), 4)
    return TensorDescriptor(m.scales, shape, [groups * n, n, n // halves, 1], box, layout)


def tokens_descriptor(x: Tensor, tile: TmaTile) -> TensorDescriptor:
    """Rows `x` in the batches in which they are copied."""
    rows = x.view(torch.uint8)
    batch = min(tile.tokens & -tile.tokens, 64)
    return TensorDescriptor.from_tensor(rows, [batch, LINE], _TOKENS)


def swept_together(tile: TmaTile, programs: int) -> int:
    """Token tiles that sweep all weight rows together.

    An expert's last turned tile may take half the time of the others. Where tiles have few steps, programs
    take every `programs`-th one: without a common divisor, none gets tiles of one kind alone.
    """
    group = tile.group_m
    while tile.turned and math.gcd(group, programs) > 1:
        group += 1
    return group


def gemm(
    layer: RowLayer,
    stage: int,
    call: KernelCall,
    plan: TokenTiles,
    x: Tensor,
    scales: Tensor | None,
    y: Tensor,
    y_scales: Tensor | None,
    tile: TmaTile,
) -> None:
    """Computes one GEMM into `y`: stage 1 activations by sorted position, stage 2 partial results by slot.

    Args:
        x: the tokens, or the first GEMM's output; codes of them if products are of 8 bits.
        scales: scales of the codes.
        y_scales: where scales of `y` go, if `y` is for codes.
    """
    p, m = layer.problem, layer.w13 if stage == 1 else layer.w2
    row_tiles = triton.cdiv(m.n, tile.rows)
    grid = min(tile.programs * multiprocessors(x.device), plan.bound * row_tiles)
    gated = stage == 1 and p.activation.gated
    rows = rows_descriptor(m, gated, tile.workers * tile.blocks_m)
    in_groups = weight_scales(p) == "group"
    kernels._rows_gemm_kernel[(grid,)](
        X=x.view(torch.uint8),
        COPIES=tokens_descriptor(x, tile) if _copied(stage, tile) else rows,
        XS=x if scales is None else scales,
        ROWS=rows,
        S=scales_descriptor(m, gated, tile) if in_groups else x if m.scales is None else m.scales,
        B=x if m.bias is None else m.bias,
        Y=y if y_scales is None else y.view(torch.int16),
        YS=y if y_scales is None else y_scales,
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        COUNTER=plan.count if plan.tiles.ndim == 1 else plan.count[stage:],
        WEIGHTS=call.weights,
        N=m.n,
        steps=triton.cdiv(_row_bytes(m), LINE * tile.depth),
        KX=x.shape[1] * x.element_size(),
        NX=y.shape[1],
        row_tiles=row_tiles,
        group_m=swept_together(tile, grid),
        bound=plan.bound,
        **activation_numbers(p.activation),
        HOW=_variant(layer, stage, plan, x, tile),
        num_warps=4,
        maxnreg=launch_registers(tile),
        launch_pdl=True,
    )


def one_token(call: KernelCall) -> TokenTiles | None:
    """The schedule of a call of one token, whose ids are its tiles: there is nothing to sort. Else None."""
    if len(call.x) != 1 or call.order is not None:
        return None
    return TokenTiles(call.ids, call.ids, call.ids, call.ids)


def _run(layer: RowLayer, call: KernelCall, tile: TmaTile) -> None:
    p, t = layer.problem, call.assignments
    planned = one_token(call)
    # Turned products have 64 tokens, of which some may be none.
    split: Split = "all but the last full" if tile.turned else "evenly"
    plan = planned or token_tiles_of(call, p.local_experts, tile.tokens, split)
    by_slot = LiveRows("slots", call.ids, p.local_experts)
    # Rows of a batch that hold no token may hold anything.
    filled = ALL_ROWS if call.order is None else by_slot
    x, scales = _quantized(p, call.x, layer.w13, filled, beside=planned is None)
    parts = call.parts()
    h_scales: Tensor | None
    if tile.quantizes:
        codes = empty_block_codes(x, t, p.dims.intermediate)
        h, h_scales = codes.codes, codes.scales
        gemm(layer, 1, call, plan, x, scales, h, h_scales, tile)
    else:
        h = call.x.new_empty(t, p.dims.intermediate)
        gemm(layer, 1, call, plan, x, scales, h, None, tile)
        live = by_slot if planned else LiveRows("sorted", plan.offsets, p.local_experts)
        h, h_scales = _quantized(p, h, layer.w2, live)
    gemm(layer, 2, call, plan, h, h_scales, parts, None, tile)
    finish(call, parts, p.local_experts)


def _quantized(
    problem: MoEProblem, x: Tensor, m: RowMatrix, live: LiveRows, beside: bool = False
) -> tuple[Tensor, Tensor | None]:
    """What enters the GEMM of `m`, and its scales; `beside` the schedule, which reads other inputs."""
    form = token_format(problem)
    if form is None:
        return x, None
    made = quantize_rows(x, form, m.token_scale, live, beside=beside)
    return made.codes, made.scales


TMA_FAMILY = KernelFamily.of(TMA_TILES, _run)

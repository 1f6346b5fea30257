"""Kernel family `prefill`: grouped GEMMs for SM90 from about 40 tokens per expert; host code.

Steps: sort by expert and split into token tiles, first GEMM with activation, second GEMM, sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from ....later import Later
from ...choice.prefill_launches import (
    PREFILL_TILES,
    SHAPES,
    UNIT,
    PrefillTile,
    registers,
    stages,
    tokens_beyond_128,
)
from ..kernel_family import KernelCall, KernelFamily, KernelLayer, activation_numbers, multiprocessors
from ..sort_and_combine import TokenTiles, finish, token_tiles_of
from .gemm_spec import GemmSpec, operand, spec_fields

kernels = Later(f"{__package__}.prefill_kernels")


@dataclass(frozen=True)
class PrefillVariant(GemmSpec):
    """Compile-time parameters of a GEMM kernel: those of the GEMM and those of the tile.

    Attributes:
        group: 16, 32, or 64 for scales of 64 columns and more.
        span: 64-column tiles that a scale word covers.
        even: whether the tokens have as many columns as the stored weights.
        activation: its name; empty for the second GEMM.
        splits: whether programs have a part of the reduction.
        wide: whether offsets in the parts (slots times columns) need more than 32 bits.
        tokens_x16: width of the widest tile in units.
        widths, pieces, workers, blocks, registers: as in `PrefillShape`.
    """

    group: int
    span: int
    even: bool
    activation: str
    gated: bool
    splits: bool
    wide: bool
    tokens_x16: int
    widths: tuple[int, ...]
    pieces: tuple[int, ...]
    workers: int
    blocks: int
    stages: int
    registers: tuple[int, int]

    @property
    def rest(self) -> int:
        """Tokens of a stage beyond 128, rounded up to a power of two, or 0."""
        return tokens_beyond_128(self.tokens_x16)


def _variant(layer: KernelLayer, stage: int, assignments: int, tile: PrefillTile) -> PrefillVariant:
    p = layer.problem
    splits = stage == 2 and tile.split > 1
    weight, act, shape = p.scheme.weight, p.activation, SHAPES[tile.tokens_x16]
    m, columns = operand(layer, stage)
    return PrefillVariant(
        **spec_fields(layer, stage),
        group=weight.group if weight.group in (16, 32) else 64,
        span=m.k // 64 // m.scales.shape[2],
        even=m.k == columns,
        activation=act.name if stage == 1 else "",
        gated=act.gated and stage == 1,
        splits=splits,
        wide=splits and tile.split * assignments * p.dims.hidden >= 2**31,
        tokens_x16=tile.tokens_x16,
        widths=shape.widths,
        pieces=shape.pieces,
        workers=shape.workers,
        blocks=shape.blocks,
        stages=stages(p, tile),
        registers=registers(p, tile, stage),
    )


def gemm(
    layer: KernelLayer,
    stage: int,
    call: KernelCall,
    plan: TokenTiles,
    x: Tensor,
    y: Tensor,
    tile: PrefillTile,
) -> None:
    """Computes one GEMM into `y`: stage 1 activations by sorted position, stage 2 partial results by slot.

    Args:
        x: the tokens, or the first GEMM's output.
    """
    p, m = layer.problem, layer.w13 if stage == 1 else layer.w2
    variant = _variant(layer, stage, call.assignments, tile)
    splits = tile.split if variant.splits else 1
    tiles = plan.bound * triton.cdiv(m.n, SHAPES[tile.tokens_x16].rows) * splits
    grid = min(multiprocessors(x.device), tiles)
    kernels._prefill_kernel[(grid,)](
        X=x,
        W=m.codes,
        S=m.scales,
        Z=m.scales if m.zeros is None else m.zeros,
        B=m.scales if m.bias is None else m.bias,
        F=m.scales if m.factors is None else m.factors,
        Y=y.view(x.dtype),
        WEIGHTS=call.weights,
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        COUNTER=plan.count[stage:],
        N=m.n,
        K=m.k,
        KX=x.shape[1],
        NX=y.shape[-1],
        spans=m.scales.shape[2],
        group_m=tile.group_m,
        splits=splits,
        T=call.assignments,
        stagger=min(tile.stagger, (variant.stages - 1) // (variant.workers - 1), m.k // 64 // splits),
        **activation_numbers(p.activation),
        HOW=variant,
        num_warps=4,
        launch_pdl=True,
    )


def run(layer: KernelLayer, call: KernelCall, tile: PrefillTile) -> None:
    """Fills ``call.y``; see `KernelFamily.run`."""
    p, t = layer.problem, call.assignments
    plan = token_tiles_of(call, p.local_experts, UNIT * tile.tokens_x16, "in units")
    h = call.x.new_empty(t, p.dims.intermediate)
    y = call.parts(tile.split)
    gemm(layer, 1, call, plan, call.x, h, tile)
    gemm(layer, 2, call, plan, h, y, tile)
    finish(call, y, p.local_experts)


PREFILL_FAMILY = KernelFamily.of(PREFILL_TILES, run)

"""Kernel family `mid`: grouped GEMMs for SM90 at about 3 to 130 tokens per expert; host code."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....later import Later
from ....problem.schemes import FULL
from ...choice.mid_launches import MID_TILES, WIDTHS, MidTile, registers
from ...choice.tile_family import REGISTERS
from ..kernel_family import (
    KernelCall,
    KernelFamily,
    KernelLayer,
    KernelMatrix,
    activation_numbers,
    multiprocessors,
)
from ..sort_and_combine import TokenTiles, finish, token_tiles_of
from .gemm_spec import GemmSpec, keeps_nan, operand, spec_fields

kernels = Later(f"{__package__}.mid_kernels")
ring = Later(f"{__package__}.mid_loader")

LARGEST_UNIT = 32
"""Largest divisor of the output's columns that the compiler is told of; 16-byte stores need 8."""

_CODES = gl.NVMMASharedLayout(128, 8, 2)
_WORDS = gl.NVMMASharedLayout(0, 32, 1)


@dataclass(frozen=True)
class MidVariant(GemmSpec):
    """Compile-time parameters of a GEMM kernel: those of the GEMM and those of the tile.

    Attributes:
        group: columns per scale; 0: all.
        even: whether every stage of the ring ends within the tokens' columns.
        wide: whether offsets (slots times columns) need more than 32 bits.
        unit: a power of two that divides the output's columns.
        jobs: `MidTile.jobs`.
        registers: registers per thread of a worker, and of a loader or the scheduler.
    """

    group: int
    even: bool
    wide: bool
    activation: str
    gated: bool
    widths: tuple[int, ...]
    unit: int
    workers: int
    blocks_m: int
    stages: int
    depth: int
    loaders: int
    tma_scales: bool
    jobs: int
    registers: tuple[int, int]

    @property
    def blocks(self) -> int:
        """Row blocks of a tile."""
        return self.workers * self.blocks_m

    @property
    def experts(self) -> int:
        """0: tiles are always listed, for a single token, too (`tile_board`)."""
        return 0

    @property
    def splits(self) -> bool:
        """Whether programs may have a part of the reduction (`tile_board`), which a launch decides."""
        return self.stage == 2

    @property
    def scales(self) -> str:
        """Sums are not multiplied by scales (`tile_board`)."""
        return "none"

    @property
    def lean(self) -> bool:
        """Whether registers are so scarce that partitions recompute values instead of capturing them."""
        return self.tma_scales or self.blocks_m > 1


def _variant(layer: KernelLayer, stage: int, assignments: int, tile: MidTile) -> MidVariant:
    p = layer.problem
    weight, act = p.scheme.weight, p.activation
    m, columns = operand(layer, stage)
    return MidVariant(
        **spec_fields(layer, stage),
        group=0 if weight.group == FULL else weight.group,
        wide=assignments * p.dims.hidden >= 2**31,
        even=m.k == columns and m.k % (64 * tile.depth) == 0,
        activation=act.name,
        gated=act.gated,
        widths=WIDTHS[tile.tokens],
        unit=math.gcd(p.dims.intermediate if stage == 1 else p.dims.hidden, LARGEST_UNIT),
        workers=tile.workers,
        blocks_m=tile.blocks_m,
        stages=tile.stages,
        depth=tile.depth,
        loaders=tile.loaders,
        tma_scales=bool(tile.tma_scales),
        jobs=tile.jobs,
        registers=registers(tile),
    )


def gemm(
    layer: KernelLayer, stage: int, call: KernelCall, plan: TokenTiles, x: Tensor, y: Tensor, tile: MidTile
) -> None:
    """Computes one GEMM into `y`: stage 1 activations by sorted position, stage 2 partial results by slot.

    Args:
        x: the tokens, or the first GEMM's output.
        y: ``[T, columns]`` in the dtype of the tokens; of stage 2 also ``[splits, T, columns]`` in fp32, a
            part of the reduction each, with no more parts than the reduction has steps.
    """
    p, m = layer.problem, layer.w13 if stage == 1 else layer.w2
    if keeps_nan(p, m) and m.k % (64 * tile.depth):
        # A stage that ends past the columns also has codes of other rows: a NaN among them times a token's
        # zero is NaN.
        tile = replace(tile, depth=1)
    variant = _variant(layer, stage, call.assignments, tile)
    row_tiles = triton.cdiv(m.n, 64 * variant.blocks)
    splits = y.numel() // (call.assignments * y.shape[-1])
    grid = min(tile.programs * multiprocessors(x.device), plan.bound * row_tiles * splits)
    kernels._grouped_gemm_kernel[(grid,)](
        X=x,
        CODES=_codes_descriptor(m, tile.depth),
        S=_words_descriptor(m.scales, variant) if variant.tma_scales else m.scales,
        Z=m.scales if m.zeros is None else m.zeros,
        B=m.scales if m.bias is None else m.bias,
        F=m.scales if m.factors is None else m.factors,
        Y=y.view(x.dtype),
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        COUNTER=plan.count[stage:],
        WEIGHTS=call.weights,
        N=m.n,
        K=m.k,
        KX=x.shape[1],
        NX=y.shape[-1],
        row_tiles=row_tiles,
        splits=splits,
        T=call.assignments,
        **activation_numbers(p.activation),
        HOW=variant,
        num_warps=4,
        maxnreg=launch_registers(tile),
        launch_pdl=True,
    )


def launch_registers(tile: MidTile) -> int:
    """Registers per thread at launch, before they are redistributed from loaders to workers."""
    producers = 4  # warps of a warpgroup: two token loaders, the weight loader and the scheduler
    return REGISTERS // (32 * (4 * tile.workers + producers) * tile.programs) // 8 * 8


def _codes_descriptor(m: KernelMatrix, depth: int) -> TensorDescriptor:
    """The codes as lines of 128 bytes; a copy moves `depth` tiles."""
    lines = m.codes.shape[-1] // 128
    return TensorDescriptor.from_tensor(m.codes.view(-1, 128), [depth * lines, 128], _CODES)


def _words_descriptor(words: Tensor, variant: MidVariant) -> TensorDescriptor:
    """Scale words as one row; a copy moves those of one row block of a stage."""
    return TensorDescriptor.from_tensor(words.view(-1), [ring._stage_words.fn(variant)], _WORDS)


def _run(layer: KernelLayer, call: KernelCall, tile: MidTile) -> None:
    p, t = layer.problem, call.assignments
    plan = token_tiles_of(call, p.local_experts, tile.tokens)
    h = call.x.new_empty(t, p.dims.intermediate)
    parts = call.parts(tile.split)
    gemm(layer, 1, call, plan, call.x, h, tile)
    gemm(layer, 2, call, plan, h, parts, tile)
    finish(call, parts, p.local_experts)


MID_FAMILY = KernelFamily.of(MID_TILES, _run)

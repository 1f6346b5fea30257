"""Kernel family `prefill`: grouped GEMMs for SM90 from about 40 tokens per expert; host code.

Steps: sort by expert, split into token tiles, first GEMM with activation, second GEMM, sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
from torch import Tensor

from ....capabilities.own_kernels import GATED, UNGATED
from ....problem.moe_problem import MoEProblem
from ..kernel_family import (
    KernelCall,
    KernelFamily,
    KernelLayer,
    activation_numbers,
    column_refusal,
    multiprocessors,
)
from ..launch_shape import GemmShape, LaunchShape
from ..launches import token_tiles
from ..sort_and_combine import finish, launch_options, order_of
from . import prefill_kernels as kernels
from .fragments import scale_words
from .gemm_spec import SHARED_MEMORY, GemmSpec, dtype_refusal, operand, spec_fields
from .prefill_tiles import _schedule_kernel

UNIT = 16
"""Tokens in a unit: token tiles have widths of whole units."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Warps and register counts of a program.

    Attributes:
        workers: consumer warpgroups.
        blocks: blocks of 64 weight rows per worker.
        widths: widths in units of 16 token columns for which the kernel has branches; a tile uses the
            smallest
            that fits. Widths above 8, and all widths if `blocks` is 1, are a power of two or the sum of two.
        pieces: sizes of the pieces in which a tile's tokens are loaded, empty pieces being skipped; tokens
        beyond
            128 are one piece. Each piece occupies registers of the loader.
        registers: registers per thread of a worker and of the loader.
    """

    workers: int
    blocks: int
    widths: tuple[int, ...]
    pieces: tuple[int, ...]
    registers: tuple[int, int]

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 64 * self.workers * self.blocks


SHAPES: dict[int, PrefillShape] = {
    8: PrefillShape(2, 2, (2, 4, 5, 6, 7, 8), (64, 32, 32), (216, 72)),
    9: PrefillShape(2, 2, (2, 4, 5, 6, 7, 8, 9), (64, 32, 32, 16), (216, 72)),
    12: PrefillShape(3, 1, (2, 4, 6, 8, 10, 12), (64, 64, 64), (152, 56)),
}
"""By `PrefillTile.tokens_x16`."""

REGISTERS: dict[tuple[bool, int], tuple[int, int]] = {(True, 12): (144, 80)}
"""(bias, tokens_x16) for which the shape's registers would spill -> registers to use instead.

The loader needs more registers if there is a bias to load; without one the workers get them."""

STAGING_BYTES = 64 * 64 * 2
"""Shared memory in which a warpgroup transposes its results before it stores them."""

PER_TOKEN_BYTES = 2 * 256 * 4
"""Shared memory for slots, router weights or bias (each) of the current and the next tile."""

PER_ROW_BYTES = 2 * 64 * 4
"""Shared memory for the factors of 64 rows of the current and the next tile."""

MOST_STAGES, FEWEST_STAGES = 7, 3


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """One launch configuration.

    Attributes:
        tokens_x16: most tokens of a tile, in units of 16; a key of `SHAPES`.
        group_m: token tiles that sweep all weight rows together, to reuse weights in L2 (Triton's
            GROUP_SIZE_M).
        stagger: steps of the ring by which each worker starts later than the one before it.
    """

    tokens_x16: int = 9
    group_m: int = 4
    stagger: int = 3


@dataclass(frozen=True)
class PrefillVariant(GemmSpec):
    """Compile-time parameters of a GEMM kernel: those of the GEMM and those of the tile.

    Attributes:
        group: 16, 32, or 64 for scales of 64 columns and more.
        span: 64-column tiles that a scale word covers.
        even: whether the tokens have as many columns as the stored weights.
        activation: its name; empty for the second GEMM.
        tokens_x16: width of the widest tile in units.
        widths, pieces, workers, blocks, registers: as in `PrefillShape`.
    """

    group: int
    span: int
    even: bool
    activation: str
    gated: bool
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
        return _rest(self.tokens_x16)


def stages(problem: MoEProblem, tile: PrefillTile) -> int:
    """Stages of the ring that fit in shared memory, at most `MOST_STAGES`."""
    weight = problem.scheme.weight
    words = scale_words.fn(weight.name, weight.group) * (2 if weight.zero_point else 1)
    shape = SHAPES[tile.tokens_x16]
    tokens = 128 + _rest(tile.tokens_x16)
    per_stage = tokens * 128 + 4 * 512 * weight.bits + 4 * 4 * words + 8 * (1 + shape.workers)
    fixed = shape.workers * STAGING_BYTES + PER_TOKEN_BYTES * (3 if problem.bias else 2) + 512
    fixed += PER_ROW_BYTES if weight.number.global_scale else 0
    return int(min(MOST_STAGES, (SHARED_MEMORY - fixed) // per_stage))


def _rest(units: int) -> int:
    return triton.next_power_of_2(UNIT * (units - 8)) if units > 8 else 0


def _variant(layer: KernelLayer, stage: int, tile: PrefillTile) -> PrefillVariant:
    p = layer.problem
    weight, act, shape = p.scheme.weight, p.activation, SHAPES[tile.tokens_x16]
    m, columns = operand(layer, stage)
    return PrefillVariant(
        **spec_fields(layer, stage),
        group=weight.group if weight.group in (16, 32) else 64,
        span=m.k // 64 // m.scales.shape[2],
        even=m.k == columns,
        activation=act.name if stage == 1 else "",
        gated=act.gated and stage == 1,
        tokens_x16=tile.tokens_x16,
        widths=shape.widths,
        pieces=shape.pieces,
        workers=shape.workers,
        blocks=shape.blocks,
        stages=stages(p, tile),
        registers=REGISTERS.get((p.bias, tile.tokens_x16), shape.registers),
    )


@dataclass(frozen=True)
class PrefillSchedule:
    """A call's assignments sorted by expert, split into token tiles.

    Attributes:
        slots: the sorted assignments.
        tiles: ``[bound, 4]``: expert, first and end position, width in units.
        count: ``[3]``: number of tiles, then for each GEMM the counter from which programs take further
            tiles.
        bound: upper bound on the number of tiles.
    """

    slots: Tensor
    tiles: Tensor
    count: Tensor
    bound: int


def split(offsets: Tensor, assignments: int, experts: int, tile: PrefillTile) -> tuple[Tensor, Tensor, int]:
    """`tiles`, `count` and `bound` of a `PrefillSchedule`; `offsets`: the first position of each expert."""
    bound = token_tiles(assignments, experts, UNIT * tile.tokens_x16)
    tiles, count = offsets.new_empty(bound, 4), offsets.new_empty(3)
    padded = triton.next_power_of_2(experts)
    _schedule_kernel[(1,)](
        offsets, tiles, count, E=experts, EPAD=padded, MOST=tile.tokens_x16, **launch_options()
    )
    return tiles, count, bound


def schedule(call: KernelCall, experts: int, tile: PrefillTile) -> PrefillSchedule:
    """Sorts a call's assignments by expert and splits them into tiles."""
    slots, offsets = order_of(call, experts)
    return PrefillSchedule(slots, *split(offsets, call.assignments, experts, tile))


def gemm(
    layer: KernelLayer,
    stage: int,
    call: KernelCall,
    plan: PrefillSchedule,
    x: Tensor,
    y: Tensor,
    tile: PrefillTile,
) -> None:
    """Computes one GEMM into `y`: stage 1 activations by sorted position, stage 2 partial results by slot.

    Args:
        x: the tokens, or the first GEMM's output.
    """
    p, m = layer.problem, layer.w13 if stage == 1 else layer.w2
    variant = _variant(layer, stage, tile)
    grid = min(multiprocessors(x.device), plan.bound * triton.cdiv(m.n, SHAPES[tile.tokens_x16].rows))
    kernels._prefill_kernel[(grid,)](
        X=x,
        W=m.codes,
        S=m.scales,
        Z=m.scales if m.zeros is None else m.zeros,
        B=m.scales if m.bias is None else m.bias,
        F=m.scales if m.factors is None else m.factors,
        Y=y,
        WEIGHTS=call.weights,
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        COUNTER=plan.count[stage:],
        N=m.n,
        K=m.k,
        KX=x.shape[1],
        NX=y.shape[1],
        spans=m.scales.shape[2],
        group_m=tile.group_m,
        stagger=min(tile.stagger, (variant.stages - 1) // (variant.workers - 1), m.k // 64),
        **activation_numbers(p.activation),
        HOW=variant,
        num_warps=4,
        launch_pdl=True,
    )


def run(layer: KernelLayer, call: KernelCall, tile: PrefillTile) -> None:
    """Fills ``call.y``; see `KernelFamily.run`."""
    p, t = layer.problem, call.assignments
    plan = schedule(call, p.local_experts, tile)
    h = call.x.new_empty(t, p.dims.intermediate)
    y = call.parts()
    gemm(layer, 1, call, plan, call.x, h, tile)
    gemm(layer, 2, call, plan, h, y, tile)
    finish(call, y, p.local_experts)


def _fits(problem: MoEProblem, tile: PrefillTile) -> str:
    act = problem.activation
    if tile.tokens_x16 not in SHAPES or tile.group_m < 1 or tile.stagger < 0:
        return f"{tile} is not a supported tile: tokens_x16 must be one of {', '.join(map(str, SHAPES))}"
    if refusal := dtype_refusal(problem) or column_refusal(problem):
        return refusal
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it supports only the activations {', '.join(GATED + UNGATED)}; the layer uses {act.name}"
    if stages(problem, tile) < FEWEST_STAGES:
        return f"{FEWEST_STAGES} stages of {tile} do not fit in shared memory"
    return ""


PROMISING = (PrefillTile(8), PrefillTile(9), PrefillTile(12, stagger=0))
"""Tiles that were worth measuring on an H200."""


def _candidates(problem: MoEProblem) -> list[PrefillTile]:
    return [tile for tile in PROMISING if not _fits(problem, tile)]


def launch_shape(problem: MoEProblem, tile: PrefillTile) -> LaunchShape:
    """The tile in the terms of the model of time."""
    kind, shape = f"prefill {tile.tokens_x16}", SHAPES[tile.tokens_x16]
    first, second = (GemmShape(f"{kind} {stage}", shape.rows, 1) for stage in ("first", "second"))
    widths = tuple(UNIT * units for units in shape.widths)
    return LaunchShape(kind, (first, second), widths, even=True, persistent=1)


PREFILL_FAMILY = KernelFamily(
    PrefillTile,
    run,
    _fits,
    capability=((9, 0), (9, 0)),
    candidates=_candidates,
    tokens_per_expert=(40, math.inf),
    shape=launch_shape,
)

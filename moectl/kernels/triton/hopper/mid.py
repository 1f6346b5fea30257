"""Kernel family `mid`: grouped GEMMs for SM90 at about 3 to 130 tokens per expert; host code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....capabilities.own_kernels import GATED, UNGATED
from ....problem.moe_problem import MoEProblem
from ....problem.schemes import FULL
from ..kernel_family import (
    KernelCall,
    KernelFamily,
    KernelLayer,
    KernelMatrix,
    activation_numbers,
    column_refusal,
    multiprocessors,
)
from ..launch_shape import GemmShape, LaunchShape
from ..launches import token_tiles
from ..sort_and_combine import finish, order_of
from ..token_codes import LiveRows
from . import mid_kernels as kernels
from . import mid_loader as ring
from .few_token_tiles import MOST, few_tiles
from .fragments import scale_words
from .gemm_spec import SHARED_MEMORY, GemmSpec, dtype_refusal, operand, spec_fields

WIDTHS: dict[int, tuple[int, ...]] = {
    16: (16,),
    32: (16, 32),
    64: (16, 32, 48, 64),
    96: (32, 64, 96),
    128: (32, 48, 64, 80, 96, 128),
}
"""Most tokens of a tile -> the widths in token columns for which its kernel has branches.

Each width is a power of two or the sum of two.
"""

LARGEST_UNIT = 32
"""Largest divisor of the output's columns that the compiler is told of; 16-byte stores need 8."""

REGISTERS: dict[tuple[int, int, int, int], dict[int, tuple[int, int]]] = {
    (2, 1, 1, 0): {128: (216, 80)},
    (3, 1, 1, 0): {64: (152, 56), 128: (144, 80)},
    (4, 1, 1, 0): {64: (112, 64)},
    (2, 2, 1, 0): {32: (96, 48)},
    (3, 1, 1, 1): {128: (144, 80)},
    (3, 1, 2, 0): {64: (144, 80)},
    (3, 1, 2, 1): {32: (152, 56)},
    (4, 1, 1, 1): {32: (104, 64)},
    (4, 1, 2, 1): {16: (104, 64)},
}
"""(workers, programs, blocks_m, tma_scales) of a `MidTile` -> {most tokens of a tile: registers per thread
of a worker and of a loader}. Accumulators of more tokens do not fit."""

_CODES = gl.NVMMASharedLayout(128, 8, 2)
_WORDS = gl.NVMMASharedLayout(0, 32, 1)


@dataclass(frozen=True, slots=True)
class MidTile:
    """One launch configuration.

    Attributes:
        tokens: most tokens of a tile, a key of `WIDTHS`.
        workers: consumer warpgroups, which dequantize weights and issue wgmmas.
        stages: stages of the shared memory ring.
        depth: 64-column pieces per stage.
        loaders: warps that copy token rows (producers).
        programs: programs resident on one multiprocessor.
        blocks_m: blocks of 64 weight rows (M of wgmma) per worker.
        tma_scales: 1 if scale words are copied in boxes by TMA, 0 if they are copied one by one by cp.async.
    """

    tokens: int
    workers: int
    stages: int
    depth: int = 2
    loaders: int = 2
    programs: int = 1
    blocks_m: int = 1
    tma_scales: int = 0


@dataclass(frozen=True)
class MidVariant(GemmSpec):
    """Compile-time parameters of a GEMM kernel: those of the GEMM and those of the tile.

    Attributes:
        group: columns per scale; 0: all.
        even: whether every stage of the ring ends within the tokens' columns.
        wide: whether offsets (slots times columns) need more than 32 bits.
        unit: a power of two that divides the output's columns.
        registers: registers per thread of a worker and of a loader.
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
    registers: tuple[int, int]

    @property
    def blocks(self) -> int:
        """Row blocks of a tile."""
        return self.workers * self.blocks_m

    @property
    def lean(self) -> bool:
        """Whether registers are so scarce that partitions recompute values instead of capturing them."""
        return self.tma_scales or self.blocks_m > 1


def _registers_key(tile: MidTile) -> tuple[int, int, int, int]:
    return tile.workers, tile.programs, tile.blocks_m, tile.tma_scales


def registers(tile: MidTile) -> tuple[int, int]:
    """Registers per thread of a worker and of a loader; (0, 0) if the tile's accumulators do not fit."""
    by_tokens = REGISTERS[_registers_key(tile)]
    return next((counts for tokens, counts in by_tokens.items() if tile.tokens <= tokens), (0, 0))


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
        registers=registers(tile),
    )


@dataclass(frozen=True)
class MidSchedule:
    """A call's assignments sorted by expert, split into at most `bound` token tiles.

    Attributes:
        slots: the sorted assignments.
        tiles: ``[bound, 4]``: expert, first position in `slots`, tokens, 0.
        count: the first number is that of tiles.
        live: the positions in `slots`.
    """

    slots: Tensor
    tiles: Tensor
    count: Tensor
    bound: int
    live: LiveRows


def schedule(call: KernelCall, experts: int, tokens: int, one_launch: bool = False) -> MidSchedule:
    """Sorts a call's assignments by expert and splits them into tiles of up to `tokens`.

    With `one_launch` a single program does it, where the assignments are few.
    """
    bound = token_tiles(call.assignments, experts, tokens)
    if one_launch and call.order is None and call.assignments <= MOST:
        slots, tiles, count = few_tiles(call.ids, experts, tokens, bound)
        return MidSchedule(slots, tiles, count, bound, LiveRows("sorted", count, 1))
    slots, offsets = order_of(call, experts)
    tiles, count = call.ids.new_empty(bound, 4), call.ids.new_empty(1)
    kernels._token_tiles_kernel[(triton.cdiv(bound, 16),)](
        offsets,
        tiles,
        count,
        tokens,
        E=experts,
        EPAD=triton.next_power_of_2(experts),
        BLOCK=16,
        launch_pdl=True,
    )
    return MidSchedule(slots, tiles, count, bound, LiveRows("sorted", offsets, experts))


def gemm(
    layer: KernelLayer, stage: int, call: KernelCall, plan: MidSchedule, x: Tensor, y: Tensor, tile: MidTile
) -> None:
    """Computes one GEMM into `y`: stage 1 activations by sorted position, stage 2 partial results by slot.

    Args:
        x: the tokens, or the first GEMM's output.
    """
    p, m = layer.problem, layer.w13 if stage == 1 else layer.w2
    variant = _variant(layer, stage, call.assignments, tile)
    row_tiles = triton.cdiv(m.n, 64 * variant.blocks)
    grid = min(tile.programs * multiprocessors(x.device), plan.bound * row_tiles)
    kernels._grouped_gemm_kernel[(grid,)](
        X=x,
        CODES=_codes_descriptor(m, tile.depth),
        S=_words_descriptor(m.scales, variant) if variant.tma_scales else m.scales,
        Z=m.scales if m.zeros is None else m.zeros,
        B=m.scales if m.bias is None else m.bias,
        F=m.scales if m.factors is None else m.factors,
        Y=y,
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        WEIGHTS=call.weights,
        N=m.n,
        K=m.k,
        KX=x.shape[1],
        NX=y.shape[1],
        row_tiles=row_tiles,
        **activation_numbers(p.activation),
        HOW=variant,
        num_warps=4,
        maxnreg=launch_registers(tile),
        launch_pdl=True,
    )


def launch_registers(tile: MidTile) -> int:
    """Registers per thread at launch, before they are redistributed from loaders to workers."""
    producers = 4  # warps of a warpgroup: token loaders, the weight loader and idle warps
    return 65536 // (32 * (4 * tile.workers + producers) * tile.programs) // 8 * 8


def _codes_descriptor(m: KernelMatrix, depth: int) -> TensorDescriptor:
    """The codes as lines of 128 bytes; a copy moves `depth` tiles."""
    lines = m.codes.shape[-1] // 128
    return TensorDescriptor.from_tensor(m.codes.view(-1, 128), [depth * lines, 128], _CODES)


def _words_descriptor(words: Tensor, variant: MidVariant) -> TensorDescriptor:
    """Scale words as one row; a copy moves those of one row block of a stage."""
    return TensorDescriptor.from_tensor(words.view(-1), [ring._stage_words.fn(variant)], _WORDS)


def _run(layer: KernelLayer, call: KernelCall, tile: MidTile) -> None:
    p, t = layer.problem, call.assignments
    plan = schedule(call, p.local_experts, tile.tokens)
    h = call.x.new_empty(t, p.dims.intermediate)
    parts = call.parts()
    gemm(layer, 1, call, plan, call.x, h, tile)
    gemm(layer, 2, call, plan, h, parts, tile)
    finish(call, parts, p.local_experts)


def shared_bytes(problem: MoEProblem, tile: MidTile) -> int:
    """Shared memory of a program: the ring, and each worker's slots, router weights and store staging."""
    weight = problem.scheme.weight
    words = scale_words.fn(weight.name, weight.group) // 32
    blocks = tile.workers * tile.blocks_m
    copied_blocks = blocks if tile.tma_scales else triton.next_power_of_2(blocks)
    words *= 128 * copied_blocks * (2 if weight.zero_point else 1)
    stage = tile.depth * (128 * tile.tokens + 512 * weight.bits * blocks + words) + 16
    per_worker = 8 * triton.next_power_of_2(tile.tokens) + 64 * 32 * 2 + 512
    return int(tile.stages * stage + tile.workers * per_worker + 1024)


def _fits(problem: MoEProblem, tile: MidTile) -> str:
    weight, act = problem.scheme.weight, problem.activation
    if tile.tokens not in WIDTHS or _registers_key(tile) not in REGISTERS or tile.loaders not in (1, 2):
        return f"{tile} is not a supported tile"
    if tile.stages < 2:
        return f"{tile} needs two stages: one to fill while another is read"
    if not registers(tile)[0]:
        return f"the accumulators of {tile} do not fit in the registers of its workers"
    if tile.depth not in (1, 2, 4):
        return f"{tile} is not a supported tile: depth must be 1, 2 or 4"
    shared = tile.programs * shared_bytes(problem, tile)
    if shared > SHARED_MEMORY:
        return f"{tile} needs {shared} bytes of shared memory; SM90 has {SHARED_MEMORY}"
    if refusal := dtype_refusal(problem) or column_refusal(problem):
        return refusal
    if tile.tma_scales and (weight.zero_point or weight.group not in (16, 32, 128)):
        return f"{tile} supports only groups of 16, 32 and 128 without zero points, the layer has {weight}"
    if tile.tma_scales and max(weight.group, 64 * tile.depth) % min(weight.group, 64 * tile.depth):
        return f"{64 * tile.depth} columns of a stage are not aligned with scale groups of {weight.group}"
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it does not support the activation {act}"
    return ""


PROMISING: tuple[tuple[int, int, int, int, int, int], ...] = (
    (16, 4, 1, 1, 0, 4),
    (16, 4, 1, 2, 1, 2),
    (32, 4, 1, 1, 0, 2),
    (32, 4, 1, 1, 1, 2),
    (32, 3, 1, 2, 1, 2),
    (32, 2, 2, 1, 0, 2),
    (64, 4, 1, 1, 0, 2),
    (64, 3, 1, 1, 0, 2),
    (64, 3, 1, 1, 1, 2),
    (64, 3, 1, 2, 0, 2),
    (96, 3, 1, 1, 0, 2),
    (96, 3, 1, 1, 1, 2),
    (128, 3, 1, 1, 0, 2),
)
"""(tokens, workers, programs, blocks_m, tma_scales, depth) that were worth measuring on an H200."""

STAGES = (8, 6, 5, 4, 3, 2)


def _candidates(problem: MoEProblem) -> Sequence[MidTile]:
    """Each of `PROMISING` with as many stages as fit: more stages hide more latency."""
    candidates = []
    for tokens, workers, programs, blocks_m, tma_scales, depth in PROMISING:
        tile = MidTile(tokens, workers, 0, depth, programs=programs, blocks_m=blocks_m, tma_scales=tma_scales)
        rings = (replace(tile, stages=stages) for stages in STAGES)
        candidates += [tile for tile in rings if not _fits(problem, tile)][:1]
    return candidates


def launch_shape(problem: MoEProblem, tile: MidTile) -> LaunchShape:
    """The tile in the terms of the model of time."""
    kind = f"mid {tile.tokens} {tile.workers}x{tile.blocks_m}x{tile.programs} {tile.tma_scales}"
    rows = 64 * tile.workers * tile.blocks_m
    first, second = (GemmShape(f"{kind} {stage}", rows, tile.depth) for stage in ("first", "second"))
    return LaunchShape(kind, (first, second), WIDTHS[tile.tokens], persistent=tile.programs)


MID_FAMILY = KernelFamily(
    MidTile,
    _run,
    _fits,
    capability=((9, 0), (9, 0)),
    candidates=_candidates,
    tokens_per_expert=(3.0, 130.0),
    shape=launch_shape,
)

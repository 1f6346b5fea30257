"""Launches of the kernel family `mid`: about 3 to 130 tokens per expert on SM90."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...capabilities.own_kernels import GATED, UNGATED
from ...problem.moe_problem import MoEProblem
from .launch_shape import GemmShape, LaunchShape
from .tile_family import (
    SHARED_MEMORY,
    TileFamily,
    column_refusal,
    dtype_refusal,
    next_power_of_2,
    scale_words,
    splits_of,
)

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

REGISTERS: dict[tuple[int, int, int, int], dict[int, tuple[int, int]]] = {
    (2, 1, 1, 0): {128: (216, 80)},
    (3, 1, 1, 0): {64: (152, 56), 128: (144, 80)},
    (4, 1, 1, 0): {64: (112, 64)},
    (2, 2, 1, 0): {64: (96, 48)},
    (3, 1, 1, 1): {128: (144, 80)},
    (3, 1, 2, 0): {64: (144, 80)},
    (3, 1, 2, 1): {32: (152, 56)},
    (4, 1, 1, 1): {32: (104, 64)},
    (4, 1, 2, 1): {16: (104, 64)},
}
"""(workers, programs, blocks_m, tma_scales) of a `MidTile` -> {most tokens of a tile: registers per thread
of a worker, and of a loader or the scheduler}. Accumulators of more tokens do not fit."""


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
        split: programs that share the second GEMM's reduction: few large experts have few tiles of it, which
            would leave multiprocessors without work.
    """

    tokens: int
    workers: int
    stages: int
    depth: int = 2
    loaders: int = 2
    programs: int = 1
    blocks_m: int = 1
    tma_scales: int = 0
    split: int = 1

    @property
    def jobs(self) -> int:
        """Tiles that a program has been told of and has not finished yet, at most.

        A tile's place is free only after its epilogue: with four, narrow GEMMs of one program per
        multiprocessor took up to 10% longer. Wide tiles have four, as their slots and router weights would
        take shared memory from the ring.
        """
        return 8 if self.programs == 1 and self.workers * self.blocks_m * self.tokens <= 192 else 4


def _registers_key(tile: MidTile) -> tuple[int, int, int, int]:
    return tile.workers, tile.programs, tile.blocks_m, tile.tma_scales


def registers(tile: MidTile) -> tuple[int, int]:
    """Registers per thread of a worker, and of a loader or the scheduler; (0, 0) if the tile's accumulators
    do not fit."""
    by_tokens = REGISTERS[_registers_key(tile)]
    return next((counts for tokens, counts in by_tokens.items() if tile.tokens <= tokens), (0, 0))


def shared_bytes(problem: MoEProblem, tile: MidTile) -> int:
    """Shared memory of a program: the ring, slots and router weights of each job, and each worker's store
    staging."""
    weight = problem.scheme.weight
    words = scale_words(weight.name, weight.group) // 32
    blocks = tile.workers * tile.blocks_m
    copied_blocks = blocks if tile.tma_scales else next_power_of_2(blocks)
    words *= 128 * copied_blocks * (2 if weight.zero_point else 1)
    stage = tile.depth * (128 * tile.tokens + 512 * weight.bits * blocks + words) + 16
    job = 8 * next_power_of_2(tile.tokens) + 8 * 4 + 3 * 8  # its words and three barriers
    per_worker = 64 * 32 * 2 + 512
    return int(tile.stages * stage + tile.jobs * job + tile.workers * per_worker + 896)


def _fits(problem: MoEProblem, tile: MidTile) -> str:
    weight, act = problem.scheme.weight, problem.activation
    if tile.tokens not in WIDTHS or _registers_key(tile) not in REGISTERS or tile.loaders != 2:
        return f"{tile} is not a supported tile"
    if tile.stages < 2:
        return f"{tile} needs two stages: one to fill while another is read"
    if not registers(tile)[0]:
        return f"the accumulators of {tile} do not fit in the registers of its workers"
    steps = math.ceil(problem.dims.intermediate / (64 * tile.depth))
    if not 1 <= tile.split <= steps:
        return f"{tile} splits a reduction of {steps} steps"
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
    if tile.blocks_m > 1 and weight.bits == 8:
        return f"ptxas spills registers of two blocks of {weight} per worker"
    if weight.bits == 8 and weight.zero_point and (tile.workers, tile.tokens) == (4, 64):
        return f"ptxas spills registers of four workers of {weight} for 64 tokens"
    wide = tile.tokens == 128 or (tile.tokens == 64 and tile.workers != 3)
    if weight.bits == 8 and weight.group == 32 and problem.bias and wide:
        return f"ptxas spills registers of {weight} with biases for {tile.tokens} tokens"
    if act.name == "situ" and tile.tokens == 128:
        return f"ptxas spills registers of {act.name} for 128 tokens"
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it does not support the activation {act}"
    return ""


PROMISING: tuple[tuple[int, int, int, int, int, int], ...] = (
    (16, 2, 2, 1, 0, 4),
    (16, 4, 1, 1, 0, 4),
    (16, 4, 1, 2, 1, 2),
    (32, 4, 1, 1, 0, 2),
    (32, 4, 1, 1, 1, 2),
    (32, 3, 1, 2, 1, 2),
    (32, 2, 2, 1, 0, 2),
    (64, 2, 2, 1, 0, 2),
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
        for tile in [tile for tile in rings if not _fits(problem, tile)][:1]:
            candidates += [replace(tile, split=split) for split in (1, *_splits(problem, tile))]
    return candidates


def _splits(problem: MoEProblem, tile: MidTile) -> list[int]:
    """The splits, beside none, that are candidates for a tile."""
    return splits_of(problem, 64 * tile.workers * tile.blocks_m, tile.programs, 64 * tile.depth)


def launch_shape(problem: MoEProblem, tile: MidTile) -> LaunchShape:
    """The tile in the terms of the model of time."""
    kind = f"mid {tile.tokens} {tile.workers}x{tile.blocks_m}x{tile.programs} {tile.tma_scales}"
    rows = 64 * tile.workers * tile.blocks_m
    first, second = (
        GemmShape(f"{kind} {stage}", rows, tile.depth, split)
        for stage, split in (("first", 1), ("second", tile.split))
    )
    return LaunchShape(kind, (first, second), WIDTHS[tile.tokens], persistent=tile.programs)


MID_TILES = TileFamily(
    MidTile,
    _fits,
    capability=((9, 0), (9, 0)),
    candidates=_candidates,
    tokens_per_expert=(1.0, 130.0),
    shape=launch_shape,
)

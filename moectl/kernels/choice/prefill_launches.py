"""Launches of the kernel family `prefill`: from about 40 tokens per expert on SM90."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

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

UNIT = 16
"""Tokens in a unit: token tiles have widths of whole units."""


class PrefillShape(NamedTuple):
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

SPLIT_REGISTERS: dict[int, tuple[int, int]] = {9: (208, 88)}
"""The same by `tokens_x16` for a second GEMM whose reduction is split: its loader has more to keep."""

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
        split: programs that share the second GEMM's reduction: few large experts have few tiles of it, which
            would leave multiprocessors without work.
    """

    tokens_x16: int = 9
    group_m: int = 4
    stagger: int = 3
    split: int = 1


def stages(problem: MoEProblem, tile: PrefillTile) -> int:
    """Stages of the ring that fit in shared memory, at most `MOST_STAGES`."""
    weight = problem.scheme.weight
    words = scale_words(weight.name, weight.group) * (2 if weight.zero_point else 1)
    shape = SHAPES[tile.tokens_x16]
    tokens = 128 + tokens_beyond_128(tile.tokens_x16)
    per_stage = tokens * 128 + 4 * 512 * weight.bits + 4 * 4 * words + 8 * (1 + shape.workers)
    fixed = shape.workers * STAGING_BYTES + PER_TOKEN_BYTES * (3 if problem.bias else 2) + 512
    fixed += PER_ROW_BYTES if weight.number.global_scale else 0
    return int(min(MOST_STAGES, (SHARED_MEMORY - fixed) // per_stage))


def registers(problem: MoEProblem, tile: PrefillTile, stage: int) -> tuple[int, int]:
    """Registers per thread of a worker and of the loader, in the first or the second GEMM."""
    units = tile.tokens_x16
    usual = REGISTERS.get((problem.bias, units), SHAPES[units].registers)
    return SPLIT_REGISTERS.get(units, usual) if stage == 2 and tile.split > 1 else usual


def tokens_beyond_128(units: int) -> int:
    return next_power_of_2(UNIT * (units - 8)) if units > 8 else 0


def _fits(problem: MoEProblem, tile: PrefillTile) -> str:
    act = problem.activation
    if tile.tokens_x16 not in SHAPES or tile.group_m < 1 or tile.stagger < 0:
        return f"{tile} is not a supported tile: tokens_x16 must be one of {', '.join(map(str, SHAPES))}"
    if refusal := dtype_refusal(problem) or column_refusal(problem):
        return refusal
    steps = math.ceil(problem.dims.intermediate / 64)
    if not 1 <= tile.split <= steps:
        return f"{tile} splits a reduction of {steps} steps"
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it supports only the activations {', '.join(GATED + UNGATED)}; the layer uses {act.name}"
    if act.name == "situ" and tile.tokens_x16 != 9:
        return f"ptxas spills registers of {act.name} in tiles of {UNIT * tile.tokens_x16} tokens"
    if stages(problem, tile) < FEWEST_STAGES:
        return f"{FEWEST_STAGES} stages of {tile} do not fit in shared memory"
    return ""


PROMISING = (PrefillTile(8), PrefillTile(9), PrefillTile(12, stagger=0))
"""Tiles that were worth measuring on an H200."""


def _candidates(problem: MoEProblem) -> list[PrefillTile]:
    found = [tile for tile in PROMISING if not _fits(problem, tile)]
    return [
        replace(tile, split=split)
        for tile in found
        for split in (1, *splits_of(problem, SHAPES[tile.tokens_x16].rows, 1, 64))
    ]


def launch_shape(problem: MoEProblem, tile: PrefillTile) -> LaunchShape:
    """The tile in the terms of the model of time."""
    kind, shape = f"prefill {tile.tokens_x16}", SHAPES[tile.tokens_x16]
    first, second = (
        GemmShape(f"{kind} {stage}", shape.rows, 1, split, compiled_split=min(split, 2))
        for stage, split in (("first", 1), ("second", tile.split))
    )
    widths = tuple(UNIT * units for units in shape.widths)
    return LaunchShape(kind, (first, second), widths, even=True, persistent=1)


PREFILL_TILES = TileFamily(
    PrefillTile,
    _fits,
    capability=((9, 0), (9, 0)),
    candidates=_candidates,
    tokens_per_expert=(20, math.inf),
    shape=launch_shape,
)

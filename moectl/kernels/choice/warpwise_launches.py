"""Launches of the kernel family `warpwise`: int4 for few tokens per expert."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem.moe_problem import MoEProblem
from .launch_shape import GemmShape, LaunchShape
from .tile_family import TileFamily, column_refusal, programs_by_registers

WARPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class WarpwiseTile:
    """One launch configuration.

    Attributes:
        tokens: per program, a power of two from 8 on.
        planned: 1 to group assignments by expert first; 0 to compute each on its own.
        rows1, rows2: number of 64-row tiles per program of the first and the second GEMM, powers of two.
        warps1, warps2: warps per program, a multiple of the tiles; the warps of a tile split the reduction.
        fused: 1 for both GEMMs in one launch, which needs a plan and as many warps in both.
    """

    tokens: int
    planned: int
    rows1: int
    warps1: int
    rows2: int
    warps2: int
    fused: int = 0


def _fits(problem: MoEProblem, tile: WarpwiseTile) -> str:
    if problem.scheme.weight.name != "int4":
        return f"it supports int4; the layer has {problem.scheme.weight}"
    if reason := column_refusal(problem):
        return reason
    if tile.tokens < 8 or tile.tokens & (tile.tokens - 1):
        return f"tokens must be a power of two from 8 on, got {tile}"
    gemms = (tile.rows1, tile.warps1), (tile.rows2, tile.warps2)
    if any(warps not in WARPS or not 0 < rows <= warps or warps % rows for rows, warps in gemms):
        return f"warps must be 1, 2, 4, 8 or 16 and a multiple of rows, got {tile}"
    if tile.fused and (not tile.planned or tile.warps1 != tile.warps2):
        return f"a fused launch needs a plan and as many warps in both GEMMs, got {tile}"
    return ""


CANDIDATES: tuple[tuple[int, int, int, int, int, int], ...] = (
    (0, 1, 4, 2, 4, 0),
    (1, 1, 2, 1, 2, 1),
    (1, 1, 2, 1, 4, 0),
    (1, 1, 4, 1, 4, 0),
    (1, 1, 4, 1, 4, 1),
    (1, 2, 2, 2, 2, 0),
    (1, 2, 2, 2, 2, 1),
    (1, 2, 4, 4, 4, 0),
    (1, 2, 4, 4, 4, 1),
    (1, 2, 8, 4, 4, 0),
)
"""(planned, rows1, warps1, rows2, warps2, fused) with 8 tokens: the fastest on an H200, or close to it."""


def _candidates(problem: MoEProblem) -> list[WarpwiseTile]:
    return [WarpwiseTile(8, *values) for values in CANDIDATES]


REGISTERS = 84
"""Registers per thread: kernels compile to 79 to 84 of them."""


def launch_shape(problem: MoEProblem, tile: WarpwiseTile) -> LaunchShape:
    """The tile in the terms of the model of time."""
    first, second = (
        GemmShape(
            f"warpwise {rows}x{warps}",
            64 * rows,
            warps // rows,
            resident=programs_by_registers(REGISTERS, warps),
            copied=tile.tokens,
        )
        for rows, warps in ((tile.rows1, tile.warps1), (tile.rows2, tile.warps2))
    )
    kind = "fused" if tile.fused else "planned" if tile.planned else "each"
    return LaunchShape(f"warpwise {kind}", (first, second), (tile.tokens,) if tile.planned else ())


WARPWISE_TILES = TileFamily(
    WarpwiseTile,
    _fits,
    candidates=_candidates,
    tokens_per_expert=(0, 8),
    shape=launch_shape,
)

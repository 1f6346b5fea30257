"""Launches of the kernel family `stream`: few tokens per expert on SM90."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from ...capabilities.own_kernels import GATED, UNGATED
from ...problem.moe_problem import MoEProblem
from .launch_shape import GemmShape, LaunchShape
from .tile_family import RESERVED, SHARED_MEMORY, TileFamily, column_refusal, programs_by_registers

DTYPES = ("bf16", "fp16")

TOKENS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How the warps of a program share a GEMM's tiles.

    Attributes:
        columns: parts of the reduction, one per group of warps, added at the end.
        rows: warps that own different rows.
        blocks: blocks of 16 rows per warp.
        depth: tiles that a warp keeps in flight, a power of two.
        tiles: row tiles that a program computes one after the other, without reading the tokens again; more
            than 1 require row tiles of a multiple of 64 rows.
    """

    columns: int
    rows: int
    blocks: int
    depth: int
    tiles: int

    @property
    def warps(self) -> int:
        return self.columns * self.rows

    def runs(self, n: int) -> int:
        """Programs that cover `n` rows."""
        return math.ceil(math.ceil(n / (16 * self.rows * self.blocks)) / self.tiles)

    def steps(self, k: int, split: int) -> int:
        """Iterations of `depth` tiles per warp over one of `split` parts of `k` columns."""
        return math.ceil(math.ceil(k // 64 / split) / (self.columns * self.depth))


@dataclass(frozen=True, slots=True)
class StreamTile:
    """One launch configuration.

    Attributes:
        tokens: most tokens of an expert in one program, one of `TOKENS`.
        planned: 1 to gather the assignments of each expert first; 0 to run each assignment alone (`tokens`
            1).
        columns, rows, blocks, depth, tiles: `StreamShape` of the first GEMM; with suffix 2, of the second.
        split: programs that share the second GEMM's reduction.
        fused: 1 for both GEMMs in one launch, which requires a plan, the same number of warps in both GEMMs,
            and no split.
    """

    tokens: int
    planned: int
    columns: int
    rows: int
    blocks: int
    depth: int
    tiles: int
    columns2: int
    rows2: int
    blocks2: int
    depth2: int
    tiles2: int
    split: int = 1
    fused: int = 0

    @property
    def first(self) -> StreamShape:
        return StreamShape(self.columns, self.rows, self.blocks, self.depth, self.tiles)

    @property
    def second(self) -> StreamShape:
        return StreamShape(self.columns2, self.rows2, self.blocks2, self.depth2, self.tiles2)


def shared_memory(shape: StreamShape, steps: int, tokens: int) -> int:
    """Shared memory of a program in bytes, at most: tokens, token sums, and sums of the column parts."""
    tiles = steps * shape.depth * shape.columns
    token_sums = math.ceil(steps / 8) * 8 * shape.depth * shape.columns * 128 * max(1, tokens // 8)
    parts = shape.warps * shape.blocks * 512 * shape.columns if shape.columns > 1 else 0
    return tiles * tokens * 128 + token_sums + parts


def fits(problem: MoEProblem, tile: StreamTile) -> str:
    """Why the family does not support `problem` with `tile`; empty if it does."""
    weight, act, dims = problem.scheme.weight, problem.activation, problem.dims
    if refused := column_refusal(problem):
        return refused
    if problem.dtype not in DTYPES:
        return f"it does not support {problem.dtype} tokens"
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it does not support the activation {act}"
    column_multiple = max(64, weight.group)
    for shape, columns, split in (
        (tile.first, dims.padded_hidden, 1),
        (tile.second, dims.padded_intermediate, tile.split),
    ):
        powers = (shape.columns, shape.rows, shape.blocks, shape.depth)
        if any(n < 1 or n & (n - 1) for n in powers) or shape.warps < 4 or shape.warps > 16:
            return f"{shape} must have powers of two and 4 to 16 warps"
        if shape.tiles < 1 or split < 1:
            return f"{tile} must have at least one row tile and one part of the reduction"
        if shape.tiles > 1 and shape.rows * shape.blocks % 4:
            return f"{shape} has several row tiles, whose rows must be a multiple of 64"
        steps = shape.steps(column_multiple * math.ceil(columns / column_multiple), split)
        if shared_memory(shape, steps, tile.tokens) > SHARED_MEMORY:
            return f"{tile.tokens} tokens of {columns} columns do not fit in shared memory"
    if tile.fused and weight.name == "mxfp8" and tile.depth < 8:
        return f"ptxas spills registers of one launch with few tiles in flight, of {weight}"
    if tile.fused and (not tile.planned or tile.split > 1 or tile.first.warps != tile.second.warps):
        return f"{tile}: one launch requires a plan, no split, and the same number of warps in both GEMMs"
    if tile.tokens not in TOKENS or (tile.tokens > 1 and not tile.planned):
        return f"it supports {TOKENS} tokens per program, 1 without a plan, got {tile.tokens}"
    return ""


def registers(tile: StreamTile, shape: StreamShape) -> int:
    """Registers per thread of the kernel that runs `shape`, roughly: what it compiles to differs by format.

    Tiles in flight take most of them, and a fused kernel has those of the GEMM that needs more.
    """
    shapes = (tile.first, tile.second) if tile.fused else (shape,)
    many = max(it.depth * it.blocks for it in shapes) > 4
    if tile.tokens >= 8:
        return 112
    if tile.fused:
        return 104 if many else 72
    return 84 if many else 60


def launch_shape(problem: MoEProblem, tile: StreamTile) -> LaunchShape:
    """The tile in the terms of the model of time."""
    dims, resident = problem.dims, []
    for shape, columns, split in (
        (tile.first, dims.hidden, 1),
        (tile.second, dims.intermediate, tile.split),
    ):
        memory = shared_memory(shape, shape.steps(64 * math.ceil(columns / 64), split), tile.tokens)
        by_memory = max(1, SHARED_MEMORY // (memory + RESERVED))
        resident.append(min(by_memory, programs_by_registers(registers(tile, shape), shape.warps)))
    if tile.fused:
        resident = [min(resident)] * 2
    first, second = (
        GemmShape(
            f"stream {tile.tokens} {shape.columns}x{shape.rows}x{shape.blocks}x{shape.depth}x{shape.tiles}",
            16 * shape.rows * shape.blocks * shape.tiles,
            shape.columns * shape.depth,
            split,
            programs,
            tile.tokens,
            compiled_split=split,
        )
        for shape, split, programs in zip((tile.first, tile.second), (1, tile.split), resident, strict=True)
    )
    kind = "fused" if tile.fused else "planned" if tile.planned else "each"
    widths = (tile.tokens,) if tile.planned else ()
    return LaunchShape(f"stream {tile.tokens} {kind}", (first, second), widths)


HALVES, DEEP_HALVES = StreamShape(2, 4, 1, 4, 1), StreamShape(2, 4, 1, 8, 1)
FOUR_ROWS, DEEP, DEEP_RUN, TALL = (
    StreamShape(1, 4, 1, 4, 1),
    StreamShape(1, 4, 1, 8, 1),
    StreamShape(1, 4, 1, 8, 2),
    StreamShape(1, 4, 2, 4, 1),
)
TALL_RUN, TALL_RUN_OF_4 = StreamShape(1, 4, 2, 4, 2), StreamShape(1, 4, 2, 4, 4)
WIDE, WIDE_DEEP, WIDE_TALL = (
    StreamShape(1, 8, 1, 4, 2),
    StreamShape(1, 8, 1, 8, 1),
    StreamShape(1, 8, 2, 4, 1),
)
QUARTERS, WIDE_QUARTERS, EIGHTHS = (
    StreamShape(4, 2, 1, 4, 1),
    StreamShape(4, 4, 1, 4, 1),
    StreamShape(8, 2, 1, 4, 1),
)

PROMISING: tuple[tuple[int, int, StreamShape, StreamShape, int, int], ...] = (
    (1, 0, StreamShape(2, 2, 1, 4, 1), StreamShape(4, 4, 1, 4, 1), 1, 0),
    (1, 0, StreamShape(2, 2, 1, 4, 1), DEEP, 2, 0),
    (1, 0, HALVES, HALVES, 1, 0),
    (1, 0, DEEP_HALVES, DEEP_HALVES, 1, 0),
    (1, 0, WIDE_DEEP, TALL, 1, 0),
    (1, 0, WIDE_DEEP, WIDE_TALL, 1, 0),
    (1, 0, TALL, WIDE_DEEP, 1, 0),
    (1, 0, WIDE_DEEP, DEEP_HALVES, 1, 0),
    (1, 0, WIDE_DEEP, WIDE_DEEP, 4, 0),
    (1, 0, DEEP_HALVES, WIDE_DEEP, 8, 0),
    (1, 0, DEEP_HALVES, TALL, 1, 0),
    (1, 0, QUARTERS, StreamShape(1, 4, 1, 4, 2), 1, 0),
    (1, 0, QUARTERS, WIDE, 1, 0),
    (1, 0, QUARTERS, HALVES, 1, 0),
    (1, 0, EIGHTHS, TALL, 1, 0),
    (1, 0, WIDE_QUARTERS, DEEP_HALVES, 1, 0),
    (1, 0, WIDE_DEEP, TALL_RUN, 1, 0),
    (1, 0, WIDE_DEEP, TALL_RUN_OF_4, 1, 0),
    (1, 0, DEEP_HALVES, TALL_RUN, 1, 0),
    (2, 1, DEEP, FOUR_ROWS, 1, 0),
    (2, 1, HALVES, FOUR_ROWS, 1, 0),
    (2, 1, DEEP, TALL_RUN, 1, 0),
    (4, 1, DEEP, FOUR_ROWS, 1, 0),
    (4, 1, HALVES, DEEP, 4, 0),
    (4, 1, WIDE_DEEP, DEEP, 4, 0),
    (4, 1, TALL, DEEP, 4, 0),
    (4, 1, FOUR_ROWS, FOUR_ROWS, 1, 1),
    (4, 1, DEEP, DEEP, 1, 1),
    (4, 1, TALL, TALL, 1, 1),
    (4, 1, TALL, TALL_RUN, 1, 1),
    (4, 1, TALL, TALL_RUN_OF_4, 1, 1),
    (8, 1, DEEP_RUN, TALL, 1, 1),
    (8, 1, TALL, DEEP, 1, 1),
    (8, 1, TALL, TALL, 1, 1),
    (8, 1, TALL, TALL_RUN, 1, 1),
    (8, 1, TALL, DEEP, 4, 0),
)
"""(tokens, planned, first, second, split, fused): launches that were the fastest of a layer on an H200."""


def candidates(problem: MoEProblem) -> tuple[StreamTile, ...]:
    """The tiles to measure."""
    return tuple(
        replace(StreamTile(tokens, planned, *astuple(first), *astuple(second)), split=split, fused=fused)
        for tokens, planned, first, second, split, fused in PROMISING
    )


STREAM_TILES = TileFamily(
    StreamTile,
    fits,
    capability=((9, 0), (9, 0)),
    candidates=candidates,
    tokens_per_expert=(0.0, 8.0),
    shape=launch_shape,
)

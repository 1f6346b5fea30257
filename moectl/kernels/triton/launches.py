"""Launches of the fused-MoE kernels: kernel family and tile by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ...capabilities.own_kernels import token_format
from ...problem.moe_problem import MoEProblem
from ..choice.launch import Launch
from .row_matrix import in_rows


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration.

    Attributes:
        tokens, rows, depth: tile size: tokens x weight rows x columns per step of the reduction.
        stages: number of load pipeline stages.
        warps: per program; a warp may own several 16-row blocks of the tile.
        split: split-K of the second GEMM (decode only).
        tails: how many times an expert's partial last tile may be halved (grouped only).
    """

    tokens: int
    rows: int
    depth: int
    stages: int
    warps: int
    split: int = 1
    tails: int = 0


DECODE_ASSIGNMENTS = 256
"""Maximum number of assignments for which every program reads all ids; for more, one sort is cheaper."""

DECODE_TOKENS = 64
"""Maximum number of tokens of the decode kernels."""

DECODE: tuple[tuple[int, Tile], ...] = (
    (2, Tile(16, 64, 128, stages=5, warps=4, split=4)),
    (8, Tile(16, 128, 128, stages=4, warps=4, split=2)),
    (DECODE_TOKENS, Tile(16, 256, 64, stages=4, warps=4)),
)
"""(maximum tokens, tile); the first match is used. Measured on an H200: few tokens need more programs, more
tokens more rows per warp, and with them fewer instructions per weight."""

GROUPED: tuple[tuple[float, Tile], ...] = (
    (12, Tile(16, 256, 64, stages=4, warps=4)),
    (40, Tile(32, 128, 64, stages=5, warps=4, tails=1)),
    (100, Tile(64, 256, 64, stages=4, warps=8, tails=2)),
    (float("inf"), Tile(128, 128, 64, stages=4, warps=8, tails=2)),
)
"""(maximum tokens per expert, tile); the first match is used. Measured on an H200."""

GROUPED_TWO_SUMS: tuple[tuple[float, Tile], ...] = (
    *GROUPED[:2],
    (float("inf"), Tile(64, 128, 64, stages=4, warps=8, tails=2)),
)
"""`GROUPED` for layers with `two_sums`: tiles that do not spill registers. Not measured."""


ROWS_DECODE: tuple[tuple[int, Tile], ...] = (
    (2, Tile(16, 64, 128, stages=4, warps=4, split=4)),
    (8, Tile(16, 64, 128, stages=4, warps=4, split=2)),
    (DECODE_TOKENS, Tile(16, 64, 128, stages=4, warps=4)),
)
"""`DECODE` for weights in rows, whose tiles in shared memory take up to 96 KiB, which every GPU from SM80 on
has. Not measured."""

ROWS_GROUPED: tuple[tuple[float, Tile], ...] = (
    (12, Tile(16, 128, 64, stages=4, warps=4)),
    (40, Tile(32, 128, 64, stages=4, warps=4)),
    (100, Tile(64, 128, 64, stages=4, warps=4, tails=2)),
    (float("inf"), Tile(128, 128, 64, stages=3, warps=8, tails=2)),
)
"""`GROUPED` for 16-bit weights in rows. Not measured."""

FP8_GROUPED: tuple[tuple[float, Tile], ...] = (
    (12, Tile(16, 64, 128, stages=4, warps=4)),
    (40, Tile(32, 64, 128, stages=4, warps=4)),
    (float("inf"), Tile(64, 128, 128, stages=3, warps=8, tails=2)),
)
"""`GROUPED` for FP8 weights: sums of 128 columns take registers of their own. Not measured."""


FP8_GROUPED_A16: tuple[tuple[float, Tile], ...] = (
    *FP8_GROUPED[:2],
    (float("inf"), Tile(64, 128, 64, stages=4, warps=8, tails=2)),
)
"""`FP8_GROUPED` for 16-bit tokens: codes are decoded in registers. Not measured."""


def two_sums(problem: MoEProblem) -> bool:
    """Whether kernels need two accumulators: E8M0 scales exceed fp16's range and multiply group sums."""
    return problem.scheme.weight.number.scale == "E8M0" and problem.dtype == "fp16"


def grouped_for(problem: MoEProblem) -> tuple[tuple[float, Tile], ...]:
    """`GROUPED`, or its variant for the layer's format."""
    if in_rows(problem):
        if problem.scheme.weight.bits == 16:
            return ROWS_GROUPED
        return FP8_GROUPED if token_format(problem) else FP8_GROUPED_A16
    return GROUPED_TWO_SUMS if two_sums(problem) else GROUPED


def decode_for(problem: MoEProblem) -> tuple[tuple[int, Tile], ...]:
    """`DECODE` or `ROWS_DECODE`."""
    return ROWS_DECODE if in_rows(problem) else DECODE


def is_legal(tile: Tile, group: int) -> bool:
    """Whether a tile has whole 64x64 weight tiles, whole scale groups, and 16 or more tokens."""
    min_tokens = tile.tokens >> tile.tails
    whole_tiles = tile.rows % 64 == 0 and tile.depth % 64 == 0
    whole_groups = group == 0 or tile.depth % group == 0 or group % tile.depth == 0
    return (
        whole_tiles and whole_groups and min_tokens >= 16 and tile.rows >= 16 * tile.warps and tile.split >= 1
    )


def launch_for(problem: MoEProblem, tokens: int) -> Launch:
    """The portable kernels' launch for `tokens` tokens of `problem`; needs no measurements."""
    assignments = tokens * problem.top_k
    if tokens <= DECODE_TOKENS and assignments <= DECODE_ASSIGNMENTS:
        return Launch(
            "decode", next(tile for max_tokens, tile in decode_for(problem) if tokens <= max_tokens)
        )
    per_expert = assignments / problem.experts  # the same on every rank
    return Launch("grouped", next(tile for limit, tile in grouped_for(problem) if per_expert <= limit))

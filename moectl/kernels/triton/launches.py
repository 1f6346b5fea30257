"""Launch choices of the fused-MoE kernels: which kernel family and which tile for how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...problem.moe_problem import MoEProblem


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration.

    Attributes:
        tokens, rows, depth: tile of the product: tokens x weight rows x reduction.
        stages: of the load pipeline.
        warps: per program; one warp may own several 16-row blocks of the tile.
        split: parts into which the second GEMM's reduction is cut (decode only).
        tails: how often a last tile of few tokens may be halved (grouped only).
    """

    tokens: int
    rows: int
    depth: int
    stages: int
    warps: int
    split: int = 1
    tails: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel family by name, and its tile, of the family's `tile` type."""

    family: str
    tile: Any

    def __str__(self) -> str:
        """Family and tile in short: ``decode tokens=16 rows=64 depth=128 stages=5 warps=4``."""
        return f"{self.family} {tile_words(self.tile)}"


def tile_words(tile: Any) -> str:
    """The fields of a tile that differ from their defaults, as ``name=value``."""
    values = ((field.name, getattr(tile, field.name), field.default) for field in fields(tile))
    return " ".join(f"{name}={value}" for name, value, default in values if value != default)


DECODE_ASSIGNMENTS = 256
"""Up to this many assignments every program reads all ids; beyond, sorting them once is cheaper."""

DECODE_TOKENS = 64

DECODE: tuple[tuple[int, Tile], ...] = (
    (2, Tile(16, 64, 128, stages=5, warps=4, split=4)),
    (8, Tile(16, 128, 128, stages=4, warps=4, split=2)),
    (DECODE_TOKENS, Tile(16, 256, 64, stages=4, warps=4)),
)
"""(most tokens, tile), first match. Measured on an H200: a short batch needs more programs, a longer one
more rows per warp, which is fewer instructions per weight."""

GROUPED: tuple[tuple[float, Tile], ...] = (
    (12, Tile(16, 256, 64, stages=4, warps=4)),
    (40, Tile(32, 128, 64, stages=5, warps=4, tails=1)),
    (100, Tile(64, 256, 64, stages=4, warps=8, tails=2)),
    (float("inf"), Tile(128, 128, 64, stages=4, warps=8, tails=2)),
)
"""(most tokens per expert, tile), first match. Measured on an H200."""

GROUPED_TWO_SUMS: tuple[tuple[float, Tile], ...] = (
    *GROUPED[:2],
    (float("inf"), Tile(64, 128, 64, stages=4, warps=8, tails=2)),
)
"""The same for layers with `two_sums`: tiles without register spills. Not measured."""


def two_sums(problem: MoEProblem) -> bool:
    """Whether there are two accumulators: MXFP4 scales exceed fp16's range and multiply sums of a group."""
    return problem.scheme.weight.name == "mxfp4" and problem.dtype == "fp16"


def grouped_for(problem: MoEProblem) -> tuple[tuple[float, Tile], ...]:
    """The grouped tiles of a layer: (most tokens per expert, tile), first match."""
    return GROUPED_TWO_SUMS if two_sums(problem) else GROUPED


def is_legal(tile: Tile, group: int) -> bool:
    """Whether a kernel can be built: whole 64x64 weight tiles, whole runs of scales, 16 or more tokens."""
    narrowest = tile.tokens >> tile.tails
    whole = tile.rows % 64 == 0 and tile.depth % 64 == 0
    runs = tile.depth % group == 0 or group % tile.depth == 0
    return whole and runs and narrowest >= 16 and tile.rows >= 16 * tile.warps and tile.split >= 1


def launch_for(problem: MoEProblem, tokens: int) -> Launch:
    """The portable kernels' launch for `tokens` tokens of `problem`, without measurements."""
    assignments = tokens * problem.top_k
    if tokens <= DECODE_TOKENS and assignments <= DECODE_ASSIGNMENTS:
        return Launch("decode", next(tile for most, tile in DECODE if tokens <= most))
    per_expert = assignments / problem.experts  # those of a rank get their share of its assignments
    return Launch("grouped", next(tile for most, tile in grouped_for(problem) if per_expert <= most))


def token_tiles(assignments: int, experts: int, tokens: int) -> int:
    """Upper bound on the tiles of `tokens` tokens that `assignments` need, for any routing.

    Each expert with tokens has at most one tile that is not full.

    Example:
        >>> token_tiles(assignments=10, experts=4, tokens=8)
        4
    """
    hit = min(assignments, experts)
    return hit + (assignments - hit) // tokens

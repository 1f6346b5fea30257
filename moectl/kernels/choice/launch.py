"""A launch of the fused-MoE kernels: a kernel family, and a tile of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """The name of a kernel family, and a tile of that family's `tile` type."""

    family: str
    tile: Any

    def __str__(self) -> str:
        """Short form, such as ``decode tokens=16 rows=64 depth=128 stages=5 warps=4``."""
        return f"{self.family} {tile_words(self.tile)}"


def tile_words(tile: Any) -> str:
    """The fields of a tile with values other than the default, as ``name=value``."""
    values = ((field.name, getattr(tile, field.name), field.default) for field in fields(tile))
    return " ".join(f"{name}={value}" for name, value, default in values if value != default)


FEW, MOST_READ = 2048, 1 << 19
"""Maximum numbers of assignments that are listed in one launch, and of ids that its programs read, for each
expert's reads all of them. More take three launches, and are counted in blocks."""


def list_launches(assignments: int, experts: int) -> int:
    """Launches that list `assignments` by expert."""
    return 1 if assignments <= FEW and assignments * experts <= MOST_READ else 3


def token_tiles(assignments: int, experts: int, tokens: int) -> int:
    """Upper bound on the tiles of `tokens` tokens that `assignments` need, for any routing.

    Each active expert has at most one partial tile.

    Example:
        >>> token_tiles(assignments=10, experts=4, tokens=8)
        4
    """
    active = min(assignments, experts)
    return active + (assignments - active) // tokens

"""The indices of a rearranged axis: a list of digits, the slowest first, each counted by atoms.

A digit counts over one atom, or over several when it ends early (`size` below the product of its atoms).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

Vector = tuple[int, ...]


class NotComposable(Exception):
    """These steps, on this shape, are not one pass of index arithmetic; they run one after another."""


@dataclass(frozen=True)
class Atom:
    """`size` indices that each move the place of a bit by `step`, or that choose along dimension `table`."""

    size: int
    step: Vector
    table: int | None = None


@dataclass(frozen=True)
class Digit:
    """`size` indices counted by `atoms`, the slowest first; fewer than their product where it ends early."""

    size: int
    atoms: tuple[Atom, ...]

    @property
    def whole(self) -> bool:
        """True when every index of the atoms occurs."""
        return self.size == math.prod(atom.size for atom in self.atoms)


Axis = list[Digit]


def size_of(axis: Sequence[Digit]) -> int:
    """Indices of an axis."""
    return math.prod(digit.size for digit in axis)


def merged(axis: Axis) -> Axis:
    """The axis with atoms that count on from one another joined into one."""
    out: Axis = []
    for digit in axis:
        if digit.size == 1:
            continue
        if out and digit.whole and out[-1].whole and len(digit.atoms) == len(out[-1].atoms) == 1:
            (slow,), (fast,) = out[-1].atoms, digit.atoms
            if (
                slow.table is None
                and fast.table is None
                and slow.step == tuple(m * fast.size for m in fast.step)
            ):
                out[-1] = Digit(slow.size * fast.size, (replace(fast, size=slow.size * fast.size),))
                continue
        out.append(digit)
    return out

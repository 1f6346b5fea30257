"""Named-axis rearrangements of tensors; the inverse is the pattern with its sides exchanged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...errors import CheckpointError
from ...lazy_torch import Tensor

Axes = tuple[tuple[str, ...], ...]

MAX_NAMES = 32
_TOKEN = re.compile(r"\(|\)|[a-z][a-z0-9]*|\S")


@dataclass(frozen=True)
class Pattern:
    """A rearrangement such as ``e (n s) k -> e (s n) k``.

    Each side lists axes; an axis is one name, or several in parentheses with the slowest first. Both sides
    have the same names, each once.

    Example:
        >>> import torch
        >>> pattern = Pattern.parse("(n s) -> (s n)")
        >>> t = torch.arange(6)
        >>> rearranged = pattern.apply(t, pattern.sizes(t.shape, {"s": 2}))
        >>> rearranged.tolist()
        [0, 2, 4, 1, 3, 5]
        >>> pattern.reverse.apply(rearranged, {"s": 2, "n": 3}).tolist()
        [0, 1, 2, 3, 4, 5]
    """

    left: Axes
    right: Axes

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(text: str) -> Pattern:
        """The pattern that `text` spells; CheckpointError when it is malformed."""
        sides = text.split("->")
        if len(text) > 400 or len(sides) != 2:
            raise CheckpointError(f"rearrangement {text[:80]!r} is not of the form 'axes -> axes'.")
        left, right = (_axes(side, text) for side in sides)
        names = [name for axis in left for name in axis]
        if len(set(names)) != len(names) or sorted(names) != sorted(n for axis in right for n in axis):
            raise CheckpointError(f"rearrangement {text!r} does not name the same axes once on both sides.")
        if len(names) > MAX_NAMES:
            raise CheckpointError(f"rearrangement {text!r} has {len(names)} names, at most {MAX_NAMES}.")
        return Pattern(left, right)

    @property
    def reverse(self) -> Pattern:
        """The inverse pattern."""
        return Pattern(self.right, self.left)

    def sizes(self, shape: Sequence[int], fixed_sizes: Mapping[str, int]) -> dict[str, int]:
        """The size of every name for a tensor of `shape`.

        `fixed_sizes` has all names but at most one per axis. CheckpointError when the sizes do not fit.
        """
        if len(shape) != len(self.left):
            raise CheckpointError(f"{self} needs {len(self.left)} axes, got the shape {tuple(shape)}.")
        sizes = dict(fixed_sizes)
        for axis, size in zip(self.left, shape, strict=True):
            free = [name for name in axis if name not in fixed_sizes]
            fixed = math.prod(fixed_sizes[name] for name in axis if name in fixed_sizes)
            if len(free) > 1:
                raise CheckpointError(f"{self} leaves the sizes of {', '.join(free)} open.")
            if fixed == 0 or size % fixed or (not free and size != fixed):
                raise CheckpointError(
                    f"{self} needs an axis ({' '.join(axis)}) of {'a multiple of ' if free else ''}{fixed}, "
                    f"got {size}."
                )
            if free:
                sizes[free[0]] = size // fixed
        return sizes

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the result, for `sizes` of all names."""
        return tuple(math.prod(sizes[name] for name in axis) for axis in self.right)

    def apply(self, t: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """`t` rearranged, for `sizes` of all names; a view of `t` where no element moves."""
        split = [name for axis in self.left for name in axis]
        joined = [name for axis in self.right for name in axis]
        t = t.reshape([sizes[name] for name in split])
        return t.permute([split.index(name) for name in joined]).reshape(self.shape(sizes))

    def __str__(self) -> str:
        return f"'{_spell(self.left)} -> {_spell(self.right)}'"


def _spell(axes: Axes) -> str:
    return " ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" for axis in axes)


def _axes(side: str, text: str) -> Axes:
    axes: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group:
            axes.append(tuple(group))
            group = None
        elif token[0].isalpha() and token[0].isascii() and token[0].islower():
            if group is None:
                axes.append((token,))
            else:
                group.append(token)
        else:
            raise CheckpointError(f"rearrangement {text!r} has {token!r} in the wrong place.")
    if group is not None or not axes:
        raise CheckpointError(f"rearrangement {text!r} has an open parenthesis or no axes.")
    return tuple(axes)

"""Symbolic tensor shapes, such as ``experts 2*intermediate hidden/32 16``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...problem.schemes import FULL
from ...whole_numbers import whole_number


@dataclass(frozen=True, slots=True)
class AxisSize:
    """One axis of a shape: ``times * symbol / per``, rounded up; a plain number has no symbol."""

    symbol: str
    times: int | str = 1
    per: int | str = 1

    def __str__(self) -> str:
        """As `parse_shape` reads it."""
        if not self.symbol:
            return str(self.times)
        times = f"{self.times}*" if self.times != 1 else ""
        return f"{times}{self.symbol}{f'/{self.per}' if self.per != 1 else ''}"

    def value(self, sizes: Mapping[str, int]) -> int:
        """The axis's length for the given `sizes` of the symbols. KeyError for an unknown symbol."""
        times = sizes[self.times] if isinstance(self.times, str) else self.times
        if not self.symbol:
            return times
        per = sizes[self.per] if isinstance(self.per, str) else self.per
        if per == FULL:
            return 1
        return -(-sizes[self.symbol] * times // per)


SymbolicShape = tuple[AxisSize, ...]
"""Axes of a tensor, outermost first."""

_AXIS = re.compile(r"(?:(?P<times>\w+)\*)?(?P<symbol>[a-z_]+)(?:/(?P<per>\w+))?|(?P<number>\d+)")


def parse_shape(text: str) -> SymbolicShape:
    """The axes of a shape such as ``"experts 2*intermediate hidden/32 16"``.

    Raises ValueError when an axis is not a number or ``[N*]symbol[/N]``, where N may also be a symbol.

    Example:
        >>> shape_at(parse_shape("experts 2*intermediate hidden/32 16"),
        ...          {"experts": 8, "intermediate": 96, "hidden": 64})
        (8, 192, 2, 16)
    """
    axes = []
    for word in text.split():
        match = _AXIS.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no axis of a shape: expected [N*]symbol[/N], or a number")
        if match["number"]:
            axes.append(AxisSize("", int(match["number"])))
        else:
            axes.append(AxisSize(match["symbol"], _number(match["times"]), _number(match["per"])))
    return tuple(axes)


def shape_at(shape: SymbolicShape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape for the given `sizes` of the symbols; KeyError for an unknown symbol."""
    return tuple(axis.value(sizes) for axis in shape)


def _number(text: str | None) -> int | str:
    number = whole_number(text) if text else 1
    return text or 1 if number is None else number

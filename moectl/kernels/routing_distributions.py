"""Names of routing distributions and their arguments. Imports no torch, so that they are refused early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class DistributionArgument:
    """One number after a distribution's name: its letter, what it must be, and the test of that."""

    letter: str
    wanted: str
    holds: Callable[[float], bool]


COUNT = DistributionArgument("N", "a whole number of experts from 1", lambda n: n >= 1 and n.is_integer())

DISTRIBUTIONS: Mapping[str, tuple[DistributionArgument, ...]] = {
    "uniform": (),
    "balanced": (),
    "zipf": (DistributionArgument("A", "a number from 0 to 100", lambda a: 0 <= a <= 100),),
    "hot": (
        COUNT,
        DistributionArgument("F", "a fraction between 0 and 1", lambda f: 0 < f < 1),
    ),
    "experts": (COUNT,),
}
"""Arguments by name; ``zipf:1.2`` and ``hot:4:0.9`` are names with their arguments."""


def spelled(name: str) -> str:
    """The distribution `name` as it is written: ``hot:N:F``."""
    return ":".join([name, *(argument.letter for argument in DISTRIBUTIONS[name])])


def parse_distribution(text: str) -> tuple[str, tuple[float, ...]]:
    """The name in `text` and its arguments, which `check_distribution` accepts.

    Raises UsageError for a name that is not known, a wrong number of arguments, or one out of range.
    """
    name, *given = text.split(":")
    if name not in DISTRIBUTIONS:
        raise UsageError(
            f"routing distribution {text!r} is not known",
            hint=f"use {', '.join(map(spelled, DISTRIBUTIONS))}",
        )
    arguments = DISTRIBUTIONS[name]
    if len(given) != len(arguments):
        raise UsageError(
            f"routing distribution {text!r} has {len(given)} arguments, expected {len(arguments)}",
            hint=f"write {spelled(name)}",
        )
    return name, tuple(_number(text, a, item) for a, item in zip(arguments, given, strict=True))


def check_distribution(text: str) -> None:
    """Raises UsageError when `text` is no routing distribution, and says which part is wrong."""
    parse_distribution(text)


def _number(text: str, argument: DistributionArgument, item: str) -> float:
    try:
        number = float(item)
    except ValueError:
        number = math.nan
    if math.isfinite(number) and argument.holds(number):
        return number
    raise UsageError(
        f"routing distribution {text!r}: {argument.letter} must be {argument.wanted}, got {item!r}",
        hint="for example zipf:1.2, hot:4:0.9 or experts:4",
    )

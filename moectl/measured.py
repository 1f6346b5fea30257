"""Times of backends on one layer as a value: what a choice by measurement is made from. Reads nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timed:
    """One backend at one number of tokens, whose result was right.

    Attributes:
        tactic: what the backend launched, in its own words; empty where it says nothing.
        routing: distribution of the tokens over experts, as `moectl bench` takes it.
        us, spread_us: median and distance of the quartiles, microseconds.
        cold: whether the weights came from memory, and not from a cache.
        error: relative RMS error against the reference.
        source: what measured it, and the file it is kept in; `when`, as ISO 8601. Set by the cache.
    """

    backend: str
    tactic: str
    tokens: int
    routing: str
    us: float
    spread_us: float
    cold: bool
    error: float
    source: str = ""
    when: str = ""

    @property
    def cell(self) -> tuple[int, str, bool]:
        """What times of two backends must have in common to be compared."""
        return self.tokens, self.routing, self.cold


@dataclass(frozen=True, slots=True)
class Ranking:
    """Backends by measured time.

    Attributes:
        factors: backend and mean factor over the fastest of each cell, the fastest first.
        tokens: numbers of tokens at which all of them were measured.
        source, when: of the measurements; the earliest time where there are several.
    """

    factors: tuple[tuple[str, float], ...]
    tokens: tuple[int, ...]
    source: str
    when: str

    @property
    def best(self) -> str:
        """The fastest backend."""
        return self.factors[0][0]

    def __str__(self) -> str:
        others = ", ".join(f"{name} {factor:.2f}x" for name, factor in self.factors[1:])
        at = ", ".join(map(str, self.tokens))
        return (
            f"it is the fastest as measured on this device at M={at}: {others} its time "
            f"({self.source}, {self.when})"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """All that is known of one layer on one device."""

    rows: tuple[Timed, ...] = ()

    def ranking(self, backends: Sequence[str]) -> Ranking | None:
        """Those of `backends` that were measured, by time; None where no two can be compared.

        The measure is the geometric mean, over all cells in which each of them was measured, of a
        backend's time over the fastest one's: a small number of tokens counts as much as a large one.
        Equal backends keep their order.
        """
        times: dict[str, dict[tuple[int, str, bool], Timed]] = {}
        for row in self.rows:
            if row.backend in backends:
                times.setdefault(row.backend, {})[row.cell] = row
        names = [name for name in backends if name in times]
        cells = (
            set[tuple[int, str, bool]].intersection(*(set(times[name]) for name in names)) if names else set()
        )
        if len(names) < 2 or not cells:
            return None
        least = {cell: min(times[name][cell].us for name in names) for cell in cells}

        def factor(name: str) -> float:
            return math.exp(sum(math.log(times[name][c].us / least[c]) for c in cells) / len(cells))

        factors = {name: factor(name) for name in names}
        best = min(factors.values())
        ranked = sorted(((name, factors[name] / best) for name in names), key=lambda item: item[1])
        used = [times[name][cell] for name in names for cell in cells]
        return Ranking(
            tuple(ranked),
            tuple(sorted({tokens for tokens, _, _ in cells})),
            ", ".join(sorted({row.source for row in used if row.source})),
            min((row.when for row in used if row.when), default=""),
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data: the rows."""
        return [asdict(row) for row in self.rows]

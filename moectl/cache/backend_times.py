"""Times of backends on one layer as a value: what a choice by measurement is made from. Reads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from itertools import combinations
from statistics import fmean
from typing import Any

FEWEST_ROUNDS = 3
"""Rounds of a timing that even the slowest backend gets: of fewer, quartiles say nothing about noise."""

TOGETHER = timedelta(hours=1)
"""Farthest that times of different runs may lie apart to be compared: clocks and load drift."""

Cell = tuple[int, str, bool]
"""Number of tokens, routing and coldness: what times of two backends must have in common."""


@dataclass(frozen=True, slots=True)
class BackendTime:
    """One backend at one number of tokens, whose result was right.

    Attributes:
        tactic: what the backend launched, in its own words, or who chose that; empty where it has no choice.
        routing: distribution of the tokens over experts, as `moectl bench` takes it.
        us, spread_us: median and distance of the quartiles, microseconds; the spread is as large as the
            median where there were too few rounds to tell.
        cold: whether the weights came from memory, and not from a cache.
        error: relative RMS error against the reference.
        source: what measured it, and the file it is kept in; `when`, as ISO 8601. Set by the cache.
        software: tells versions of packages that times depend on from others. Set by the cache.
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
    software: str = ""

    @property
    def cell(self) -> Cell:
        """What times of two backends must have in common to be compared."""
        return self.tokens, self.routing, self.cold

    def beside(self, other: BackendTime) -> bool:
        """True when the two may be compared: of one run, or of one software and within `TOGETHER`."""
        if self.cell != other.cell or self.software != other.software:
            return False
        if self.when == other.when:
            return True
        mine, theirs = _time(self.when), _time(other.when)
        return mine is not None and theirs is not None and abs(mine - theirs) <= TOGETHER


def _time(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class TimePair:
    """Times of two backends in the cells that they share."""

    times: tuple[tuple[BackendTime, BackendTime], ...]

    @property
    def factor(self) -> float:
        """The second one's time over the first one's, the geometric mean over cells."""
        return math.exp(fmean(math.log(b.us / a.us) for a, b in self.times))

    @property
    def noise(self) -> float:
        """The mean over cells of both spreads together, relative to the times."""
        return fmean(math.hypot(a.spread_us / a.us, b.spread_us / b.us) for a, b in self.times)

    @property
    def slower(self) -> bool:
        """True when the second one is slower by more than the spread."""
        return math.log(self.factor) > self.noise


@dataclass(frozen=True, slots=True)
class TimeRanking:
    """Backends by measured time.

    Attributes:
        factors: the one that is preferred, then those that share cells with it: backend and mean factor
            of its times over the preferred one's in those cells, the fastest first.
        tokens: numbers of tokens of those cells.
        source, when: of the measurements; the earliest and the latest time where there are several.
        level: those of `factors` that the spread does not tell from the first: it goes before in the order.
        partly: those that share only some of the cells, and the numbers of tokens of these.
    """

    factors: tuple[tuple[str, float], ...]
    tokens: tuple[int, ...]
    source: str
    when: str
    level: tuple[str, ...] = ()
    partly: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def best(self) -> str:
        """The backend that is preferred."""
        return self.factors[0][0]

    def __str__(self) -> str:
        only, others = dict(self.partly), []
        for name, factor in self.factors[1:]:
            notes = ["within the spread"] if name in self.level else []
            notes += [f"at M={_listed(only[name])} alone"] if name in only else []
            others.append(f"{name} {factor:.2f}x" + (f" ({', '.join(notes)})" if notes else ""))
        what = "it is the first in the order of the fastest" if self.level else "it is the fastest"
        return (
            f"{what} as measured on this device at M={_listed(self.tokens)}: {', '.join(others)} its time "
            f"({self.source}, {self.when})"
        )


def _listed(tokens: Iterable[int]) -> str:
    return ", ".join(map(str, tokens))


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """All that is known of one layer on one device."""

    rows: tuple[BackendTime, ...] = ()

    def ranking(self, backends: Sequence[str]) -> TimeRanking | None:
        """Those of `backends`, which come in order, that were measured; None where times prefer none.

        Two are compared by the geometric mean, over the cells that they share, of one's time over the
        other's: a small number of tokens counts as much as a large one. The first in the order is
        preferred, until a later one is faster than it by more than the spread.
        """
        times: dict[str, dict[Cell, BackendTime]] = {}
        for row in self.rows:
            if row.backend in backends:
                times.setdefault(row.backend, {})[row.cell] = row
        pairs = {}
        for a, b in combinations([name for name in backends if name in times], 2):
            shared = [(times[a][cell], times[b][cell]) for cell in times[a] if cell in times[b]]
            if both := tuple((x, y) for x, y in shared if x.beside(y)):
                pairs[a, b] = TimePair(both)
                pairs[b, a] = TimePair(tuple((y, x) for x, y in both))
        names = [name for name in backends if any(name in pair for pair in pairs)]
        if not names:
            return None
        best = names[0]
        for name in names[1:]:
            if (name, best) in pairs and pairs[name, best].slower:
                best = name
        beside = {b: pair for (a, b), pair in pairs.items() if a == best}
        return _ranked(best, beside) if any(pair.slower for pair in beside.values()) else None

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data: the rows."""
        return [asdict(row) for row in self.rows]


def _ranked(best: str, beside: dict[str, TimePair]) -> TimeRanking:
    """`best`, and the pairs in which it is the first, as a ranking."""
    tokens = {name: tuple(sorted({a.tokens for a, _ in pair.times})) for name, pair in beside.items()}
    every = tuple(sorted(set().union(*tokens.values())))
    used = [row for pair in beside.values() for both in pair.times for row in both]
    whens = sorted({row.when for row in used if row.when})
    others = sorted(((name, pair.factor) for name, pair in beside.items()), key=lambda item: item[1])
    return TimeRanking(
        ((best, 1.0), *others),
        every,
        ", ".join(sorted({row.source for row in used if row.source})),
        whens[0] if len(whens) == 1 else f"several runs from {whens[0]} to {whens[-1]}" if whens else "",
        tuple(name for name, pair in beside.items() if not pair.slower),
        tuple((name, some) for name, some in tokens.items() if some != every),
    )

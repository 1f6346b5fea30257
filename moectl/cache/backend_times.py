"""Measured times of backends on one layer, and the ranking that a choice by measurement uses. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from itertools import combinations
from statistics import fmean
from typing import Annotated, Any

from ..files.records import Between, Count, From0

FEWEST_ROUNDS = 3
"""Minimum number of timing rounds, even for the slowest backend: with fewer, quartiles are meaningless."""

TOGETHER = timedelta(hours=1)
"""Maximum age difference of comparable times from different runs, as clocks and load drift."""

_TIMES = Between(1e-3, 1e9)
"""Times of a call that there can be, microseconds: a nanosecond is too short for any, and nobody waits for a
quarter of an hour. Ratios and logarithms of such times are finite."""

Microseconds = Annotated[float, _TIMES]
"""The time of a call."""


def is_time(us: float) -> bool:
    """True for what can be the time of a call, in microseconds.

    Example:
        >>> is_time(30.0), is_time(0.0), is_time(1e300)
        (True, False, False)
    """
    return _TIMES.allows(us)


_FORMER_NAMES = {"triton_marlin": "moectl_marlin"}


def current_name(backend: str) -> str:
    """The name of a backend that a file names: one of moectl's own had another in files before 2026-11-22.

    ``triton``, then the name of another, is now that of an engine's kernel.

    Example:
        >>> current_name("triton_marlin"), current_name("triton_kernels")
        ('moectl_marlin', 'triton_kernels')
    """
    return _FORMER_NAMES.get(backend, backend)


Cell = tuple[int, str, bool]
"""The measured case: number of tokens, routing, and whether the weights were cold."""


@dataclass(frozen=True, slots=True)
class BackendTime:
    """The time of one backend with a correct result, at one number of tokens.

    Attributes:
        tactic: the configuration that the backend launched, or who chose it; empty if it has no choice.
        routing: distribution of the tokens over experts, as an option of `moectl bench`.
        us, spread_us: median and interquartile range, microseconds; with too few rounds the range is set to
            the median.
        cold: whether the weights were read from memory instead of a cache.
        error: relative RMS error against the reference.
        source, when: tool and file of the measurement, and its time as ISO 8601. Set by the cache.
        software: digest of the package versions that times depend on. Set by the cache.
    """

    backend: str
    tactic: str
    tokens: Count
    routing: str
    us: Microseconds
    spread_us: Annotated[float, Between(0, _TIMES.most)]
    cold: bool
    error: From0
    source: str = ""
    when: str = ""
    software: str = ""

    @property
    def cell(self) -> Cell:
        """The measured case; only times of the same case are comparable."""
        return self.tokens, self.routing, self.cold

    def comparable_with(self, other: BackendTime) -> bool:
        """True for times of the same case and software, from the same run or at most `TOGETHER` apart."""
        if self.cell != other.cell or self.software != other.software:
            return False
        if self.when == other.when:
            return True
        mine, theirs = _time(self.when), _time(other.when)
        return mine is not None and theirs is not None and abs(mine - theirs) <= TOGETHER


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class TimePair:
    """Times of two backends in the cases that both were measured in."""

    times: tuple[tuple[BackendTime, BackendTime], ...]

    @property
    def factor(self) -> float:
        """Time of the second backend relative to the first: geometric mean over cases."""
        return math.exp(fmean(math.log(b.us / a.us) for a, b in self.times))

    @property
    def noise(self) -> float:
        """Combined relative spread of both backends: mean over cases."""
        return fmean(math.hypot(a.spread_us / a.us, b.spread_us / b.us) for a, b in self.times)

    @property
    def slower(self) -> bool:
        """True when the second backend is slower by more than the noise."""
        return math.log(self.factor) > self.noise


@dataclass(frozen=True, slots=True)
class TimeRanking:
    """Backends by measured time.

    Attributes:
        factors: the preferred backend, then those measured in the same cases, fastest first: name and mean
            time relative to the preferred one.
        tokens: numbers of tokens of those cases.
        source, when: of the measurements; the range of times if there are several.
        level: backends in `factors` whose difference from the first is within the spread; the first is
            preferred to them by priority.
        partly: backends measured in only some of the cases, and the numbers of tokens of these.
    """

    factors: tuple[tuple[str, float], ...]
    tokens: tuple[int, ...]
    source: str
    when: str
    level: tuple[str, ...] = ()
    partly: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def best(self) -> str:
        """The preferred backend."""
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
    """All times of one layer on one device."""

    rows: tuple[BackendTime, ...] = ()

    def ranking(self, backends: Sequence[str]) -> TimeRanking | None:
        """The ranking of `backends`, given in priority order; None when the times prefer none of them.

        Two backends are compared by the geometric mean of the ratio of their times over all shared cases,
        so small and large numbers of tokens count the same. The backend of highest priority is preferred
        unless another is faster by more than the spread.
        """
        times: dict[str, dict[Cell, BackendTime]] = {}
        for row in self.rows:
            if row.backend in backends:
                times.setdefault(row.backend, {})[row.cell] = row
        pairs = {}
        for a, b in combinations([name for name in backends if name in times], 2):
            shared = [(times[a][cell], times[b][cell]) for cell in times[a] if cell in times[b]]
            if both := tuple((x, y) for x, y in shared if x.comparable_with(y)):
                pairs[a, b] = TimePair(both)
                pairs[b, a] = TimePair(tuple((y, x) for x, y in both))
        names = [name for name in backends if any(name in pair for pair in pairs)]
        if not names:
            return None
        best = names[0]
        for name in names[1:]:
            if (name, best) in pairs and pairs[name, best].slower:
                best = name
        compared = {b: pair for (a, b), pair in pairs.items() if a == best}
        return _ranked(best, compared) if any(pair.slower for pair in compared.values()) else None

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        return [asdict(row) for row in self.rows]


def _ranked(best: str, pairs: dict[str, TimePair]) -> TimeRanking:
    """The ranking from `best` and its pairs with each other backend."""
    tokens = {name: tuple(sorted({a.tokens for a, _ in pair.times})) for name, pair in pairs.items()}
    every = tuple(sorted(set().union(*tokens.values())))
    used = [row for pair in pairs.values() for both in pair.times for row in both]
    whens = sorted({row.when for row in used if row.when})
    others = sorted(((name, pair.factor) for name, pair in pairs.items()), key=lambda item: item[1])
    return TimeRanking(
        ((best, 1.0), *others),
        every,
        ", ".join(sorted({row.source for row in used if row.source})),
        whens[0] if len(whens) == 1 else f"several runs from {whens[0]} to {whens[-1]}" if whens else "",
        tuple(name for name, pair in pairs.items() if not pair.slower),
        tuple((name, cases) for name, cases in tokens.items() if cases != every),
    )

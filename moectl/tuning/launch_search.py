"""The search over launches: within a time budget, resumable, timing only correct results. Needs no GPU.

A `LaunchBench` measures, a `LaunchStore` keeps the results and a function is the clock, so that the search
can be tested without a GPU, a file or waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ..cache.backend_times_file import now
from ..cache.launches_file import LaunchAttempt, LaunchRow
from ..errors import Unavailable
from ..kernels.choice.launch import Launch
from .tuning_cases import TuningCase

FINALISTS = 3
"""Launches that are measured again, with all repeats, after a first look at all of them."""

FIRST_LOOK = 3
"""Repeats of the first look."""

STARTS = 2
"""How often a launch that never finishes is started before it is skipped."""


class DeviceBroken(Unavailable):
    """A launch broke the device: this process cannot measure anything more."""


class WrongResult(Exception):
    """A launch's result is wrong; the message has the error."""


class LaunchBench(Protocol):
    """Runs and times launches, one cell after the other."""

    def candidates(self, cell: TuningCase) -> Sequence[Launch]:
        """The legal launches that are worth measuring, in the order in which they are tried."""

    def current(self, cell: TuningCase) -> Launch:
        """The launch that the cell gets without this search."""

    def error(self, cell: TuningCase, launch: Launch) -> float:
        """Relative error of the result; `WrongResult` when it exceeds the tolerance."""

    def time(self, cell: TuningCase, launch: Launch, repeats: int) -> float:
        """Microseconds of a call with cold caches, the median of `repeats`."""


class LaunchStore(Protocol):
    """Where one layer's results are kept: `moectl.cache.launches_file.LaunchesStore`."""

    def row(self, tokens: int) -> LaunchRow | None: ...
    def attempts(self, tokens: int) -> tuple[LaunchAttempt, ...]: ...
    def note(self, tokens: int, attempt: LaunchAttempt) -> None: ...
    def finish(self, row: LaunchRow) -> None: ...


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search: `tried` of `launches` of a cell, which is number `number` of `cells`.

    `best` is the fastest launch so far with its microseconds, `last` the latest attempt.
    """

    cell: TuningCase
    number: int
    cells: int
    tried: int
    launches: int
    best: tuple[float, Launch] | None = None
    last: LaunchAttempt | None = None


@dataclass(frozen=True)
class SearchPlan:
    """How a search is run.

    Attributes:
        budget: seconds after which no further launch is started.
        repeats: measurements of each finalist.
        clock: seconds, from any origin.
        report: called after every launch.
    """

    budget: float
    clock: Callable[[], float]
    repeats: int = 11
    report: Callable[[SearchProgress], None] = lambda progress: None


@dataclass
class SearchResult:
    """Result of a search: new rows, rows that the store already had, and cells that are left."""

    rows: list[tuple[TuningCase, LaunchRow]] = field(default_factory=list)
    kept: list[tuple[TuningCase, LaunchRow]] = field(default_factory=list)
    left: list[TuningCase] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """True when every cell has its row."""
        return not self.left


def search(
    cells: Sequence[TuningCase],
    bench: LaunchBench,
    store: Callable[[TuningCase], LaunchStore],
    plan: SearchPlan,
) -> SearchResult:
    """The fastest correct launch of each of `cells`, in their order, as far as the budget goes.

    A cell's row is stored once all of its launches were tried; until then each attempt is, so that the
    next search continues after it. Cells that already have a row are skipped.

    Raises DeviceBroken when a launch broke the device; it is stored as failed.
    """
    deadline, result = plan.clock() + plan.budget, SearchResult()
    for number, cell in enumerate(cells):
        kept = store(cell)
        stored = kept.row(cell.tokens)
        if stored is not None:
            result.kept.append((cell, stored))
            continue
        begin = SearchProgress(cell, number, len(cells), 0, 0)
        row = _cell(bench, kept, begin, plan, deadline) if plan.clock() < deadline else None
        if row is None:
            result.left.append(cell)
        else:
            kept.finish(row)
            result.rows.append((cell, row))
    return result


def _cell(
    bench: LaunchBench, kept: LaunchStore, begin: SearchProgress, plan: SearchPlan, deadline: float
) -> LaunchRow | None:
    """The row of one cell; None when time is up before all launches were tried."""
    cell = begin.cell
    current = bench.current(cell)
    launches = list(dict.fromkeys([current, *bench.candidates(cell)]))
    known = {(attempt.family, _frozen(attempt.tile)): attempt for attempt in kept.attempts(cell.tokens)}
    before = {launch: known.get((launch.family, _frozen(asdict(launch.tile)))) for launch in launches}
    tried = {launch: attempt for launch, attempt in before.items() if attempt and _ended(attempt)}
    # Launches that did not finish the last time come last, so that they cannot block the others.
    for launch in sorted(launches, key=lambda launch: before[launch] is not None):
        if launch in tried:
            continue
        if plan.clock() >= deadline:
            return None
        last = before[launch]
        tried[launch] = _attempt(bench, kept, cell, launch, last.begun if last else 0)
        best = _best(tried)
        plan.report(replace(begin, tried=len(tried), launches=len(launches), best=best, last=tried[launch]))
    return _row(bench, cell, current, tried, plan.repeats)


def _row(
    bench: LaunchBench, cell: TuningCase, current: Launch, tried: Mapping[Launch, LaunchAttempt], repeats: int
) -> LaunchRow:
    """The fastest of a few finalists and the current launch, measured again; Unavailable if all failed."""
    right = {launch: attempt.us for launch, attempt in tried.items() if attempt.us is not None}
    if not right:
        raise Unavailable(
            f"no launch of {cell} gave a right result: {next(iter(tried.values())).why}",
            hint="report it with this line and the output of moectl env",
        )
    finals = sorted(right, key=lambda launch: right[launch])[:FINALISTS]
    again = dict.fromkeys([*finals, *([current] if current in right else [])])
    times = {launch: bench.time(cell, launch, repeats) for launch in again}
    best = min(times, key=lambda launch: times[launch])
    return LaunchRow(
        cell.tokens,
        best.family,
        asdict(best.tile),
        times[best],
        times.get(current, times[best]),
        tried[best].error or 0.0,
        len(tried),
        len(tried) - len(right),
        now(),
    )


def _attempt(
    bench: LaunchBench, kept: LaunchStore, cell: TuningCase, launch: Launch, begun: int
) -> LaunchAttempt:
    """Checks one launch's result and then times it; the attempt is stored before and after."""
    attempt = LaunchAttempt(launch.family, asdict(launch.tile), begun=begun + 1)
    if begun >= STARTS:
        ended = replace(attempt, why=f"it was begun {begun} times and never came back", begun=begun)
    else:
        kept.note(cell.tokens, attempt)
        try:
            error = bench.error(cell, launch)
            ended = replace(attempt, error=error, us=bench.time(cell, launch, FIRST_LOOK))
        except DeviceBroken as broken:
            kept.note(cell.tokens, replace(attempt, why=broken.what))
            raise
        except KeyboardInterrupt:
            kept.note(cell.tokens, replace(attempt, begun=begun))
            raise
        except WrongResult as wrong:
            ended = replace(attempt, why=str(wrong))
        except Exception as error:  # a compiler may raise anything; it is stored and reported
            ended = replace(attempt, why=_first_line(error))
    kept.note(cell.tokens, ended)
    return ended


def _ended(attempt: LaunchAttempt) -> bool:
    return attempt.us is not None or bool(attempt.why)


def _frozen(tile: Any) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(tile.items()))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def _best(tried: Mapping[Launch, LaunchAttempt]) -> tuple[float, Launch] | None:
    timed = ((attempt.us, launch) for launch, attempt in tried.items() if attempt.us is not None)
    return min(timed, key=lambda item: item[0], default=None)

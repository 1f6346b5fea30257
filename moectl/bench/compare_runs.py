"""Comparison of two bench runs, with verdicts that take noise into account."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.backend_times import FEWEST_ROUNDS
from .bench_rows import BenchRow
from .pivot import geometric_mean
from .read_rows import BenchRows

THRESHOLD = 0.02
"""Relative change below which nothing is called faster or slower."""

ERRORS = 4.0
"""Standard errors of the difference of two medians up to which noise explains it: one in ten thousand
unchanged cases would be called faster or slower."""

VERDICTS = {
    "faster": "B took less time: quartiles do not overlap, medians are more than "
    f"{ERRORS:.0f} standard errors and the threshold apart",
    "slower": "B took more time, by the same criteria",
    "same": "timed in both, and neither faster nor slower",
    "unknown": f"timed in both, with fewer than {FEWEST_ROUNDS} rounds or no quartiles: noise unknown",
    "failing": "timed in A, without a time in B",
    "fixed": "without a time in A, timed in B",
    "untimed": "in both runs, without a time in either",
    "missing": "timed in A, not in B, although its backend was requested (or all were)",
    "removed": "not in B: had no time in A, or its backend was not requested in B",
    "new": "only in B",
}
"""Verdicts on a case and their meanings; A is the earlier run, B the later one."""

UNCHANGED = ("same", "unknown", "untimed")
"""Verdicts on cases that are only counted."""

REGRESSIONS = ("slower", "failing", "missing")
"""Verdicts that make a comparison fail."""


@dataclass(frozen=True)
class CaseVerdict:
    """One case in two runs; a row is None if its run does not have the case.

    Attributes:
        word: one of `VERDICTS`.
        ratio: the median after over the one before; None without both.
    """

    before: BenchRow | None
    after: BenchRow | None
    word: str
    ratio: float | None = None

    @property
    def row(self) -> BenchRow:
        """The later row, or the only one."""
        row = self.after or self.before
        assert row is not None
        return row


def judge(
    before: BenchRow | None, after: BenchRow | None, threshold: float = THRESHOLD, *, requested: bool = True
) -> CaseVerdict:
    """The verdict on one case; `requested`: whether its backend was requested in the later run.

    Faster or slower needs three things: the quartiles of the two runs do not overlap (the later run's first
    quartile is above the earlier one's third, or vice versa), the medians differ by more than
    `ERRORS` standard errors, and by more than `threshold`. Anything else is the same: the noise of the two
    runs explains it, or it is too small to matter. The quartiles are over rounds interleaved with those of
    the other backends; a median's standard error is 1.25 times the standard deviation over the root of the
    number of rounds, and the quartiles of normal noise are 1.35 standard deviations apart. A row of fewer
    than `FEWEST_ROUNDS` rounds, or without quartiles, has no such error: the verdict is unknown.
    """
    if before is None:
        return CaseVerdict(before, after, "new")
    if after is None:
        return CaseVerdict(before, after, "missing" if requested and before.timed else "removed")
    if not (before.timed and after.timed):
        words = {(True, False): "failing", (False, True): "fixed", (False, False): "untimed"}
        return CaseVerdict(before, after, words[before.timed, after.timed])
    assert before.median_us and after.median_us
    ratio = after.median_us / before.median_us
    old, new = _quartiles(before), _quartiles(after)
    if old is None or new is None:
        return CaseVerdict(before, after, "unknown", ratio)
    word = "same"
    significant = abs(after.median_us - before.median_us) > ERRORS * math.hypot(
        _median_error(old, before.rounds), _median_error(new, after.rounds)
    )
    if significant and new[0] > old[1] and ratio > 1 + threshold:
        word = "slower"
    elif significant and new[1] < old[0] and ratio < 1 / (1 + threshold):
        word = "faster"
    return CaseVerdict(before, after, word, ratio)


def _quartiles(row: BenchRow) -> tuple[float, float] | None:
    """First and third quartile; None without them, or with too few rounds."""
    if row.q1_us is None or row.q3_us is None or row.rounds < FEWEST_ROUNDS:
        return None
    return row.q1_us, row.q3_us


def _median_error(quartiles: tuple[float, float], rounds: int) -> float:
    """The standard error of the median over `rounds`, in microseconds."""
    low, high = quartiles
    return 1.25 * (high - low) / 1.35 / math.sqrt(rounds)


@dataclass(frozen=True)
class RunComparison:
    """Two runs: a verdict on every case of either, and notes on how the runs themselves differ."""

    verdicts: tuple[CaseVerdict, ...]
    notes: tuple[str, ...]

    @property
    def regressed(self) -> bool:
        """True if a case became slower or lost its time, or the runs have no case in common."""
        return not self.paired or any(verdict.word in REGRESSIONS for verdict in self.verdicts)

    @property
    def paired(self) -> bool:
        """True if the runs have a case in common."""
        return any(verdict.before and verdict.after for verdict in self.verdicts)

    @property
    def changed(self) -> tuple[CaseVerdict, ...]:
        """Cases that are not `UNCHANGED`: regressions first, then the largest change first."""
        changed = [verdict for verdict in self.verdicts if verdict.word not in UNCHANGED]
        return tuple(
            sorted(changed, key=lambda v: (v.word not in REGRESSIONS, -abs(math.log(v.ratio or math.inf))))
        )

    @property
    def ratio(self) -> float | None:
        """Time of B over that of A, the geometric mean over cases timed in both; None without any."""
        return geometric_mean(verdict.ratio for verdict in self.verdicts if verdict.ratio)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of cases by verdict: regressions first, then other changes."""
        found = Counter(verdict.word for verdict in self.verdicts)
        order = (*REGRESSIONS, *(word for word in VERDICTS if word not in UNCHANGED), *UNCHANGED)
        return Counter({word: found[word] for word in dict.fromkeys(order) if found[word]})


def compare(before: BenchRows, after: BenchRows, threshold: float = THRESHOLD) -> RunComparison:
    """Compares `after` with `before` case by case: model, layers, scheme, backend, M, routing, parallel."""
    old, new = ({row.key: row for row in run.rows} for run in (before, after))
    requested = _requested_backends(after)
    verdicts = tuple(
        judge(old.get(key), new.get(key), threshold, requested=requested is None or key[BACKEND] in requested)
        for key in dict.fromkeys((*old, *new))
    )
    return RunComparison(verdicts, tuple(_notes(before, after, verdicts)))


BACKEND = 3
"""Index of the backend in a key."""


def _requested_backends(run: BenchRows) -> frozenset[str] | None:
    """Backends requested in a run; None for all of them, or if the run does not record it."""
    settings = run.about.get("settings")
    names = settings.get("backends") if isinstance(settings, Mapping) else None
    if not names or not isinstance(names, (list, tuple)):
        return None
    return frozenset(map(str, names))


def _notes(before: BenchRows, after: BenchRows, verdicts: Sequence[CaseVerdict]) -> list[str]:
    notes = [f"{label}: {note}" for label, run in (("A", before), ("B", after)) for note in run.notes]
    notes += _changes(_software(before.about), _software(after.about))
    both = [
        (v.before, v.after) for v in verdicts if v.before and v.after and v.before.timed and v.after.timed
    ]
    caches = sorted(
        {f"A {_cache_state(a)}, B {_cache_state(b)}" for a, b in both if _cache_state(a) != _cache_state(b)}
    )
    notes += [f"caches differ: {text}" for text in caches]
    for label, rows in (("A", [a for a, _ in both]), ("B", [b for _, b in both])):
        throttled = [row for row in rows if row.throttled]
        if throttled:
            notes.append(
                f"{label}: clocks throttled in {len(throttled)} of {len(rows)} cases "
                f"({throttled[0].throttled})"
            )
    unknown = sum(verdict.word == "unknown" for verdict in verdicts)
    if unknown:
        notes.append(
            f"{unknown} of {len(both)} cases have fewer than {FEWEST_ROUNDS} rounds or no quartiles: "
            "their noise is unknown, so none is called faster or slower"
        )
    if not any(v.before and v.after for v in verdicts):
        notes.append("the runs have no case in common: nothing was compared")
    return notes


def _software(about: Mapping[str, Any]) -> dict[str, Any]:
    """Device, driver and versions by name."""
    versions = about.get("versions")
    named = versions.items() if isinstance(versions, Mapping) else ()
    return {
        "device": about.get("device"),
        "driver": about.get("driver"),
        **{f"version of {name}": value for name, value in named},
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences, a phrase each."""
    return [
        f"{name} differs: A {_recorded(old.get(name))}, B {_recorded(new.get(name))}"
        for name in dict.fromkeys((*old, *new))
        if (new.get(name) or None) != (old.get(name) or None)
    ]


def _recorded(value: Any) -> str:
    return str(value) if value else "not recorded"


def _cache_state(row: BenchRow) -> str:
    return row.caches.partition(":")[0] or "unknown"


def document(comparison: RunComparison, threshold: float) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "threshold": threshold,
        "counts": dict(comparison.counts),
        "regressed": comparison.regressed,
        "ratio": comparison.ratio,
        "notes": list(comparison.notes),
        "cells": [
            {
                "model": v.row.model,
                "layers": v.row.layers,
                "scheme": v.row.scheme,
                "backend": v.row.backend,
                "tokens": v.row.tokens,
                "routing": v.row.routing,
                "parallel": v.row.parallel,
                "verdict": v.word,
                "ratio": v.ratio,
                "before_us": v.before.median_us if v.before else None,
                "after_us": v.after.median_us if v.after else None,
                "before_tactic": v.before.tactic if v.before else None,
                "after_tactic": v.after.tactic if v.after else None,
                "reason": v.row.reason,
            }
            for v in comparison.verdicts
        ],
    }

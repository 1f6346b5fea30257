"""Two runs of a bench held against each other, with verdicts that noise does not make."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .rows import Row, Rows
from .settings import differences

THRESHOLD = 0.02
"""Relative change below which nothing is called faster or slower."""

ERRORS = 4.0
"""Standard errors of the difference of two medians below which noise explains it: of ten thousand cells
that did not change, one would be called faster or slower."""

REGRESSIONS = ("slower", "broken")
"""Verdicts that make a comparison fail."""


@dataclass(frozen=True)
class Verdict:
    """One cell in two runs; a row is None where its run does not have the cell.

    Attributes:
        word: ``faster``, ``slower``, ``level``, ``broken`` (timed before, not now), ``mended`` (the other
            way round), ``neither`` (timed in none), ``gone``, ``new``.
        ratio: the median after over the one before; None without both.
    """

    before: Row | None
    after: Row | None
    word: str
    ratio: float | None = None

    @property
    def row(self) -> Row:
        """The later row, or the only one."""
        found = self.after or self.before
        assert found is not None
        return found


def judge(before: Row | None, after: Row | None, threshold: float = THRESHOLD) -> Verdict:
    """The verdict on one cell.

    Faster or slower needs three things: the quartiles of the two runs do not overlap (the later run's first
    quartile lies above the earlier one's third, or the other way round), the medians differ by more than
    `ERRORS` standard errors, and by more than `threshold`. Anything else is level: the noise of the two runs
    explains it, or it is too small to matter. The quartiles are over rounds between which the other backends
    took their turns; a median's standard error is 1.25 times the standard deviation over the root of the
    number of rounds, and the quartiles of normal noise are 1.35 standard deviations apart.
    """
    if before is None or after is None:
        return Verdict(before, after, "new" if before is None else "gone")
    if not (before.timed and after.timed):
        words = {(True, False): "broken", (False, True): "mended", (False, False): "neither"}
        return Verdict(before, after, words[before.timed, after.timed])
    assert before.median_us and after.median_us
    ratio = after.median_us / before.median_us
    low, high = _quartiles(before), _quartiles(after)
    word = "level"
    clear = abs(after.median_us - before.median_us) > ERRORS * math.hypot(_error(before), _error(after))
    if clear and high[0] > low[1] and ratio > 1 + threshold:
        word = "slower"
    elif clear and high[1] < low[0] and ratio < 1 / (1 + threshold):
        word = "faster"
    return Verdict(before, after, word, ratio)


def _quartiles(row: Row) -> tuple[float, float]:
    """First and third quartile; the median where a row has none."""
    assert row.median_us is not None
    return (
        row.median_us if row.q1_us is None else row.q1_us,
        row.median_us if row.q3_us is None else row.q3_us,
    )


def _error(row: Row) -> float:
    """The standard error of a row's median, in microseconds."""
    low, high = _quartiles(row)
    return 1.25 * (high - low) / 1.35 / math.sqrt(max(1, row.rounds))


@dataclass(frozen=True)
class Comparison:
    """Two runs: a verdict on every cell of either, and how the runs themselves differ, a phrase each."""

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def regressed(self) -> bool:
        """True when anything became slower, or is no longer right or no longer runs."""
        return any(verdict.word in REGRESSIONS for verdict in self.verdicts)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many cells have each verdict."""
        return Counter(verdict.word for verdict in self.verdicts)


def compare(before: Rows, after: Rows, threshold: float = THRESHOLD) -> Comparison:
    """`after` held against `before`, cell by cell: model, layers, scheme, backend, M, routing, parallel."""
    old, new = ({row.key: row for row in run.rows} for run in (before, after))
    keys = dict.fromkeys((*old, *new))
    verdicts = tuple(judge(old.get(key), new.get(key), threshold) for key in keys)
    return Comparison(verdicts, tuple(_notes(before, after, verdicts)))


def _notes(before: Rows, after: Rows, verdicts: Sequence[Verdict]) -> list[str]:
    names = ("device", "driver", "versions")
    notes = differences({n: after.about.get(n) for n in names}, {n: before.about.get(n) for n in names})
    both = [
        (v.before, v.after) for v in verdicts if v.before and v.after and v.before.timed and v.after.timed
    ]
    caches = sorted({f"{_kind(a)} before, {_kind(b)} after" for a, b in both if _kind(a) != _kind(b)})
    notes += [f"caches were {text}" for text in caches]
    for when, rows in (("before", [a for a, _ in both]), ("after", [b for _, b in both])):
        held = [row for row in rows if row.throttled]
        if held:
            notes.append(
                f"clocks were held down {when} in {len(held)} of {len(rows)} cells ({held[0].throttled})"
            )
    return notes


def _kind(row: Row) -> str:
    return row.caches.partition(":")[0] or "unknown"


def document(found: Comparison, threshold: float) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "threshold": threshold,
        "counts": dict(found.counts),
        "regressed": found.regressed,
        "notes": list(found.notes),
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
            for v in found.verdicts
        ],
    }

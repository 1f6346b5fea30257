"""Rows of a bench as one table per layer and routing: backends down, tokens across. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .bench_rows import BenchRow

TableKey = tuple[str, str, str, str, str]
"""Model, layers, scheme, parallel and routing: the subject of one table or figure."""


def table_key(row: BenchRow) -> TableKey:
    """The table that a row belongs to."""
    return row.model, row.layers, row.scheme, row.parallel, row.routing


def title(key: TableKey) -> str:
    """The title of a table or figure."""
    model, layers, scheme, parallel, routing = key
    where = "" if layers == "-" else f" layers {layers}"
    sharding = "" if parallel == "1" else f", {parallel}"
    return f"{model}{where}, {scheme}, {routing}{sharding}"


def geometric_mean(numbers: Iterable[float]) -> float | None:
    """The geometric mean; None without numbers."""
    logs = [math.log(n) for n in numbers if n > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclass(frozen=True)
class BackendLine:
    """One backend of a table.

    Attributes:
        rows: its rows by tokens.
        ratio: time of the fastest other backend over this one's, the geometric mean over tokens; above 1 for
            what is faster than all others. None without a case that another has a time for, too.
        shared: number of cases in `ratio`.
        roofline: roofline time as a share of this backend's, the geometric mean over tokens.
    """

    backend: str
    rows: Mapping[int, BenchRow]
    ratio: float | None
    shared: int
    roofline: float | None


@dataclass(frozen=True)
class PivotTable:
    """The rows of one layer and routing.

    Attributes:
        tokens: ascending.
        lines: one per backend that supports the layer, the best `ratio` first; then those without a ratio.
        best: the fastest backend by tokens.
        roofline_us: roofline time by tokens.
        refused: reasons of backends that do not support the layer.
    """

    key: TableKey
    tokens: tuple[int, ...]
    lines: tuple[BackendLine, ...]
    best: Mapping[int, str]
    roofline_us: Mapping[int, float]
    refused: Mapping[str, str]


def pivot_tables(rows: Sequence[BenchRow]) -> list[PivotTable]:
    """The tables of `rows`, in the order in which their first rows come."""
    groups: dict[TableKey, list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(table_key(row), []).append(row)
    return [_pivot(key, group) for key, group in groups.items()]


def _pivot(key: TableKey, rows: Sequence[BenchRow]) -> PivotTable:
    by_backend: dict[str, dict[int, BenchRow]] = {}
    for row in rows:
        if not row.refused:
            by_backend.setdefault(row.backend, {})[row.tokens] = row
    times = {
        name: {tokens: row.median_us for tokens, row in own.items() if row.median_us}
        for name, own in by_backend.items()
    }
    tokens = tuple(sorted({row.tokens for row in rows if not row.refused}))
    best = {
        count: min((own[count], name) for name, own in times.items() if count in own)[1]
        for count in tokens
        if any(count in own for own in times.values())
    }
    lines = [_line(name, by_backend[name], times) for name in by_backend]
    lines.sort(key=lambda line: (line.ratio is None, -(line.ratio or 0.0)))
    refused = {row.backend: row.reason for row in rows if row.refused and row.backend not in by_backend}
    floors = {row.tokens: row.floor_us for row in rows if row.floor_us}
    return PivotTable(key, tokens, tuple(lines), best, floors, refused)


def _line(name: str, rows: Mapping[int, BenchRow], times: Mapping[str, Mapping[int, float]]) -> BackendLine:
    own = times[name]
    ratios = []
    for tokens, us in own.items():
        others = [them[tokens] for other, them in times.items() if other != name and tokens in them]
        if others:
            ratios.append(min(others) / us)
    shares = [row.floor_percent / 100 for row in rows.values() if row.timed and row.floor_percent]
    return BackendLine(name, rows, geometric_mean(ratios), len(ratios), geometric_mean(shares))


def filtered(
    rows: Sequence[BenchRow],
    models: Sequence[str] = (),
    backends: Sequence[str] = (),
    tokens: Sequence[int] = (),
) -> tuple[BenchRow, ...]:
    """The rows of these models, backends and numbers of tokens; an empty list stands for all."""
    return tuple(
        row
        for row in rows
        if (not models or row.model in models)
        and (not backends or row.backend in backends)
        and (not tokens or row.tokens in tokens)
    )

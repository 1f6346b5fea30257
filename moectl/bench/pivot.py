"""Rows of a bench as one table per layer and routing: backends down, tokens across. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..kernels.registry import REFERENCES
from ..problem.schemes import scheme_words
from .bench_rows import BenchRow

TableKey = tuple[str, str, str, str, str]
"""Model, layers, scheme, parallel and routing: the subject of one table; all but the last are its layer's."""


def table_key(row: BenchRow) -> TableKey:
    """The table that a row belongs to."""
    return row.model, row.layers, row.scheme, row.parallel, row.routing


def layer_title(key: TableKey) -> str:
    """``gpt-oss-20b, mxfp4 group 32, 16-bit activations``."""
    model, layers, scheme, parallel, _ = key
    where = "" if layers == "-" else f" layers {layers}"
    sharding = "" if parallel == "1" else f", {parallel}"
    return f"{model}{where}, {scheme_words(scheme)}{sharding}"


def title(key: TableKey) -> str:
    """The title of a table: its layer and routing."""
    return f"{layer_title(key)}, {key[-1]} routing"


def geometric_mean(numbers: Iterable[float]) -> float | None:
    """The geometric mean; None without numbers."""
    logs = [math.log(n) for n in numbers if n > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclass(frozen=True)
class BackendLine:
    """One backend of a table.

    Attributes:
        rows: its rows by tokens.
        ratio: its speed-up over the fastest other backend (`PivotTable.speedups`), the geometric mean over
            tokens; None without a case that another has a time for, too, and for a reference.
        shared: number of cases in `ratio`.
        roofline: roofline time as a share of this backend's, the geometric mean over tokens.
        reference: whether it is one of `REFERENCES`.
    """

    backend: str
    rows: Mapping[int, BenchRow]
    ratio: float | None
    shared: int
    roofline: float | None
    reference: bool


@dataclass(frozen=True)
class PivotTable:
    """The rows of one layer and routing.

    Attributes:
        tokens: ascending.
        lines: one per backend that supports the layer, the best `ratio` first; then those without a ratio,
            references last.
        best: the fastest backend by tokens; references do not count.
        roofline_us: roofline time by tokens.
        refused: reasons of backends that do not support the layer.
        times: microseconds by backend and tokens; only right results have a time.
    """

    key: TableKey
    tokens: tuple[int, ...]
    lines: tuple[BackendLine, ...]
    best: Mapping[int, str]
    roofline_us: Mapping[int, float]
    refused: Mapping[str, str]
    times: Mapping[str, Mapping[int, float]]

    def speedups(self, backend: str, besides: Iterable[str] = ()) -> dict[int, float]:
        """Time of the fastest other backend over that of `backend`, by tokens for which both have one.

        Above 1 where `backend` is faster than all others. References and those `besides` do not count.
        """
        return _speedups(self.times, backend, besides)


def pivot_tables(rows: Sequence[BenchRow]) -> list[PivotTable]:
    """The tables of `rows`, in the order in which their layers come first, those of a layer together."""
    layers: dict[tuple[str, ...], dict[TableKey, list[BenchRow]]] = {}
    for row in rows:
        key = table_key(row)
        layers.setdefault(key[:-1], {}).setdefault(key, []).append(row)
    return [_pivot(key, group) for tables in layers.values() for key, group in tables.items()]


def _speedups(
    times: Mapping[str, Mapping[int, float]], backend: str, besides: Iterable[str] = ()
) -> dict[int, float]:
    left_out = {backend, *REFERENCES, *besides}
    ratios = {}
    for tokens, us in times.get(backend, {}).items():
        others = [them[tokens] for other, them in times.items() if other not in left_out and tokens in them]
        if others:
            ratios[tokens] = min(others) / us
    return ratios


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
    real = {name: own for name, own in times.items() if name not in REFERENCES}
    best = {
        count: min(known)[1]
        for count in tokens
        if (known := [(own[count], name) for name, own in real.items() if count in own])
    }
    lines = []
    for name, own in by_backend.items():
        ratios = {} if name in REFERENCES else _speedups(times, name)
        shares = [row.floor_percent / 100 for row in own.values() if row.timed and row.floor_percent]
        mean, share = geometric_mean(ratios.values()), geometric_mean(shares)
        lines.append(BackendLine(name, own, mean, len(ratios), share, name in REFERENCES))
    lines.sort(key=lambda line: (line.reference, line.ratio is None, -(line.ratio or 0.0)))
    refused = {row.backend: row.reason for row in rows if row.refused and row.backend not in by_backend}
    floors = {row.tokens: row.floor_us for row in rows if row.floor_us}
    return PivotTable(key, tokens, tuple(lines), best, floors, refused, times)


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

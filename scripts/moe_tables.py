"""The rows of `bench_peers` as lines, and as tables with ratios to the best peer and to the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moectl.bench.bench_rows import BenchRow
from moectl.bench.row_tables import footer

COLUMNS: Mapping[str, str] = {
    "moectl": "moectl",
    "marlin": "marlin",
    "triton_kernels": "triton_kernels",
    "humming": "humming",
    "flashinfer": "flashinfer_cutlass",
    "moectl_marlin": "moectl_marlin",
}
"""Column -> backend."""

NAMES = {backend: column for column, backend in COLUMNS.items()}
OURS = "moectl"

Table = tuple[str, str, str]
"""Model, scheme and routing of a table."""

Cells = Mapping[str, Mapping[int, BenchRow]]
"""The rows of one table by column and tokens."""


def one_line(row: BenchRow) -> str:
    """A row as one line of text."""
    weights = row.scheme.partition(",")[0]
    case = f"{row.model:13s} {weights:14s} {row.routing:9s} {NAMES[row.backend]:14s} M={row.tokens:<6d}"
    if row.median_us is None:
        return f"{case} -  {row.reason}"
    return (
        f"{case} {row.median_us:9.1f} us  roofline {row.floor_us:8.1f} ({row.floor_percent:.0f}%)  "
        f"{row.experts:5.1f} active experts  error {row.error_rms:.1e}  {row.tactic}"
    )


def geometric_mean(numbers: Iterable[float]) -> float:
    """The geometric mean; 0 without numbers."""
    logs = [math.log(n) for n in numbers]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def tables_of(rows: Sequence[BenchRow]) -> dict[Table, dict[str, dict[int, BenchRow]]]:
    """Rows by table, column and tokens."""
    tables: dict[Table, dict[str, dict[int, BenchRow]]] = {}
    for row in rows:
        table = tables.setdefault((row.model, row.scheme, row.routing), {})
        table.setdefault(NAMES[row.backend], {})[row.tokens] = row
    return tables


def speedups(table: Cells) -> dict[int, float]:
    """The best peer's time over moectl's, by tokens, where both have a time; wrong results have none."""
    ratios = {}
    for tokens, row in table.get(OURS, {}).items():
        peers = [
            peer.median_us
            for column, cells in table.items()
            if not column.startswith(OURS) and (peer := cells.get(tokens)) and peer.median_us
        ]
        if row.median_us and peers:
            ratios[tokens] = min(peers) / row.median_us
    return ratios


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _us(row: BenchRow | None) -> str:
    if row is None or row.median_us is None:
        return "wrong" if row and row.ok is False else "-"
    return f"{row.median_us:.1f}" if row.median_us < 100 else f"{row.median_us:.0f}"


def _table(key: Table, table: Cells) -> list[str]:
    tokens = sorted({t for cells in table.values() for t in cells})
    timed = {t: row for cells in table.values() for t, row in cells.items() if row.timed}
    ratios, ours = speedups(table), table.get(OURS, {})
    percents = {t: row.floor_percent for t, row in ours.items()}

    def line(name: str, values: Mapping[int, float | None], digits: int) -> str:
        numbers = (values.get(t) for t in tokens)
        return _line(name, ("-" if number is None else f"{number:.{digits}f}" for number in numbers))

    lines = [
        f"### {', '.join(key)} routing",
        "",
        _line("us per layer", (f"M={t}" for t in tokens)),
        _line("---", ("---:" for _ in tokens)),
        line("active experts", {t: row.experts for t, row in timed.items()}, 1),
        line("roofline", {t: row.floor_us for t, row in timed.items()}, 1),
        *(_line(column, (_us(cells.get(t)) for t in tokens)) for column, cells in table.items()),
        line("best peer / moectl", ratios, 2),
        line("roofline / moectl", {t: percent and percent / 100 for t, percent in percents.items()}, 2),
        "",
    ]
    if ratios:
        lines += [f"Geometric mean of best peer / moectl: {geometric_mean(ratios.values()):.3f}.", ""]
    for column, cells in table.items():
        errors = [row.error_rms for row in cells.values() if row.error_rms is not None]
        throttled = [str(row.tokens) for row in cells.values() if row.throttled]
        notes = [f"largest relative error {max(errors):.1e}"] if errors else []
        notes += [f"clocks throttled at M = {', '.join(throttled)}"] if throttled else []
        notes += dict.fromkeys(row.reason for row in cells.values() if row.reason)
        if notes:
            lines.append(f"- {column}: {'; '.join(notes)}")
    return [*lines, ""]


def as_markdown(about: Mapping[str, Any], rows: Sequence[BenchRow]) -> str:
    """Tables by model, scheme and routing, geometric means, and the conditions of the measurement."""
    lines = ["# Fused MoE layers: moectl and its peers", ""]
    tables = tables_of(rows)
    for key, table in tables.items():
        timed = any(row.timed for cells in table.values() for row in cells.values())
        reasons = "; ".join(dict.fromkeys(row.reason for cells in table.values() for row in cells.values()))
        lines += _table(key, table) if timed else [f"{', '.join(key)}: nothing was timed ({reasons}).", ""]
    return "\n".join([*lines, *_means(tables), *(f"- {line}" for line in footer(about, rows)), ""])


def _means(tables: Mapping[Table, Cells]) -> list[str]:
    """A line for each routing, and one over all of them."""
    speedups_of: dict[str, list[float]] = {}
    for (_, _, routing), table in tables.items():
        speedups_of.setdefault(f" with {routing} routing", []).extend(speedups(table).values())
    if len(speedups_of) > 1:
        speedups_of[""] = [ratio for ratios in speedups_of.values() for ratio in ratios]
    return [
        f"Geometric mean of best peer / moectl over {len(ratios)} cases{routing}: "
        f"{geometric_mean(ratios):.3f}; moectl is ahead in {sum(ratio > 1 for ratio in ratios)}.\n"
        for routing, ratios in speedups_of.items()
        if ratios
    ]

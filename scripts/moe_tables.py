"""The rows of `bench_peers` as lines, and as tables with ratios to the best peer and to the floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moectl.bench.bench_rows import BenchRow
from moectl.bench.row_tables import footer

COLUMNS: Mapping[str, str] = {
    "moectl": "triton",
    "marlin": "marlin",
    "triton_kernels": "triton_kernels",
    "humming": "humming",
    "flashinfer": "flashinfer_cutlass",
    "moectl-marlin": "triton_marlin",
}
"""Backends by what their columns are called."""

NAMES = {backend: column for column, backend in COLUMNS.items()}
OURS = "moectl"

Table = tuple[str, str, str]
"""Model, scheme and routing: what one table is about."""

Cells = Mapping[str, Mapping[int, BenchRow]]
"""The rows of one table by column and tokens."""


def one_line(row: BenchRow) -> str:
    """A row for the screen."""
    weights = row.scheme.partition(",")[0]
    where = f"{row.model:13s} {weights:14s} {row.routing:9s} {NAMES[row.backend]:14s} M={row.tokens:<6d}"
    if row.median_us is None:
        return f"{where} -  {row.reason}"
    return (
        f"{where} {row.median_us:9.1f} us  floor {row.floor_us:8.1f} ({row.floor_percent:.0f}%)  "
        f"{row.experts:5.1f} experts  error {row.error_rms:.1e}  {row.tactic}"
    )


def geometric_mean(numbers: Iterable[float]) -> float:
    """0 for none."""
    logs = [math.log(n) for n in numbers]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def tables_of(rows: Sequence[BenchRow]) -> dict[Table, dict[str, dict[int, BenchRow]]]:
    """Rows by table, column and tokens."""
    found: dict[Table, dict[str, dict[int, BenchRow]]] = {}
    for row in rows:
        table = found.setdefault((row.model, row.scheme, row.routing), {})
        table.setdefault(NAMES[row.backend], {})[row.tokens] = row
    return found


def speedups(table: Cells) -> dict[int, float]:
    """The best peer's time over moectl's, by tokens, where both have one: of right results alone."""
    found = {}
    for tokens, row in table.get(OURS, {}).items():
        peers = [
            theirs.median_us
            for column, cells in table.items()
            if not column.startswith(OURS) and (theirs := cells.get(tokens)) and theirs.median_us
        ]
        if row.median_us and peers:
            found[tokens] = min(peers) / row.median_us
    return found


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
    floors = {t: row.floor_percent for t, row in ours.items()}

    def line(name: str, values: Mapping[int, float | None], digits: int) -> str:
        found = (values.get(t) for t in tokens)
        return _line(name, ("-" if value is None else f"{value:.{digits}f}" for value in found))

    lines = [
        f"### {', '.join(key)} routing",
        "",
        _line("us of a layer", (f"M={t}" for t in tokens)),
        _line("---", ("---:" for _ in tokens)),
        line("experts touched", {t: row.experts for t, row in timed.items()}, 1),
        line("floor", {t: row.floor_us for t, row in timed.items()}, 1),
        *(_line(column, (_us(cells.get(t)) for t in tokens)) for column, cells in table.items()),
        line("best peer / moectl", ratios, 2),
        line("floor / moectl", {t: value and value / 100 for t, value in floors.items()}, 2),
        "",
    ]
    if ratios:
        lines += [f"Geometric mean of best peer / moectl: {geometric_mean(ratios.values()):.3f}.", ""]
    for column, cells in table.items():
        errors = [row.error_rms for row in cells.values() if row.error_rms is not None]
        held = [str(row.tokens) for row in cells.values() if row.throttled]
        said = [f"largest relative error {max(errors):.1e}"] if errors else []
        said += [f"clocks held down at M = {', '.join(held)}"] if held else []
        said += dict.fromkeys(row.reason for row in cells.values() if row.reason)
        if said:
            lines.append(f"- {column}: {'; '.join(said)}")
    return [*lines, ""]


def as_markdown(about: Mapping[str, Any], rows: Sequence[BenchRow]) -> str:
    """Tables by model, scheme and routing, the geometric means, and what they were taken on."""
    lines = ["# Fused MoE layers: moectl and its peers", ""]
    found = tables_of(rows)
    for key, table in found.items():
        timed = any(row.timed for cells in table.values() for row in cells.values())
        reasons = "; ".join(dict.fromkeys(row.reason for cells in table.values() for row in cells.values()))
        lines += _table(key, table) if timed else [f"{', '.join(key)}: nothing was timed ({reasons}).", ""]
    return "\n".join([*lines, *_sums(found), *(f"- {line}" for line in footer(about, rows)), ""])


def _sums(tables: Mapping[Table, Cells]) -> list[str]:
    """A line for each routing, and one for all of them."""
    found: dict[str, list[float]] = {}
    for (_, _, routing), table in tables.items():
        found.setdefault(f" of {routing} routing", []).extend(speedups(table).values())
    if len(found) > 1:
        found[""] = [ratio for ratios in found.values() for ratio in ratios]
    return [
        f"Geometric mean of best peer / moectl over {len(ratios)} cells{which}: "
        f"{geometric_mean(ratios):.3f}; moectl is ahead in {sum(ratio > 1 for ratio in ratios)}.\n"
        for which, ratios in found.items()
        if ratios
    ]

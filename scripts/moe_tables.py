"""The rows of `bench_peers` as a line, as JSON, and as markdown tables with ratios."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moe_workers import Row

OURS = "moectl"
Table = tuple[str, str, str]
"""Model, format and routing: what one table is about."""


def one_line(row: Row) -> str:
    """A row for the screen."""
    where = f"{row.model:13s} {row.format:9s} {row.routing:9s} {row.column:14s} M={row.tokens:<6d}"
    if row.us is None:
        return f"{where} -  {row.note}"
    error = "" if row.error is None else f" error {row.error:.1e}"
    return (
        f"{where} {row.us:9.1f} us  floor {row.floor_us:8.1f} ({row.floor_us / row.us:.2f})  "
        f"{row.experts:5.1f} experts  {row.checked}{error}"
    )


def as_json(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Everything, with what it was taken on."""
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def geometric_mean(numbers: Iterable[float]) -> float:
    """0 for none."""
    logs = [math.log(n) for n in numbers]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def _cells(rows: Sequence[Row]) -> dict[Table, dict[str, dict[int, Row]]]:
    """Rows by table, column and tokens."""
    found: dict[Table, dict[str, dict[int, Row]]] = {}
    for row in rows:
        table = found.setdefault((row.model, row.format, row.routing), {})
        table.setdefault(row.column, {})[row.tokens] = row
    return found


def _best_peer(table: Mapping[str, Mapping[int, Row]], tokens: int) -> Row | None:
    peers = [
        row
        for column, cells in table.items()
        if not column.startswith(OURS) and (row := cells.get(tokens)) and row.us and row.checked != "WRONG"
    ]
    return min(peers, key=lambda row: row.us or math.inf, default=None)


def _ours(table: Mapping[str, Mapping[int, Row]], tokens: int) -> Row | None:
    row = table.get(OURS, {}).get(tokens)
    return row if row and row.us and row.checked == "ok" else None


def _speedups(table: Mapping[str, Mapping[int, Row]]) -> dict[int, float]:
    """The best peer's time over ours, by tokens, where both are there and ours is right."""
    found = {}
    for tokens in {tokens for cells in table.values() for tokens in cells}:
        ours, best = _ours(table, tokens), _best_peer(table, tokens)
        if ours and best and ours.us and best.us:
            found[tokens] = best.us / ours.us
    return found


def _us(row: Row | None) -> str:
    if row is None or row.us is None:
        return "-"
    text = f"{row.us:.1f}" if row.us < 100 else f"{row.us:.0f}"
    return f"{text} (wrong)" if row.checked == "WRONG" else text


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _table(key: Table, table: Mapping[str, Mapping[int, Row]]) -> list[str]:
    model, name, routing = key
    tokens = sorted({t for cells in table.values() for t in cells})
    timed = {t: next((c[t] for c in table.values() if t in c and c[t].us), None) for t in tokens}
    speedups = _speedups(table)
    floors = {t: row.floor_us for t, row in timed.items() if row}
    lines = [
        f"### {model}, {name}, {routing} routing",
        "",
        _line("us of a layer", (f"M={t}" for t in tokens)),
        _line("---", ("---:" for _ in tokens)),
        _line("experts touched", (f"{row.experts:.1f}" if (row := timed[t]) else "-" for t in tokens)),
        _line("floor", (f"{floors[t]:.1f}" if t in floors else "-" for t in tokens)),
        *(_line(column, (_us(cells.get(t)) for t in tokens)) for column, cells in table.items()),
        _line("best peer / moectl", (f"{speedups[t]:.2f}" if t in speedups else "-" for t in tokens)),
        _line(
            "floor / moectl",
            (
                f"{ours.floor_us / ours.us:.2f}" if (ours := _ours(table, t)) and ours.us else "-"
                for t in tokens
            ),
        ),
        "",
    ]
    if speedups:
        lines += [f"Geometric mean of best peer / moectl: {geometric_mean(speedups.values()):.3f}.", ""]
    for column, cells in table.items():
        errors = [row.error for row in cells.values() if row.error is not None]
        notes = dict.fromkeys(row.note for row in cells.values() if row.note)
        said = [f"largest relative error {max(errors):.1e}"] if errors else []
        if said or notes:
            lines.append(f"- {column}: {'; '.join([*said, *notes])}")
    return [*lines, ""]


def as_markdown(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Tables by model, format and routing, and the geometric means."""
    tables = _cells(rows)
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    lines = [
        "# Fused MoE layers: moectl and its peers",
        "",
        f"{about.get('device', 'no device answered')}; {versions}. L2 {about.get('l2', '')}.",
        f"Floors at {about.get('bandwidth', 0) / 1e12:.2f} TB/s and {about.get('flops', 0) / 1e12:.0f} "
        f"TFLOP/s ({about.get('rates', '')}).",
        "",
    ]
    for key, table in tables.items():
        timed = any(row.us for cells in table.values() for row in cells.values())
        lines += _table(key, table) if timed else [f"{', '.join(key)}: nothing was timed.", ""]
    return "\n".join([*lines, *_sums(tables)])


def _sums(tables: Mapping[Table, Mapping[str, Mapping[int, Row]]]) -> list[str]:
    """A line for each routing, and one for all of them."""
    found: dict[str, list[float]] = {}
    for (_, _, routing), table in tables.items():
        found.setdefault(f" of {routing} routing", []).extend(_speedups(table).values())
    if len(found) > 1:
        found[""] = [speedup for speedups in found.values() for speedup in speedups]
    return [
        f"Geometric mean of best peer / moectl over {len(speedups)} cells{which}: "
        f"{geometric_mean(speedups):.3f}; moectl is ahead in {sum(s > 1 for s in speedups)}.\n"
        for which, speedups in found.items()
        if speedups
    ]

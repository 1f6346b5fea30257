"""The rows of `bench_peers` as tables in Markdown, with moectl's speed-up over the best peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moectl.bench.bench_rows import BenchRow
from moectl.bench.pivot import PivotTable, geometric_mean, pivot_tables, title
from moectl.bench.row_tables import footer, number, result_word

COLUMNS: Mapping[str, str] = {
    "moectl": "moectl",
    "marlin": "marlin",
    "triton_kernels": "triton_kernels",
    "humming": "humming",
    "flashinfer": "flashinfer_cutlass",
    "moectl_marlin": "moectl_marlin",
}
"""Column -> backend."""

OURS = "moectl"
NO_PEERS = ("moectl_marlin",)
"""moectl's other backends: their times are shown, and `OURS` is not compared with them."""


def as_markdown(about: Mapping[str, Any], rows: Sequence[BenchRow]) -> str:
    """A table per layer and routing, geometric means, and the conditions of the measurement."""
    lines = ["# Fused MoE layers: moectl and its peers", ""]
    tables = pivot_tables(rows)
    for table in tables:
        if any(table.times.values()):
            lines += _table(table)
        else:
            known = (*table.refused.values(), *(r.reason for line in table.lines for r in line.rows.values()))
            lines += [f"{title(table.key)}: nothing was timed ({'; '.join(dict.fromkeys(known))}).", ""]
    return "\n".join([*lines, *_means(tables), *(f"- {line}" for line in footer(about, rows)), ""])


def _table(table: PivotTable) -> list[str]:
    rows = {line.backend: line.rows for line in table.lines}
    speedups = table.speedups(OURS, NO_PEERS)
    active = {m: row.experts for line in table.lines for m, row in line.rows.items() if row.timed}
    share = {m: row.floor_percent / 100 for m, row in rows.get(OURS, {}).items() if row.floor_percent}
    lines = [
        f"### {title(table.key)}",
        "",
        _line("µs per layer", (f"M={m}" for m in table.tokens)),
        _line("---", ("---:" for _ in table.tokens)),
        _line("active experts", (number(active.get(m)) for m in table.tokens)),
        _line("roofline", (number(table.roofline_us.get(m)) for m in table.tokens)),
    ]
    for backend, own in rows.items():
        lines.append(_line(backend, (_time(own.get(m)) for m in table.tokens)))
    lines.append(_line(f"best peer / {OURS}", (_ratio(speedups.get(m)) for m in table.tokens)))
    lines += [_line(f"roofline / {OURS}", (_ratio(share.get(m)) for m in table.tokens)), ""]
    if speedups:
        lines += [f"Geometric mean of best peer / {OURS}: {geometric_mean(speedups.values()):.3f}.", ""]
    for backend, own in rows.items():
        errors = [row.error_rms for row in own.values() if row.error_rms is not None]
        throttled = [str(row.tokens) for row in own.values() if row.throttled]
        notes = [f"largest relative error {max(errors):.1e}"] if errors else []
        notes += [f"clocks throttled at M = {', '.join(throttled)}"] if throttled else []
        notes += dict.fromkeys(row.reason for row in own.values() if row.reason)
        if notes:
            lines.append(f"- {backend}: {'; '.join(notes)}")
    lines += [f"- {backend}: {reason}" for backend, reason in table.refused.items()]
    return [*lines, ""]


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _time(row: BenchRow | None) -> str:
    if row is None:
        return "-"
    return number(row.median_us) if row.timed else result_word(row)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _means(tables: Sequence[PivotTable]) -> list[str]:
    """A line for each routing, and one over all of them."""
    speedups: dict[str, list[float]] = {}
    for table in tables:
        ratios = table.speedups(OURS, NO_PEERS).values()
        speedups.setdefault(f" with {table.key[-1]} routing", []).extend(ratios)
    if len(speedups) > 1:
        speedups[""] = [ratio for ratios in speedups.values() for ratio in ratios]
    return [
        f"Geometric mean of best peer / {OURS} over {len(ratios)} cases{routing}: "
        f"{geometric_mean(ratios):.3f}; {OURS} is ahead in {sum(ratio > 1 for ratio in ratios)}.\n"
        for routing, ratios in speedups.items()
        if ratios
    ]

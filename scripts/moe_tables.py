"""The rows of `bench_peers` as tables in Markdown, with moectl's speed-up over the best peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moectl.bench.bench_rows import BenchRow
from moectl.bench.pivot import PivotTable, geometric_mean, layer_title, pivot_tables, title
from moectl.bench.row_tables import footer, number, result_word

COLUMNS: Mapping[str, str] = {
    "moectl": "moectl",
    "marlin": "marlin",
    "triton_kernels": "triton_kernels",
    "humming": "humming",
    "flashinfer": "flashinfer_cutlass",
    "moectl_marlin": "moectl_marlin",
    "humming_grouped": "humming_grouped",
    "triton": "triton",
    "cutlass": "cutlass",
    "deep_gemm": "deep_gemm",
    "batched_deep_gemm": "batched_deep_gemm",
    "torch_grouped": "torch_grouped",
    "sonic_moe": "sonic_moe",
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


def means_of(rows: Sequence[BenchRow]) -> str:
    """Sentences with the geometric mean of the best peer over moectl, by routing."""
    return "\n".join(line.rstrip() for line in _means(pivot_tables(rows)))


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


def as_cells(rows: Sequence[BenchRow]) -> str:
    """A line of text per case: moectl's time and launch, the best other one, their ratio, floor and check."""
    lines = [
        f"{'layer':44} {'M':>5} {OURS:>8} {'best':>8} {'which':15} {'ratio':>5} {'floor':>7} check  launch"
    ]
    every: list[float] = []
    for table in pivot_tables(rows):
        speedups = table.speedups(OURS, NO_PEERS)
        by_backend = {line.backend: line.rows for line in table.lines}
        for count in table.tokens:
            cells = {name: own[count] for name, own in by_backend.items() if count in own}
            lines.append(_cell(_short(table), count, cells, speedups.get(count)))
        if speedups:
            every += speedups.values()
            lines.append(f"{_short(table)}: geometric mean {geometric_mean(speedups.values()):.3f}")
        lines += [f"{_short(table)}: {name}: {why}" for name, why in table.refused.items()]
    if every:
        lines.append(
            f"all: {geometric_mean(every):.3f} over {len(every)}, ahead in {sum(r > 1 for r in every)}"
        )
    return "\n".join(lines)


def _short(table: PivotTable) -> str:
    """The layer, and the format of its tokens where kernels multiply 8-bit ones."""
    model, _, scheme, parallel, _ = table.key
    weight, _, activations = scheme.partition(", ")
    kind = activations.partition(" ")[0]
    tokens = f", {kind} tokens" if kind in ("fp8", "int8") else ""
    return f"{model} {'' if parallel == '1' else f'{parallel} '}{weight}{tokens}"


def _cell(layer: str, tokens: int, cells: Mapping[str, BenchRow], ratio: float | None) -> str:
    own = cells.get(OURS)
    others = {name: row for name, row in cells.items() if name not in (OURS, *NO_PEERS)}
    timed = {name: row.median_us for name, row in others.items() if row.median_us is not None}
    best = min(timed, key=lambda name: timed[name], default="")
    floor = next((row.floor_us for row in cells.values() if row.floor_us), None)
    bad = [f"{name} {row.reason}" for name, row in cells.items() if row.failed]
    noisy = [f"{name} noisy" for name, row in cells.items() if row.noisy]
    said = "; ".join(text[:90] for text in (*bad, *noisy)) or "ok"
    return (
        f"{layer[:44]:44} {tokens:5} {_time(own):>8} {_time(others.get(best)):>8} {best:15} "
        f"{_ratio(ratio):>5} {number(floor):>7} {said}  {own.tactic if own else ''}"
    )


def as_published(rows: Sequence[BenchRow]) -> str:
    """One table of all layers, as documents have it: times, the roofline and its share, and ratios."""
    tables = pivot_tables(rows)
    tokens = sorted({count for table in tables for count in table.tokens})
    lines = [
        _line("layer", (*(f"M={m}" if m == tokens[0] else str(m) for m in tokens), "mean")),
        _line("---", ("---:" for _ in (*tokens, ""))),
    ]
    for table in tables:
        by_backend = {line.backend: line.rows for line in table.lines}
        own = by_backend.pop(OURS, {})
        shares = {m: row.floor_percent for m, row in own.items() if row.floor_percent}
        speedups = table.speedups(OURS, NO_PEERS)
        mean = geometric_mean(speedups.values())
        lines.append(_line(f"{layer_title(table.key)}: {OURS}", (*(_time(own.get(m)) for m in tokens), "")))
        lines.append(_line("roofline", (*(number(table.roofline_us.get(m)) for m in tokens), "")))
        lines.append(
            _line("of roofline", (*(f"{shares[m]:.0f}%" if m in shares else "-" for m in tokens), ""))
        )
        for name, times in by_backend.items():
            lines.append(_line(name, (*(_time(times.get(m)) for m in tokens), "")))
        ratios = (_ratio(speedups.get(m)) for m in tokens)
        lines.append(_line(f"best of them over {OURS}", (*ratios, _ratio(mean))))
    return "\n".join(lines)


def as_ratios(rows: Sequence[BenchRow]) -> str:
    """One table with a line for each layer: numbers of tokens, moectl's time, the best peer's over it."""
    tables = pivot_tables(rows)
    width = max((len(table.tokens) for table in tables), default=0)
    lines = [_line("layer", (*[""] * width, "mean")), _line("---", ["---:"] * (width + 1))]
    for table in tables:
        own = next((line.rows for line in table.lines if line.backend == OURS), {})
        speedups = table.speedups(OURS, NO_PEERS)
        cells = [f"M={m}: {_time(own.get(m))} ({_ratio(speedups.get(m))})" for m in table.tokens]
        blank = ["-"] * (width - len(cells))
        lines.append(_line(_short(table), (*cells, *blank, _ratio(geometric_mean(speedups.values())))))
    return "\n".join(lines)

"""Plots of rows: an image per model with latency over tokens, and times relative to one backend."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Unavailable, UsageError, install_hint
from ..files.atomic import write_file
from ..kernels.registry import REFERENCES
from .bench_rows import BenchRow
from .engine_pick import EnginePick, engine_picks, engine_words
from .pivot import PivotTable, TableKey, geometric_mean, layer_title, pivot_tables, table_key
from .row_tables import machine_line

SUFFIXES = (".svg", ".png")
ROOFLINE = "roofline"

STYLES: Mapping[str, tuple[str, str]] = {
    "moectl": ("#0072B2", "o"),
    "moectl_marlin": ("#003B5C", "P"),
    "triton_kernels": ("#D55E00", "s"),
    "humming": ("#009E73", "^"),
    "marlin": ("#CC79A7", "D"),
    "flashinfer_cutlass": ("#E69F00", "v"),
    "flashinfer_trtllm": ("#B8860B", "<"),
    "torch": ("#7F7F7F", "x"),
    "emulation": ("#A6A6A6", "+"),
}
"""Colour and marker by backend, the same in every image: after Okabe and Ito, for the colour-blind."""

OTHER_STYLES = (("#56B4E9", ">"), ("#332288", "h"), ("#882255", "p"), ("#117733", "*"), ("#44AA99", "X"))
"""Those of backends that `STYLES` lacks, in alphabetical order."""

WIDEST_RATIO = 4.0
"""Upper end of the axis of relative times; slower backends are beyond it."""

MOST_COLUMNS = 3
"""Most routings side by side; further ones are below."""

MOST_PANELS, MOST_COUNTS, MOST_LINES = 36, 300, 200
"""Most layers and routings that are drawn, and of all of these together numbers of tokens and backends."""

NEAREST_LABELS = 0.33
"""Least distance between the middles of labels of the axis of tokens, in inches."""

Styles = Mapping[str, tuple[str, str]]


def check_plot(path: Path) -> None:
    """Raises UsageError for a suffix other than `SUFFIXES`, and Unavailable without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"the suffix of {path} is not that of an image, expected {' or '.join(SUFFIXES)}",
            hint="give --plot out.svg",
        )
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise Unavailable(
            f"a plot needs the package matplotlib: {error}", hint=install_hint("plot")
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


SETTINGS = {"svg.hashsalt": "moectl", "text.parse_math": False}
"""matplotlib's: the file is a function of the rows, and a dollar in a name is a dollar."""


def draw(path: Path, about: Mapping[str, Any], rows: Sequence[BenchRow]) -> list[Path]:
    """Writes an image per model, and returns where: `path`, or ``out-MODEL.svg`` for each of several models.

    Raises UsageError if no row has a time or there is more than can be seen, and what `check_plot` raises.
    """
    pyplot = _pyplot()
    models: dict[str, list[BenchRow]] = {}
    for row in rows:
        if row.timed:
            models.setdefault(row.model, []).append(row)
    if not models:
        raise UsageError("there is nothing to plot: no row has a time")
    _refuse_more_than_is_seen(models.values())
    kind = path.suffix.lower().lstrip(".")
    paths = _paths(path, list(models))
    for target, timed in zip(paths, models.values(), strict=True):
        picture = io.BytesIO()
        with pyplot.rc_context(SETTINGS):
            sheet = figure(pyplot, about, timed)
            sheet.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=130)
            pyplot.close(sheet)
        write_file(target, picture.getvalue())
    return paths


def _refuse_more_than_is_seen(models: Iterable[Sequence[BenchRow]]) -> None:
    keys: dict[TableKey, tuple[set[int], set[str]]] = {}
    for row in itertools.chain.from_iterable(models):
        tokens, backends = keys.setdefault(table_key(row), (set(), set()))
        tokens.add(row.tokens)
        backends.add(row.backend)
    counts = sum(len(it[0]) for it in keys.values())
    for what, found, most, narrow in (
        ("layers and routings", len(keys), MOST_PANELS, "--model or --routing"),
        ("numbers of tokens of all layers", counts, MOST_COUNTS, "-m"),
        ("backends of all layers", sum(len(it[1]) for it in keys.values()), MOST_LINES, "--backend"),
    ):
        if found > most:
            raise UsageError(
                f"there are {found} {what} to plot, expected at most {most}",
                hint=f"plot fewer of the rows, with {narrow}",
            )


def _paths(path: Path, models: Sequence[str]) -> list[Path]:
    """Where each model's image goes; names of models are not trusted to be those of files."""
    if len(models) == 1:
        return [path]
    names: dict[str, None] = {}
    for model in models:
        name = plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:80]
        while name in names:
            name = f"{plain}-{len(names)}"
        names[name] = None
    return [path.with_name(f"{path.stem}-{name}{path.suffix}") for name in names]


def figure(pyplot: Any, about: Mapping[str, Any], rows: Sequence[BenchRow]) -> Any:
    """The figure of one model's timed rows: latency and relative times for each layer and routing.

    One routing has its two panels side by side; several have a column each, with common axes.
    """
    tables = pivot_tables(rows)
    picks = engine_picks(rows, about)
    styles = _styles(tables)
    baseline = _baseline(tables, picks)
    top = _highest_ratio(tables, baseline)
    panels, sheet = _panels(pyplot, len(tables))
    for (latency, relative), table in zip(panels, tables, strict=False):
        _draw_latency(latency, table, styles)
        _draw_relative(relative, table, baseline, styles, top)
    for axes in (axes for pair in panels[len(tables) :] for axes in pair):
        axes.remove()
    layers = list(dict.fromkeys(layer_title(table.key) for table in tables))
    for (latency, relative), table in zip(panels, tables, strict=False):
        layer = f"{layer_title(table.key)}\n" if len(layers) > 1 else ""
        latency.set_title(f"{layer}{table.key[-1]} routing", fontsize=10)
        mean = geometric_mean(table.speedups(baseline).values())
        speedup = f"speed-up of {baseline} over the best other: {mean:.2f}x" if mean else ""
        relative.set_title(speedup, fontsize=9)
        relative.set_xlabel("tokens (M)")
        beside = latency.get_subplotspec().rowspan == relative.get_subplotspec().rowspan
        if beside:
            latency.set_xlabel("tokens (M)")
        if beside or latency.get_subplotspec().colspan.start == 0:
            latency.set_ylabel("latency per MoE layer (µs)")
            relative.set_ylabel(f"time relative to {baseline}")
    head = layers[0] if len(layers) == 1 else rows[0].model
    sheet.suptitle(f"{head}\n{machine_line(about, rows)}", fontsize=11)
    _draw_legend(sheet, tables, picks, styles)
    return sheet


def _panels(pyplot: Any, count: int) -> tuple[list[tuple[Any, Any]], Any]:
    """Pairs of axes, at least `count`, and their figure."""
    if count == 1:
        sheet, grid = pyplot.subplots(1, 2, figsize=(10.5, 4.8), squeeze=False, layout="constrained")
        return [(grid[0][0], grid[0][1])], sheet
    across = min(MOST_COLUMNS, count)
    down = -(-count // across)
    size = (4.2 * across, 6.4 * down + 1.0)
    sheet, grid = pyplot.subplots(
        2 * down, across, figsize=size, squeeze=False, sharey="row", layout="constrained"
    )
    return [(grid[2 * i][j], grid[2 * i + 1][j]) for i in range(down) for j in range(across)], sheet


def _styles(tables: Sequence[PivotTable]) -> Styles:
    """Colour and marker by backend, the fastest first."""
    names = list(dict.fromkeys(line.backend for table in tables for line in table.lines))
    others = sorted(name for name in names if name not in STYLES)
    spare = {name: OTHER_STYLES[i % len(OTHER_STYLES)] for i, name in enumerate(others)}
    return {name: STYLES.get(name) or spare[name] for name in names}


def _baseline(tables: Sequence[PivotTable], picks: Mapping[TableKey, EnginePick]) -> str:
    """The backend to which times are relative: moectl's, else what the engine picks, else the fastest."""
    picked = [pick.backend for pick in picks.values()]
    ranked = [line.backend for table in tables for line in table.lines]
    common = [name for name in ("moectl", *picked, *ranked) if all(name in table.times for table in tables)]
    return next((name for name in common if name not in REFERENCES), ranked[0])


def _highest_ratio(tables: Sequence[PivotTable], baseline: str) -> float:
    """The end of the axis of relative times, with some room: at most `WIDEST_RATIO`."""
    ratios = [
        us / table.times[baseline][tokens]
        for table in tables
        for name, times in table.times.items()
        for tokens, us in times.items()
        if name not in REFERENCES and tokens in table.times.get(baseline, {})
    ]
    return min(max(1.08 * max(ratios, default=1.0), 1.2), WIDEST_RATIO)


def _draw_latency(axes: Any, table: PivotTable, styles: Styles) -> None:
    """Median and quartiles over tokens, both logarithmic; the roofline is dashed."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for backend, times in table.times.items():
        _draw_line(axes, table, backend, dict.fromkeys(times, 1.0), styles)
    counts = sorted(table.roofline_us)
    axes.plot(counts, [table.roofline_us[n] for n in counts], "--", color="black", lw=1, zorder=1)
    axes.set(xscale="log", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
    _mark_tokens(axes, table.tokens)


def _draw_relative(axes: Any, table: PivotTable, baseline: str, styles: Styles, top: float) -> None:
    """Times in units of the baseline's, on a linear axis up to `top`; without references."""
    base = table.times.get(baseline, {})
    shown = [name for name in table.times if name not in REFERENCES or name == baseline]
    for backend in shown:
        _draw_line(axes, table, backend, base, styles)
    counts = [n for n in sorted(table.roofline_us) if n in base]
    axes.plot(counts, [table.roofline_us[n] / base[n] for n in counts], "--", color="black", lw=1, zorder=1)
    axes.set(xscale="log", ylim=(0, top))
    _mark_tokens(axes, table.tokens)


def _draw_line(axes: Any, table: PivotTable, backend: str, unit: Mapping[int, float], styles: Styles) -> None:
    """A backend's medians and quartiles, in units by tokens."""
    rows = next(line.rows for line in table.lines if line.backend == backend)
    counts = [n for n in sorted(table.times[backend]) if n in unit]
    us = [table.times[backend][n] for n in counts]
    low = [max(0.0, y - (rows[n].q1_us or y)) / unit[n] for n, y in zip(counts, us, strict=True)]
    high = [max(0.0, (rows[n].q3_us or y) - y) / unit[n] for n, y in zip(counts, us, strict=True)]
    color, marker = styles[backend]
    own = backend.startswith("moectl")
    axes.errorbar(
        counts,
        [y / unit[n] for n, y in zip(counts, us, strict=True)],
        [low, high],
        color=color,
        marker=marker,
        ms=5,
        capsize=2,
        lw=2.2 if own else 1.4,
        zorder=3 if own else 2,
    )


def _mark_tokens(axes: Any, counts: Sequence[int]) -> None:
    """A tick at each number of tokens, with labels as far as there is room, the last one first."""
    axes.minorticks_off()
    span = math.log2(max(counts) / min(counts)) or 1.0
    # The width of the axis without what is beside it, in inches.
    nearest = NEAREST_LABELS / (axes.figure.get_figwidth() / axes.get_gridspec().ncols - 0.7)
    labelled: list[int] = []
    for n in sorted(counts, reverse=True):
        if not labelled or math.log2(labelled[-1] / n) / span >= nearest:
            labelled.append(n)
    axes.set_xticks(counts, [str(n) if n in labelled else "" for n in counts], fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(alpha=0.25)


def _draw_legend(
    sheet: Any, tables: Sequence[PivotTable], picks: Mapping[TableKey, EnginePick], styles: Styles
) -> None:
    """One legend for all panels, below them; it names what the engine picks."""
    from matplotlib.lines import Line2D

    picked = {pick.backend for pick in picks.values()}
    handles = []
    for backend, (color, marker) in styles.items():
        words = f"{backend} (picked by {engine_words()})" if backend in picked else backend
        handles.append(Line2D([], [], color=color, marker=marker, ms=6, lw=2, label=words))
    if any(table.roofline_us for table in tables):
        handles.append(Line2D([], [], color="black", ls="--", lw=1, label=ROOFLINE))
    sheet.legend(
        handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=9, frameon=False
    )

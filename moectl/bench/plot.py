"""Plots of rows: latency over tokens and the roofline, as an image file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Unavailable, UsageError
from ..files.atomic import write_file
from .bench_rows import BenchRow
from .pivot import TableKey, table_key, title

SUFFIXES = (".svg", ".png")
ROOFLINE = "roofline"


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
            f"a plot needs the package matplotlib: {error}", hint="pip install 'moectl[plot]'"
        ) from error
    matplotlib.use("Agg")
    # Makes the file a function of the rows.
    matplotlib.rcParams["svg.hashsalt"] = "moectl"
    from matplotlib import pyplot

    return pyplot


def figures(rows: Sequence[BenchRow]) -> dict[TableKey, list[BenchRow]]:
    """Timed rows by figure."""
    rows_of: dict[TableKey, list[BenchRow]] = {}
    for row in rows:
        if row.timed:
            rows_of.setdefault(table_key(row), []).append(row)
    return rows_of


def lines(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """Rows by backend, in ascending order of tokens."""
    rows_of: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=lambda row: row.tokens):
        rows_of.setdefault(row.backend, []).append(row)
    return dict(sorted(rows_of.items()))


def draw(path: Path, about: Mapping[str, Any], rows: Sequence[BenchRow]) -> None:
    """Writes an image with two panels per figure: latency over tokens, and the roofline.

    Error bars are the quartiles; dashed lines are roofline times and rooflines. Raises UsageError if no row
    has a time, and what `check_plot` raises.
    """
    pyplot = _pyplot()
    rows_of = figures(rows)
    if not rows_of:
        raise UsageError("there is nothing to plot: no row has a time")
    sheet, axes = pyplot.subplots(len(rows_of), 2, figsize=(12, 4 * len(rows_of)), squeeze=False)
    names = sorted({row.backend for figure_rows in rows_of.values() for row in figure_rows})
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
    for (figure, figure_rows), (left, right) in zip(rows_of.items(), axes, strict=True):
        _latency(left, title(figure), figure_rows, colors)
        _roofline(right, about, figure_rows, colors)
    device = about.get("device", "")
    sheet.suptitle(f"{device}, {about.get('caches', '')} caches".strip(", "), fontsize=9)
    sheet.tight_layout()
    picture, kind = io.BytesIO(), path.suffix.lower().lstrip(".")
    sheet.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=130)
    pyplot.close(sheet)
    write_file(path, picture.getvalue())


def _latency(axes: Any, name: str, rows: Sequence[BenchRow], colors: Mapping[str, str]) -> None:
    for backend, backend_rows in lines(rows).items():
        x, y = [row.tokens for row in backend_rows], [row.median_us for row in backend_rows]
        low = [max(0.0, (row.median_us or 0) - (row.q1_us or 0)) for row in backend_rows]
        high = [max(0.0, (row.q3_us or 0) - (row.median_us or 0)) for row in backend_rows]
        axes.errorbar(x, y, [low, high], marker="o", ms=4, capsize=2, label=backend, color=colors[backend])
    roofline = {row.tokens: row.floor_us for row in rows}
    counts = sorted(roofline)
    axes.plot(counts, [roofline[n] for n in counts], "--", color="gray", label=ROOFLINE)
    axes.set(xscale="log", yscale="log", xlabel="tokens (M)", ylabel="latency per MoE layer (us)", title=name)
    axes.set_xticks(counts, [str(n) for n in counts], fontsize=8)
    axes.minorticks_off()
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _roofline(
    axes: Any, about: Mapping[str, Any], rows: Sequence[BenchRow], colors: Mapping[str, str]
) -> None:
    points = [row for row in rows if row.bytes and row.flops]
    for backend, backend_rows in lines(points).items():
        x = [(row.flops or 0) / (row.bytes or 1) for row in backend_rows]
        y = [row.tflop_per_s for row in backend_rows]
        axes.plot(x, y, "o-", ms=4, label=backend, color=colors[backend])
    rates = about.get("rates")
    if isinstance(rates, Mapping) and points:
        intensity = [(row.flops or 0) / (row.bytes or 1) for row in points]
        ridge = rates["flops"] / rates["bandwidth"]
        ends = sorted({min(intensity) / 2, ridge, max(*intensity, ridge) * 2})
        roof = [min(x * rates["bandwidth"], rates["flops"]) / 1e12 for x in ends]
        axes.plot(ends, roof, "--", color="gray", label=f"{rates['source']} rates")
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="TFLOP/s")
    axes.set_title("roofline", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)

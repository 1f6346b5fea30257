"""Plots of rows: latency over tokens and the roofline, as an image file or as text."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Unavailable, UsageError
from ..files.atomic import write_file
from .bench_rows import BenchRow

SUFFIXES = (".svg", ".png")
Figure = tuple[str, str, str, str, str]
"""Model, layers, scheme, routing and parallel: the subject of one pair of panels."""

WIDTH, HEIGHT = 64, 16
"""Columns and lines of a text plot."""

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


def figures(rows: Sequence[BenchRow]) -> dict[Figure, list[BenchRow]]:
    """Timed rows by figure."""
    rows_of: dict[Figure, list[BenchRow]] = {}
    for row in rows:
        if row.timed:
            key = (row.model, row.layers, row.scheme, row.routing, row.parallel)
            rows_of.setdefault(key, []).append(row)
    return rows_of


def title(figure: Figure) -> str:
    """The title of a figure."""
    model, layers, scheme, routing, parallel = figure
    where = "" if layers == "-" else f" layers {layers}"
    sharding = "" if parallel == "1" else f", {parallel}"
    return f"{model}{where}, {scheme}, {routing}{sharding}"


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


def text_plots(rows: Sequence[BenchRow]) -> str:
    """Latency over tokens as text, both axes logarithmic: a letter per backend, dots for the roofline.

    Figures with a single number of tokens are skipped; empty if none remains.
    """
    plots = [
        _text_plot(title(figure), figure_rows)
        for figure, figure_rows in figures(rows).items()
        if len({row.tokens for row in figure_rows}) > 1
    ]
    return "\n\n".join(plots)


def _text_plot(name: str, rows: Sequence[BenchRow]) -> str:
    letters = _letters(list(lines(rows)))
    points = [(row.tokens, row.floor_us, ".") for row in rows if row.floor_us]
    points += [(row.tokens, row.median_us, letters[row.backend]) for row in rows if row.median_us]
    xs, ys = [math.log(x) for x, _, _ in points], [math.log(y) for _, y, _ in points if y]
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for (_, us, letter), x in zip(points, xs, strict=True):
        column = round((x - min(xs)) / (max(xs) - min(xs)) * (WIDTH - 1))
        line = round((math.log(us or 1) - min(ys)) / max(max(ys) - min(ys), 1e-9) * (HEIGHT - 1))
        characters = grid[HEIGHT - 1 - line]
        characters[column] = letter if characters[column] in (" ", ".", letter) else "*"
    most, least = (f"{math.exp(y):.4g} us" for y in (max(ys), min(ys)))
    margin = max(len(most), len(least))
    labels = [most, *[""] * (HEIGHT - 2), least]
    drawn = [f"{label:>{margin}} |{''.join(line).rstrip()}" for label, line in zip(labels, grid, strict=True)]
    counts = sorted({row.tokens for row in rows})
    below = f"{'':>{margin}} +{'-' * WIDTH}"
    ends = f"{'':>{margin}}  M={counts[0]}{f'M={counts[-1]}':>{WIDTH - len(str(counts[0])) - 2}}"
    legend = ", ".join(
        [*(f"{letter} {backend}" for backend, letter in letters.items()), f". {ROOFLINE}", "* several"]
    )
    return "\n".join([name, *drawn, below, ends, f"{'':>{margin}}  {legend}"])


def _letters(backends: Sequence[str]) -> dict[str, str]:
    """A letter per backend: the first free one of its name, lower case before upper case."""
    letters: dict[str, str] = {}
    for name in backends:
        own = [c for c in name if c.isalpha()]
        spare = list("abcdefghijklmnopqrstuvwxyz")
        choices = [*own, *(c.upper() for c in own), *spare]
        letters[name] = next((c for c in choices if c not in letters.values()), "?")
    return letters

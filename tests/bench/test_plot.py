"""Plots of rows: what the figures show, that nothing covers anything, and the files."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from moectl.bench import plot
from moectl.bench.read_rows import read_rows
from moectl.errors import Unavailable, UsageError
from support.bench_rows import FAILED, MACHINE, row_of, timed

RECORDED = read_rows(Path(__file__).resolve().parents[2] / "docs" / "bench_h200.jsonl")
MODELS = sorted({row.model for row in RECORDED.rows})


@pytest.fixture(scope="module")
def pyplot():
    pytest.importorskip("matplotlib")
    found = plot._pyplot()
    yield found
    found.close("all")


SHEETS = {}


def drawn(pyplot, model, *, routings=None):
    """The figure of a model's recorded rows, which tests only look at."""
    key = model, *(routings or ())
    if key not in SHEETS:
        chosen = [r for r in RECORDED.rows if r.model == model and r.timed]
        chosen = [r for r in chosen if not routings or r.routing in routings]
        SHEETS[key] = plot.figure(pyplot, RECORDED.about, chosen)
        SHEETS[key].canvas.draw()
    return SHEETS[key]


def panels(sheet, scale):
    return [axes for axes in sheet.axes if axes.get_yscale() == scale]


@pytest.mark.parametrize("routings", [None, ["uniform"]])
@pytest.mark.parametrize("model", MODELS)
def test_each_layer_has_latencies_and_ratios(pyplot, model, routings):
    sheet = drawn(pyplot, model, routings=routings)
    count = len(routings or RECORDED.about["settings"]["routings"])
    latency, relative = panels(sheet, "log"), panels(sheet, "linear")
    assert len(latency) == len(relative) == count
    assert {axes.get_xscale() for axes in sheet.axes} == {"log"}
    assert latency[0].get_ylabel() == "latency per MoE layer (µs)"
    assert relative[0].get_ylabel() == "time relative to moectl"
    assert all(axes.get_xlabel() == "tokens (M)" for axes in relative)
    titles = [axes.get_title() for axes in latency]
    assert titles == [f"{name} routing" for name in routings or RECORDED.about["settings"]["routings"]]
    assert all(
        re.match(r"speed-up of moectl over the best other: 1\.\d\dx$", axes.get_title()) for axes in relative
    )
    head = sheet.get_suptitle()
    assert head.startswith(f"{model}, ") and "16-bit activations\nNVIDIA H200, torch" in head


def test_ratios_are_those_of_the_rows(pyplot):
    sheet = drawn(pyplot, "gpt-oss-120b", routings=["uniform"])
    (axes,) = panels(sheet, "linear")
    color, _ = plot.STYLES["triton_kernels"]
    (line,) = [
        line
        for line in axes.lines
        if line.get_color() == color and len(line.get_xdata()) > 1 and line.get_marker() == "s"
    ]
    by = {
        (r.backend, r.tokens): r for r in RECORDED.rows if (r.model, r.routing) == ("gpt-oss-120b", "uniform")
    }
    ratios = [by["triton_kernels", n].median_us / by["moectl", n].median_us for n in line.get_xdata()]
    assert list(line.get_xdata()) == [1, 4, 16, 64, 256, 1024, 4096, 8192]
    assert list(line.get_ydata()) == pytest.approx(ratios) and axes.get_ylim()[0] == 0
    assert max(ratios) < axes.get_ylim()[1] <= plot.WIDEST_RATIO
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert len(dashed) == 1 and max(dashed[0].get_ydata()) < 1


@pytest.mark.parametrize("routings", [None, ["uniform"]])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_covers_anything(pyplot, model, routings):
    """The title, the legend, and each panel with its labels are apart, and inside the picture."""
    sheet = drawn(pyplot, model, routings=routings)
    renderer = sheet.canvas.get_renderer()
    parts = {f"panel {i}": axes.get_tightbbox(renderer) for i, axes in enumerate(sheet.axes)}
    (legend,) = sheet.legends
    parts |= {
        "legend": legend.get_window_extent(renderer),
        "title": sheet._suptitle.get_window_extent(renderer),
    }
    for (one, box), (other, beside) in itertools.combinations(parts.items(), 2):
        width = min(box.x1, beside.x1) - max(box.x0, beside.x0)
        height = min(box.y1, beside.y1) - max(box.y0, beside.y0)
        assert width <= 1 or height <= 1, (one, other)
    for name, box in parts.items():
        assert box.x0 >= -1 and box.x1 <= sheet.bbox.x1 + 1 and box.y1 <= sheet.bbox.y1 + 1, name
    for axes in sheet.axes:
        labels = [t.get_window_extent(renderer) for t in axes.get_xticklabels() if t.get_text()]
        assert all(
            left.x1 < right.x0 for left, right in itertools.pairwise(sorted(labels, key=lambda b: b.x0))
        )


def test_the_legend_names_backends_once_and_what_the_engine_picks(pyplot):
    (legend,) = drawn(pyplot, "gpt-oss-20b").legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words[0] == "moectl" and words[-1] == "roofline" and len(words) == len(set(words)) == 6
    assert [word for word in words if "picked" in word] == ["triton_kernels (picked by vLLM 0.33.0)"]


def test_a_backend_looks_the_same_everywhere_and_like_no_other(pyplot):
    colors = [color for color, _ in (*plot.STYLES.values(), *plot.OTHER_STYLES)]
    markers = [marker for _, marker in (*plot.STYLES.values(), *plot.OTHER_STYLES)]
    assert len(set(colors)) == len(colors) and len(set(markers)) == len(markers)
    for model in MODELS:
        (legend,) = drawn(pyplot, model).legends
        for line, text in zip(legend.get_lines(), legend.get_texts(), strict=True):
            name = text.get_text().partition(" ")[0]
            if name != plot.ROOFLINE:
                assert (line.get_color(), line.get_marker()) == plot.STYLES[name]


def test_references_are_not_in_the_ratios(pyplot):
    rows = [timed(10, 1, backend="moectl", tokens=n) for n in (1, 8)]
    rows += [timed(9000, 1, backend="torch", tokens=n) for n in (1, 8)]
    sheet = plot.figure(pyplot, MACHINE, rows)
    (latency,), (relative,) = panels(sheet, "log"), panels(sheet, "linear")
    assert len(latency.containers) == 2 and len(relative.containers) == 1
    assert relative.get_ylim() == (0, 1.2) and relative.get_title() == ""


def test_what_nothing_else_is_compared_with_is_the_measure(pyplot):
    rows = [timed(10 * (k + 1), 1, backend=name, tokens=1) for k, name in enumerate(("marlin", "new one"))]
    sheet = plot.figure(pyplot, MACHINE, rows)
    assert panels(sheet, "linear")[0].get_ylabel() == "time relative to marlin"
    only = plot.figure(pyplot, MACHINE, [timed(10, 1, backend="torch", tokens=4)])
    assert panels(only, "linear")[0].get_ylabel() == "time relative to torch"


def test_four_routings_take_two_rows_of_panels(pyplot):
    rows = [timed(10, 1, backend="moectl", tokens=n, routing=f"zipf:{i}") for n in (1, 8) for i in range(4)]
    sheet = plot.figure(pyplot, MACHINE, rows)
    assert len(sheet.axes) == 8 and [axes.get_title() for axes in panels(sheet, "log")] == [
        f"zipf:{i} routing" for i in range(4)
    ]


def test_each_model_has_an_image_of_its_own(pyplot, tmp_path):
    rows = [
        row_of(),
        replace(row_of(), tokens=64),
        row_of(model="a/../b c"),
        row_of(model="a.....b-c"),
        FAILED,
    ]
    for kind in ("svg", "png"):
        path = tmp_path / f"out.{kind}"
        plot.check_plot(path)
        paths = plot.draw(path, MACHINE, rows)
        assert [p.name for p in paths] == [f"out-{m}.{kind}" for m in ("tiny", "a-..-b-c", "a.....b-c")]
        assert {p.name for p in tmp_path.glob(f"*.{kind}")} == {p.name for p in paths}
    assert (tmp_path / "out-tiny.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    alike = [row_of(model="a b"), row_of(model="a-b")]
    assert [p.name for p in plot.draw(tmp_path / "x.svg", MACHINE, alike)] == ["x-a-b.svg", "x-a-b-1.svg"]


def test_an_image_is_a_function_of_the_rows(pyplot, tmp_path):
    for name in ("a.svg", "b.svg"):
        assert plot.draw(tmp_path / name, MACHINE, [row_of(), FAILED]) == [tmp_path / name]
    text = (tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    # Words are outlines, and are named in comments.
    for word in ("torch", "roofline", "tokens \\(M\\)", "tiny layers 0-3", "uniform routing"):
        assert re.search(f"<!-- [^>]*{word}", text), word
    assert (tmp_path / "b.svg").read_text() == text
    plot.draw(tmp_path / "d.svg", MACHINE, [row_of(model=r"$\frac{x$", backend="a$b$c")])
    assert "a$b$c" in (tmp_path / "d.svg").read_text(), "no formula"
    with pytest.raises(UsageError, match="no row has a time"):
        plot.draw(tmp_path / "c.svg", MACHINE, [FAILED])


def test_a_plot_without_matplotlib_or_of_another_kind_is_refused(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="is not that of an image"):
        plot.check_plot(tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match=r"needs the package matplotlib.*pip install 'moectl\[plot\]'"):
        plot.check_plot(tmp_path / "a.svg")


@pytest.mark.parametrize(
    ("change", "what", "narrow"),
    [
        (lambda n: {"routing": f"hot:{n}:0.9"}, "37 layers and routings", "--routing"),
        (lambda n: {"model": f"model-{n}"}, "37 layers and routings", "--model"),
        (lambda n: {"tokens": n + 1}, "301 numbers of tokens of all layers", "-m"),
        (lambda n: {"backend": f"kernel-{n}"}, "201 backends of all layers", "--backend"),
    ],
)
def test_more_than_can_be_seen_is_refused_before_it_is_drawn(change, what, narrow, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot, "figure", lambda *_: pytest.fail("it draws"))
    row = next(row for row in RECORDED.rows if row.timed)
    rows = [replace(row, **change(number)) for number in range(int(what.split()[0]))]
    with pytest.raises(UsageError, match=f"there are {what} to plot, expected at most") as refused:
        plot.draw(tmp_path / "out.svg", RECORDED.about, rows)
    assert narrow in refused.value.hint and not list(tmp_path.iterdir())

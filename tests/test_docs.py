"""Outputs in the documents are those that the commands print."""

import html
import importlib.util
import json
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from statistics import geometric_mean

import pytest

ROOT = Path(__file__).resolve().parents[1]


def refresher():
    path = str(ROOT / "scripts" / "refresh_docs")
    loader = SourceFileLoader("refresh_docs", path)
    spec = importlib.util.spec_from_loader("refresh_docs", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


REFRESHER = refresher()
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", REFRESHER.DOCUMENTS, ids=lambda path: path.name)
def test_outputs_are_those_of_today(document):
    text = document.read_text(encoding="utf-8")
    assert refresher().refreshed(text) == text, "run scripts/refresh_docs"


def test_tables_of_rows_are_made_of_the_rows_or_say_that_there_are_none(tmp_path, monkeypatch):
    module = refresher()
    text = "before\n<!-- rows of bench_h200.jsonl -->\nstale\n<!-- end of rows -->\nafter\n"
    first, table, last = re.split(r"<!-- .* -->\n", module.refreshed(text))
    assert (first, last) == ("before\n", "after\n") and "stale" not in table
    assert "| marlin | 78.2 | 244 |" in table and "- NVIDIA H200, driver" in table
    assert module.refreshed(text) == module.refreshed(module.refreshed(text))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert "Not measured yet." in module.refreshed(text)


def times_of(name: str) -> dict[tuple[str, str, str, int], float]:
    """Microseconds by model, scheme without the activations, backend and tokens, of a file of rows."""
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "row" and row["ok"]]
    return {
        (row["model"], row["scheme"].partition(",")[0], row["backend"], row["tokens"]): row["median_us"]
        for row in rows
    }


def words_of(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def test_the_ceiling_of_int8_tokens_is_that_of_the_rows():
    """Humming's times beside those of kernels that multiply as much, before moectl had any for INT8."""
    times, page = times_of("bench_int8_tokens_before_h200.jsonl"), words_of("kernels.md")

    def said(model: str, scheme: str, backend: str, tokens: tuple[int, ...]) -> str:
        *first, last = (f"{times[model, scheme, backend, m]:.0f}" for m in tokens)
        return f"{', '.join(first)} and {last}"

    many = (1024, 4096, 8192)
    for model in ("qwen3-235b", "mixtral-8x7b"):
        assert said(model, "fp8 per channel", "moectl", many) in page
        assert said(model, "int8 per channel", "humming", many) in page
    for backend in ("humming", "moectl"):
        assert said("qwen3-235b", "int4 group 128", backend, (256, *many)) in page
    assert said("qwen3-235b", "fp8 block 128x128", "moectl", many) in page
    ratios = [
        times[model, "int8 per channel", "humming", m] / times[model, "fp8 per channel", "moectl", m]
        for model in ("qwen3-235b", "mixtral-8x7b")
        for m in many
    ]
    assert (
        f"{geometric_mean(ratios):.2f} times as long on average, {min(ratios):.2f} to {max(ratios):.2f}"
        in page
    )


def test_what_int8_tokens_bring_is_that_of_the_rows():
    times, page = times_of("bench_int8_tokens_h200.jsonl"), words_of("bench.md")
    own = ("int8 per channel", "moectl")
    cells = [(model, m) for model, *kind, m in times if tuple(kind) == own]
    ratio = {
        (model, m): times[model, "int8 per channel", "humming", m] / times[(model, *own, m)]
        for model, m in cells
    }
    ahead = sum(it > 1 for it in ratio.values())
    of_many = geometric_mean(it for (_, m), it in ratio.items() if m >= 1024)
    of_few = geometric_mean(it for (_, m), it in ratio.items() if m <= 256)
    assert f"ahead in {ahead} of {len(cells)} cells, from 1024 tokens on by {of_many:.2f} on average" in page
    assert f"near the roofline, and the mean is {of_few:.2f}" in page
    beside = geometric_mean(
        times[model, "int8 per channel", "moectl", m] / times[model, "fp8 per channel", "moectl", m]
        for model, m in cells
        if m >= 1024
    )
    assert f"INT8 takes {beside:.2f} times as long as FP8 per channel" in page


def test_what_int8_tokens_bring_to_int4_weights_is_that_of_the_rows():
    def times(name: str) -> dict[tuple[str, bool, str, int], float]:
        lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["kind"] == "row" and row["ok"]]
        return {
            (row["model"], "int8" in row["scheme"], row["backend"], row["tokens"]): row["median_us"]
            for row in rows
        }

    time = times("bench_int4_tokens_h200.jsonl")
    page = words_of("bench.md")
    cells = [(model, m) for model, int8, backend, m in time if int8 and backend == "moectl"]
    ratio = {
        (model, m): time[model, True, "humming", m] / time[model, True, "moectl", m] for model, m in cells
    }
    many = geometric_mean(it for (_, m), it in ratio.items() if m >= 1024)
    few = geometric_mean(it for (_, m), it in ratio.items() if m <= 256)
    ahead = sum(it > 1 for it in ratio.values())
    said = f"ahead in {ahead} of {len(cells)} cells, from 1024 tokens on by {many:.2f} on average"
    assert f"{said}, up to 256 by {few:.2f}." in page
    beside = {
        (model, m): time[model, False, "moectl", m] / time[model, True, "moectl", m] for model, m in cells
    }
    of_many = geometric_mean(it for (_, m), it in beside.items() if m >= 1024)
    assert f"INT8 tokens are {of_many:.2f} times as fast as 16-bit ones from 1024 tokens on" in page
    (model, _), least = min(beside.items(), key=lambda it: it[1])
    assert f"of {model}'s slices, they take up to {1 / least:.2f} times as long" in page
    three = [f"{time['qwen3-235b', True, 'moectl', m]:.0f}" for m in (1024, 4096, 8192)]
    assert f"take {three[0]}, {three[1]} and {three[2]} us" in words_of("kernels.md")


@pytest.mark.parametrize("picture", REFRESHER.PICTURES, ids=lambda path: path.name)
def test_pictures_of_terminals_are_those_of_today(picture):
    command, columns = REFRESHER.PICTURES[picture]
    now = REFRESHER.picture(command, columns)
    assert now == picture.read_text(encoding="utf-8"), "run scripts/refresh_docs"
    assert len(now) < 60_000 and "url(http" not in now
    words = "".join(html.unescape(text) for text in re.findall(r"<text [^>]*>([^<]*)<", now))
    assert command.split()[1] in words.replace("\xa0", " ").split()


def test_plots_say_what_the_rows_say(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = REFRESHER.plots(tmp_path)
    assert len(drawn) == 4
    for plot in drawn:
        kept = REFRESHER.PLOT.with_name(plot.name).read_text(encoding="utf-8")
        assert REFRESHER.words(plot.read_text(encoding="utf-8")) == REFRESHER.words(kept), (
            "run scripts/refresh_docs"
        )
        assert any("speed-up of moectl" in text for text in REFRESHER.words(kept))


def test_every_image_of_the_documents_is_shown():
    texts = "".join(path.read_text(encoding="utf-8") for path in (*DOCUMENTS, ROOT / "README.md"))
    for image in (ROOT / "docs" / "img").iterdir():
        assert f"img/{image.name})" in texts, image.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert target.startswith("http") or (document.parent / target).exists(), target

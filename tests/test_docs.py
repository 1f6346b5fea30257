"""Outputs in the documents are those that the commands print."""

import html
import importlib.util
import json
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path

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


@pytest.mark.parametrize("model", ["qwen3-235b", "mixtral-8x7b"])
def test_the_ceiling_of_int8_tokens_is_that_of_the_rows(model):
    """The best other library's time over moectl's and over the roofline, in a table of `kernels.md`."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    lines = (ROOT / "docs" / "bench_sm90_h200.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "row" and row["model"] == model]
    rows = [row for row in rows if row["scheme"].startswith("fp8 per channel") and row["ok"]]
    ratios = []
    for tokens in sorted({row["tokens"] for row in rows}):
        here = {row["backend"]: row for row in rows if row["tokens"] == tokens}
        own = here.pop("moectl")
        best = min(row["median_us"] for row in here.values())
        ratios.append((f"{best / own['median_us']:.2f}", f"{best / own['floor_us']:.2f}"))
    ours, roofline = (" | ".join(column) for column in zip(*ratios, strict=True))
    assert f"| {model}: best of the others over moectl | {ours} |\n" in page
    after = page.partition(f"| {model}: best of the others over moectl |")[2]
    assert after.splitlines()[1].strip() == f"| best of the others over the roofline | {roofline} |"


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

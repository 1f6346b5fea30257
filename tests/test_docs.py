"""Outputs in the documents are those that the commands print."""

import html
import importlib.util
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

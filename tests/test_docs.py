"""Outputs in the documents are those that the commands print."""

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


DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", refresher().DOCUMENTS, ids=lambda path: path.name)
def test_outputs_are_those_of_today(document):
    text = document.read_text(encoding="utf-8")
    assert refresher().refreshed(text) == text, "run scripts/refresh_docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert target.startswith("http") or (document.parent / target).exists(), target

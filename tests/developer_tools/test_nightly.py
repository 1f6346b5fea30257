"""`scripts/nightly` runs every search, and prints one table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.scripts import SCRIPTS, loaded


def ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "nightly"), *words])
    return loaded("nightly").main(), capsys.readouterr().out


def test_its_searches_are_the_scripts_that_break_things() -> None:
    found = {path.name for path in SCRIPTS.glob("break_*")}
    assert loaded("nightly").searches(1.0, 0).keys() == found and len(found) == 4


def test_a_table_of_cases_and_defects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    documents = {
        "break_readers": {"cases": 7, "defects": []},
        "break_bits": {"cases": {"a": 2, "b": 3}, "defects": [{"kind": "a"}]},
    }
    for name, document in documents.items():
        (scripts / name).write_text(
            f"import sys; assert '--json' in sys.argv; print({json.dumps(document)!r})"
        )
    (scripts / "break_writes").write_text("raise SystemExit('no')")
    monkeypatch.setattr(loaded("nightly"), "SCRIPTS", scripts)
    out = ("--out", str(tmp_path / "out"), "--seed", "5")
    code, text = ran(monkeypatch, capsys, "--only", "break_readers", *out)
    assert code == 0 and text.splitlines()[1].split()[:3] == ["break_readers", "7", "0"]
    code, text = ran(monkeypatch, capsys, "--only", "break_bits,break_writes", *out)
    assert code == 1 and text.splitlines()[1].split()[:3] == ["break_bits", "5", "1"]
    assert "break_writes     ended with 1 and without counts" in text
    assert (tmp_path / "out" / "break_writes.txt").read_text() == "no\n"


def test_a_search_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ran(monkeypatch, capsys, "--only", "break_glass")

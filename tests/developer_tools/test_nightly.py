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


def test_all_tests_are_run_with_those_that_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nightly, out = loaded("nightly"), ("--only", "slow_tests", "--out", str(tmp_path / "out"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--slow', action='store_true')\n"
    )
    tests = tmp_path / "test_one.py"
    tests.write_text(
        "import pytest\n"
        "def test_slow(pytestconfig):\n    assert pytestconfig.getoption('--slow')\n"
        "def test_skipped():\n    pytest.skip('no GPU')\n"
        "def test_wrong():\n    assert False\n"
    )
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    code, text = ran(monkeypatch, capsys, *out)
    assert code == 1 and text.splitlines()[1].split()[:3] == ["slow_tests", "2", "1"]
    assert "test_wrong" in (tmp_path / "out" / "slow_tests.txt").read_text()
    tests.write_text("def test_right():\n    pass\n")
    code, text = ran(monkeypatch, capsys, *out)
    assert code == 0 and text.splitlines()[1].split()[:3] == ["slow_tests", "1", "0"]
    (tmp_path / "conftest.py").write_text("raise SystemExit('no')")
    code, text = ran(monkeypatch, capsys, *out)
    assert code == 1 and "and without counts" in text


def test_a_share_of_the_searches_is_without_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nightly = loaded("nightly")
    monkeypatch.setattr(nightly, "searched", lambda name, options, out: (1, 0))
    monkeypatch.setattr(nightly, "tested", lambda out: (3, 0))
    whole = ran(monkeypatch, capsys, "--out", str(tmp_path))[1]
    share = ran(monkeypatch, capsys, "--out", str(tmp_path), "--share", "0.5")[1]
    assert whole.splitlines()[-1].split()[:3] == ["slow_tests", "3", "0"]
    assert len(whole.splitlines()) == len(share.splitlines()) + 1 and "slow_tests" not in share


def test_a_search_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ran(monkeypatch, capsys, "--only", "break_glass")

"""`scripts/test_pythons` tries moectl's core with every Python, and all of it with --all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from support.scripts import SCRIPTS, loaded

VERSIONS = ("3.9.2", "3.10.13", "3.12.1", "3.13.0")


def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> dict[str, bool]:
    """Whether each of `VERSIONS`, installed out of order, is told to run everything."""
    script = loaded("test_pythons")
    found = {".".join(version.split(".")[:2]): version for version in VERSIONS}
    asked: dict[str, bool] = {}

    def run(command: list[Any], *_: Any, **__: Any) -> str:
        assert "build" in command
        (Path(command[command.index("--out-dir") + 1]) / "moectl.whl").touch()
        return ""

    def check(version: str, python: Path, wheel: Path, log: Path, whole: bool) -> str:
        assert wheel.name == "moectl.whl" and python == Path(version) and log.parent == wheel.parent
        asked[version] = whole
        return version

    for name, value in {
        "UV": (Path(sys.executable), "", Path(sys.executable)),
        "CACHE": tmp_path,
        "MINORS": ("3.12", "3.9", "3.13", "3.10", "3.14"),
        "version_of": lambda python: "3.11.7",
        "installed": lambda minor: {found[minor]: Path(found[minor])} if minor in found else {},
        "run": run,
        "check": check,
    }.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["test_pythons", *words])
    assert script.main() == 0
    return asked


def test_each_runs_the_core_and_with_all_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs(monkeypatch, tmp_path) == dict.fromkeys(VERSIONS, False)
    assert "Python 3.14: not tried, none is installed here" in capsys.readouterr().out
    assert jobs(monkeypatch, tmp_path, "--all") == dict.fromkeys(VERSIONS, True)
    assert jobs(monkeypatch, tmp_path, "3.12") == {"3.12.1": False}


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_python_runs(whole: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = loaded("test_pythons")
    commands: list[list[str]] = []

    def run(command: list[Any], log: Path, cwd: Path = SCRIPTS, **_: str) -> str:
        commands.append([str(word) for word in command])
        assert (cwd == SCRIPTS) == (Path(command[0]).name not in ("moectl", "pytest"))
        return "12 passed in 1 s" if Path(command[0]).name == "pytest" else ""

    monkeypatch.setattr(script, "CACHE", tmp_path)
    monkeypatch.setattr(script, "run", run)
    # The environment is made where uv would have made it.
    (tmp_path / f"3.12.1-{script.pinned()}{'' if whole else '-core'}").mkdir()
    (tmp_path / f"3.12.1-{script.pinned()}{'' if whole else '-core'}" / "complete").touch()
    printed = script.check("3.12.1", Path("python3.12"), Path("moectl.whl"), tmp_path / "log", whole)
    assert "12 passed" in printed and ("quickstart" in printed) == whole
    names = [Path(words[0]).name for words in commands]
    started = [words[1] for words in commands if Path(words[0]).name == "moectl"]
    assert (started == [] and "quickstart" in names) if whole else {"explain", "convert"} <= {*started}
    tests = {word for word in commands[-1] if word.endswith(".py")}
    cli = {str(file) for file in SCRIPTS.parent.glob("tests/cli/**/test_*.py")}
    assert tests == cli if whole else tests == {str(SCRIPTS.parent / "tests" / "cli" / "test_options.py")}

"""`scripts/test_pythons` gives every Python quickstart or the tests of what it drives, and all with --all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.scripts import SCRIPTS, loaded

VERSIONS = ("3.9.2", "3.10.13", "3.12.1", "3.13.0")


class Job(NamedTuple):
    files: frozenset[str]
    quickstart: bool


def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> dict[str, Job]:
    """What each of `VERSIONS`, installed out of order, is told to run."""
    script = loaded("test_pythons")
    found = {".".join(version.split(".")[:2]): version for version in VERSIONS}
    asked: dict[str, Job] = {}

    def run(command: list[Any], *_: Any, **__: Any) -> str:
        assert "build" in command
        (Path(command[command.index("--out-dir") + 1]) / "moectl.whl").touch()
        return ""

    def check(version: str, python: Path, wheel: Path, log: Path, files: list[Path], quickstart: bool) -> str:
        assert wheel.name == "moectl.whl" and python == Path(version)
        names = [str(file.relative_to(SCRIPTS.parent)) for file in files]
        assert len(set(names)) == len(names)
        asked[version] = Job(frozenset(names), quickstart)
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


CLI = frozenset(
    str(file.relative_to(SCRIPTS.parent)) for file in SCRIPTS.parent.glob("tests/cli/**/test_*.py")
)


EVERY = frozenset({"tests/cli/test_options.py", "tests/cli/test_empty_values.py"})


def test_oldest_and_newest_run_quickstart_and_the_others_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driven, tested = Job(EVERY, True), Job(EVERY | {"tests/cli/test_pipeline.py"}, False)
    assert driven.files < tested.files < CLI
    asked = jobs(monkeypatch, tmp_path)
    assert asked == {"3.9.2": driven, "3.10.13": tested, "3.12.1": tested, "3.13.0": driven}
    assert "Python 3.14: not tried, none is installed here" in capsys.readouterr().out


def test_all_runs_everything_on_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = jobs(monkeypatch, tmp_path, "--all")
    assert asked == dict.fromkeys(VERSIONS, Job(CLI, True))


def test_one_python_is_oldest_and_newest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert jobs(monkeypatch, tmp_path, "3.12") == {"3.12.1": Job(EVERY, True)}

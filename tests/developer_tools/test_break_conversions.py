"""`scripts/break_conversions` races and kills conversions, and knows a wrong directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.scripts import SCRIPTS, loaded


def test_some_kills_leave_nothing_wrong() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "break_conversions", "--rounds", "0", "--every", "60"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "0 races" in done.stdout and done.stdout.endswith(" cases, 0 defects\n")


def test_a_directory_of_two_conversions_is_a_defect(tmp_path: Path) -> None:
    script = loaded("break_conversions")
    breaker = script.Breaker.__new__(script.Breaker)
    breaker.cases = breaker.defects = 0
    breaker.wanted = {"a": {"READY": b"a", "x": b"1"}, "b": {"READY": b"b", "y": b"2"}}
    breaker.wanted["unconvert"] = {"y": b"2"}
    breaker._accepted = lambda out: True
    for name, data in breaker.wanted["a"].items():
        (tmp_path / name).write_bytes(data)
    breaker._judge("one", tmp_path)
    (tmp_path / "progress.jsonl").write_bytes(b"")
    breaker._judge("one with a log", tmp_path)
    assert not breaker.defects
    (tmp_path / "y").write_bytes(b"2")
    breaker._judge("two", tmp_path)
    assert breaker.defects == 1
    (tmp_path / "READY").unlink()
    breaker._judge("two, not finished", tmp_path)
    assert breaker.defects == 1

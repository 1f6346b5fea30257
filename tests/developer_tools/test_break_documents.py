"""`scripts/break_documents` changes every kind of document, and knows a wrong answer."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from support.scripts import SCRIPTS, loaded


def test_some_changes_of_every_kind_find_nothing_wrong() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "break_documents", "--cases", "200", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.startswith("200 cases ") and done.stdout.endswith(" 0 defects\n")


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: "plain \u00b5s\n", ""),
        (lambda: "a\x1b[0m", "printed '\\x1b'"),
        (lambda: "a\u202eb\x85", "printed '\\x85\\u202e'"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero (test_break_documents.py"),
        (lambda: [][1], "IndexError"),
    ],
)
def test_a_wrong_answer_is_a_defect(read: object, said: str) -> None:
    assert loaded("break_documents").defect_of(read).startswith(said)


def test_an_answer_that_never_comes_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    script = loaded("break_documents")
    monkeypatch.setattr(script, "SECONDS", 1)

    def wait() -> str:
        while True:
            pass

    assert script.defect_of(wait) == "did not end within 1 s"


def test_changes_are_many_and_the_same_for_one_seed() -> None:
    script = loaded("break_documents")
    kind = script.Kind(b'{"rows": [{"us": 1.5, "name": "x"}], "n": 3}', lambda data: None, {})
    made = [script.changed(random.Random(number), kind) for number in range(300)]
    assert made == [script.changed(random.Random(number), kind) for number in range(300)]
    assert len(set(made)) > 200
    for part in (b"NaN", b"[[[[", b"\\ud800", b"\\u202e", b"unknown", b"e+308"):
        assert any(part in data for data in made), part

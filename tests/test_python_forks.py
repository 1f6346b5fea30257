"""Programs of tests that run in forks are what a new interpreter would make of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import python_forks

SHOWN = """
import os, sys
print(sys.argv, __name__, os.getcwd(), os.environ.get("GIVEN"), os.environ.get("HOME"), sys.stdin.read())
print("on stderr", file=sys.stderr)
"""


def test_arguments_streams_folder_and_environment_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(SHOWN)
    env = {"GIVEN": "here", "PATH": os.environ["PATH"]}
    for words in (("-c", SHOWN, "1", "a b"), (str(tmp_path / "script"), "2")):
        forked = python_forks.run(words, cwd=tmp_path, env=env)
        plain = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True,
        )  # fmt: skip
        assert (forked.returncode, forked.stdout, forked.stderr) == (0, plain.stdout, plain.stderr)
    assert "GIVEN" not in os.environ and Path.cwd() != tmp_path


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'the end')", 0, ""),
    ],
)
def test_how_it_ends_is_told(code: str, status: int, said: str) -> None:
    done = python_forks.run(["-c", code])
    assert done.returncode == status and done.stderr.endswith(said)
    assert done.stdout == ("the end\n" if "atexit" in code else "")


def test_what_takes_too_long_is_killed_and_others_go_on() -> None:
    with Path(os.devnull).open("w") as nothing:
        slow = python_forks.start(["-c", "import time; time.sleep(60)"], nothing, nothing)
    assert python_forks.run(["-c", "print('meanwhile')"]).stdout == "meanwhile\n"
    with pytest.raises(subprocess.TimeoutExpired):
        slow.wait(0.1)
    with pytest.raises(AssertionError, match="ended with 3"):
        python_forks.run(["-c", "raise SystemExit(3)"], check=True)


def test_commands_alone_are_imported_where_that_is_asked_for() -> None:
    code = "import sys; print('moectl.cli.main' in sys.modules, 'torch' in sys.modules)"
    assert python_forks.run(["-c", code], imported="commands").stdout == "True False\n"
    assert python_forks.run(["-c", code]).stdout == "True True\n"

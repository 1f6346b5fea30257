"""docs/environment.md: its commands run, and print what stands below them."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "environment.md").read_text()

COMMANDS = [
    (command, output)
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
"""Each command with what is printed below it; a line of three dots stands for any lines."""


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_print_what_is_shown(command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.invoking import moectl

    monkeypatch.setenv("MOECTL_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    program, *arguments = shlex.split(command)
    assert program == "moectl"
    done = moectl(*arguments, code=None if arguments == ["doctor"] else 0)
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", output, flags=re.MULTILINE)]
    if output:
        assert re.fullmatch("(?:.*\n)*".join(parts), done.stdout.lstrip("\n")), done.stdout
    assert done.code in (0, 1)


def test_the_document_has_commands_with_and_without_output() -> None:
    assert {bool(output) for _, output in COMMANDS} == {True, False}
    assert len(COMMANDS) >= 6

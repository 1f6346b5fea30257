"""Examples of the README and of pages about commands are run as they stand."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def console_lines(text):
    """Commands of ``console`` blocks, in order."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))


@pytest.mark.parametrize(("document", "least"), [("README.md", 10), ("docs/run.md", 5)])
def test_every_command_works(document, least, tmp_path, monkeypatch):
    from support.invoking import moectl

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECTL_OFFLINE", "1")
    monkeypatch.setenv("MOECTL_DEVICE", "cpu")
    text = (ROOT / document).read_text()
    lines = list(console_lines(text))
    assert len(lines) >= least
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "moectl"
        moectl(*arguments)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_two_commands_exist_and_are_executable():
    text = (ROOT / "README.md").read_text()
    for script in ("scripts/quickstart", "scripts/test"):
        assert script in text
        assert (ROOT / script).stat().st_mode & 0o111


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), (document, target)


def test_exit_codes_in_the_readme_are_those_of_the_program():
    from moectl.errors import ExitCode

    text = (ROOT / "README.md").read_text()
    assert {int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == {
        int(code) for code in ExitCode
    }

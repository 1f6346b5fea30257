"""Text made safe to show, and that nothing is shown that was not."""

from __future__ import annotations

import ast
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import moectl
from moectl.cli.options import _warnings_as_notes
from moectl.cli.output import Output
from moectl.errors import CheckpointError
from moectl.printable import printable, printable_data, printable_line

PACKAGE = Path(moectl.__file__).parent


def test_every_character_that_steers_is_shown_as_its_code() -> None:
    steering = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and chr(code) not in "\n\t"
    ]
    assert [c for c in steering if printable(c) == c] == []
    assert printable("".join(steering)).isascii()


@pytest.mark.parametrize(
    "text",
    ["", "plain", "a\nb\tc", "\u00b5s \u00d7 \u2192 \u00a0", "\u6a21\u578b \u00e9 e\u0301", "[/x] {0} $a$"],
)
def test_what_is_harmless_is_left_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_text_may_be_made_printable_twice() -> None:
    hostile = "\x1b]0;x\x07 \x85 \u2028 \u202e \u2066 \udcff \U000e0041"
    assert printable(printable(hostile)) == printable(hostile)
    assert printable(hostile) == "\\x1b]0;x\\x07 \\x85 \\u2028 \\u202e \\u2066 \\udcff \\U000e0041"
    assert printable_line("a\r\n\tb") == "a\\x0d\\n\\tb"


def test_data_is_made_printable_throughout() -> None:
    data = {"\x1b": ["\u202e", {"a": "\x85"}], "n": 1.5, "b": None}
    assert printable_data(data) == {"\\x1b": ["\\u202e", {"a": "\\x85"}], "n": 1.5, "b": None}


def test_the_texts_of_an_error_are_printable_for_whoever_catches_it() -> None:
    error = CheckpointError("a\x1b", reason="b\u202e", hint="c\udc80")
    assert str(error) == "a\\x1b. b\\u202e. c\\udc80." and error.args == ("a\\x1b",)


LOGGING = r"""
import logging, sys, warnings
from moectl.cli.output import print_logs_safely
print_logs_safely()
said = logging.getLogger("library.part")
said.warning("last resort \x1b[31m %s", "\u202e")
said.addHandler(logging.StreamHandler())
said.warning("own handler \x85\nmoectl: error: forged")
said.warning("wrong %d \x1b", "text")
try:
    raise ValueError("\x1b]0;x\x07\nmoectl: error: forged")
except ValueError:
    said.exception("failed", stack_info=False)
"""


def test_what_libraries_log_is_printable() -> None:
    done = subprocess.run([sys.executable, "-c", LOGGING], capture_output=True, text=True, check=True)
    assert printable(done.stderr) == done.stderr
    for part in ("library: last resort \\x1b[31m \\u202e", "library: own handler \\x85", "library: wrong %d"):
        assert part in done.stderr
    assert not any(line.startswith("moectl") for line in done.stderr.splitlines())


def test_what_libraries_warn_of_is_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    with _warnings_as_notes(Output("run")):
        warnings.showwarning(UserWarning("red \x1b[31m \u202e"), UserWarning, "file.py", 1)
    assert shown == ["red \\x1b[31m \\u202e"]


PIPES = {
    "__main__.py": "a constant, before anything is imported",
    "cli/output.py": "the one place",
    "bench/precompile.py": "a process whose output its parent reads",
    "layer/background_compile.py": "a process whose output its parent reads",
    "layer/compile_ahead.py": "a process whose output its parent reads",
    "oracle/engines/vllm_0_33_0/own_code/vllm_worker.py": "a process whose output its parent reads",
}
"""Files that write to a standard stream or make a console."""

STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}


PRINTERS = {"echo", "secho", "print_exc", "print_exception", "print_stack"}


def shown(tree: ast.AST) -> Iterator[str]:
    """What in a module writes to a standard stream, or could."""
    for node in ast.walk(tree):
        around = False
        if isinstance(node, ast.Call):
            *owners, name = ast.unparse(node.func).split(".")
            around = name in PRINTERS or (name == "print" and not owners)
            around |= name in ("write", "writelines") and bool(STREAMS & set(owners))
            around |= (owners, name) == (["os"], "write") and ast.unparse(node.args[0]) in ("1", "2")
            around |= any(
                word.arg == "markup" and ast.unparse(word.value) != "False" for word in node.keywords
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
            around = {alias.name for alias in node.names} != {"Text"}
        elif isinstance(node, ast.Import):
            around = any(alias.name.startswith("rich") for alias in node.names)
        if around:
            yield f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)[:60]}"


def test_nothing_is_printed_but_through_the_one_place() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := list(shown(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert {name: lines for name, lines in found.items() if name not in PIPES} == {}
    assert found.keys() == PIPES.keys(), "an exception that is none any more"


@pytest.mark.parametrize(
    "line",
    [
        "print('a')",
        "import sys; sys.stdout.write('a')",
        "sys.stderr.buffer.write(b'a')",
        "typer.echo('a')",
        "from rich.console import Console",
        "import rich.markup",
        "console.print('a', markup=True)",
        "os.write(2, b'a')",
        "traceback.print_exc()",
    ],
)
def test_a_way_around_would_be_seen(line: str) -> None:
    assert list(shown(ast.parse(line)))

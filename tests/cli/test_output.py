"""The output class: what goes where, in which form."""

import json

import pytest

from moectl.cli.output import Output, count, duration, gib, size, table
from moectl.errors import CheckpointError, Unavailable


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(34.6e-6, "34.6 us"), (1.374, "1.37 s"), (0.0123, "12.3 ms"), (0.9999e-3, "1 ms"), (7200, "120 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_count():
    assert [count(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


def test_numbers_that_are_not_finite_are_null_in_json():
    text = Output("bench", as_json=True).json({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads(text, parse_constant=pytest.fail)["b"] == [None, 1.5]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_694_269_440, "1.69 GB"), (5e13, "50 TB")],
)
def test_size(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (143771 << 20, "140 GiB"),
        (24 << 30, "24 GiB"),
        (int(1.25 * 2**30), "1.25 GiB"),
        (500 << 20, "500 MiB"),
        (3 << 18, "768 KiB"),
        (0, "0 KiB"),
    ],
)
def test_memory_is_in_binary_units(nbytes, text):
    assert gib(nbytes) == text


def draw(console):
    made = table("a", "b", right=["b"])
    made.add_row("x", "1")
    console.print(made)


def test_three_forms_of_one_result(capsys):
    document = {"value": 1}
    Output("explain", as_json=True).result(document, draw, "brief")
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"schema_version": 2, "moectl": shown["moectl"], "command": "explain", "value": 1}
    Output("explain", quiet=True).result(document, draw, "brief")
    assert capsys.readouterr().out == "brief\n"
    Output("explain").result(document, draw, "brief")
    assert "| x | 1 |" in capsys.readouterr().out


def test_errors_go_to_stderr_and_into_the_json_document(capsys):
    Output("run").error(CheckpointError("header too short", reason="why", hint="moectl verify X"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["moectl: error: header too short", "  Why.", "  next: moectl verify X"]
    Output("run", as_json=True).error(Unavailable("no GPU"))
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == {"what": "no GPU", "reason": "", "hint": "", "exit_code": 3}


def test_progress_is_silent_off_a_terminal(capsys):
    with Output("convert").progress("converting") as progress:
        progress(1, 2, "layer 0")
    assert capsys.readouterr() == ("", "")


def test_messages_break_between_words_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    error = Unavailable("no GPU can be used " * 4, hint="pip install " + "x" * 70)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    out = Output("doctor", color="never")
    out.error(error)
    out.warn("the driver is older than the kernels " * 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("moectl: error: no GPU") and lines[1].startswith("  ")
    assert [len(line) > 60 for line in lines] == [("x" * 70 in line) for line in lines]
    assert any(line.startswith("moectl: warning: the driver") for line in lines)
    # A pipe gets a line for each message.
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    out.warn("the driver is older than the kernels " * 3)
    assert len(capsys.readouterr().err.splitlines()) == 1

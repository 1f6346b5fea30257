"""The output class: what goes where, in which form."""

import json
import sys

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


def on_terminals(monkeypatch, columns):
    """Makes both streams terminals of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_messages_are_wrapped_between_words_on_a_terminal(capsys, monkeypatch):
    on_terminals(monkeypatch, 40)
    out = Output("run")
    out.note("no engine loads this directory yet; it is for moectl")
    out.warn("vLLM 0.29.0 is installed, and these rules are older")
    out.error(
        CheckpointError(
            "the weights of org/name are not on this machine",
            reason="known are a, b and c, and all that is like them",
            hint="hf download org/name or something else",
        )
    )
    assert capsys.readouterr().err.splitlines() == [
        "moectl: no engine loads this directory",
        "        yet; it is for moectl",
        "moectl: warning: vLLM 0.29.0 is",
        "        installed, and these rules are",
        "        older",
        "moectl: error: the weights of org/name",
        "        are not on this machine",
        "  Known are a, b and c, and all that is",
        "  like them.",
        "  next: hf download org/name or",
        "        something else",
    ]


@pytest.mark.parametrize("columns", ["-5", "0", "1", str(10**9), "9" * 5000, "\u00b2", "wide"])
def test_any_text_in_columns_is_a_width_of_messages(capsys, monkeypatch, columns):
    on_terminals(monkeypatch, columns)
    Output("run").note("two words")
    assert capsys.readouterr().err.split() == ["moectl:", "two", "words"]


def test_a_wrapped_message_is_coloured_in_its_first_word_alone(capsys, monkeypatch):
    on_terminals(monkeypatch, 40)
    Output("run", color="always").warn("an error: of many words that need two lines")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "moectl: \x1b[33mwarning:\x1b[0m an error: of many words" and "\x1b" not in second

"""Errors as texts: whole sentences, whoever wrote their parts."""

import ast
from pathlib import Path

import pytest

from moectl import errors
from moectl.errors import COMMANDS, BackendFailed, MoectlError, UsageError, sentence
from support.invoking import moectl

MOECTL = Path(errors.__file__).parent
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("choose one of these", "Choose one of these."),
        ("Choose one of these.", "Choose one of these."),
        ("did you mean h200?", "Did you mean h200?"),
        ("leave it out: it does nothing", "Leave it out: it does nothing."),
        ("config.json says it", "config.json says it."),
        ("w13_scale is needed", "w13_scale is needed."),
        ("--gpu takes names", "--gpu takes names."),
        ("`moectl explain` says why", "`moectl explain` says why."),
        ("moectl explain CKPT", "moectl explain CKPT"),
        ("pip install triton", "pip install triton"),
    ],
)
def test_sentences(text, said):
    assert sentence(text) == sentence(said) == said


@pytest.mark.parametrize("stop", ["", "."])
def test_an_error_is_sentences_one_after_the_other(stop):
    error = UsageError(
        f"no model is called 'zz'{stop}", reason=f"there are two{stop}", hint=f"name one{stop}"
    )
    assert error.what == "no model is called 'zz'" == str(UsageError(f"no model is called 'zz'{stop}"))
    assert str(error) == "no model is called 'zz'. There are two. Name one."
    assert str(UsageError("is it there?", hint="pip install triton")) == "is it there? pip install triton"
    failed = BackendFailed("torch", f"out of luck{stop}", hint=f"try again{stop}").on(3)
    assert str(failed) == "the torch backend failed on layer 3: out of luck. Try again."
    assert MoectlError("gate, up, ...").what == "gate, up, ..."


def spelled(kind):
    """Every literal beginning of texts of errors under moectl/: of `what`, or of keyword `kind`."""
    for path in MOECTL.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(call, ast.Call)
                or not isinstance(call.func, ast.Name)
                or call.func.id not in KINDS
            ):
                continue
            given = call.args[:1] if kind == "what" else [k.value for k in call.keywords if k.arg == kind]
            for text in given:
                first = text.values[0] if isinstance(text, ast.JoinedStr) else text
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield f"{path.name}:{call.lineno}", first.value
                elif isinstance(first, ast.FormattedValue) and kind == "what":
                    quoted = first.conversion == ord("r") or ast.unparse(first.value).startswith("shown(")
                    yield f"{path.name}:{call.lineno}", "'" if quoted else "x"


def test_no_text_begins_with_a_quote():
    found = list(spelled("what"))
    assert len(found) > 400
    assert [where for where, text in found if text.startswith(("'", '"'))] == []


def test_hints_that_begin_with_a_program_are_command_lines():
    """Such a hint gets no full stop: words behind the command would be a sentence without one."""
    hints = [(where, text) for where, text in spelled("hint") if text.split(" ")[0] in COMMANDS]
    assert len(hints) > 5
    assert [it for it in hints if {"says", "shows", "is", "has", "and"} & set(it[1].split())] == []


def test_a_model_that_is_not_built_in(tmp_path):
    said = moectl("synth", "zz", tmp_path / "out", code=2).stderr.splitlines()
    assert said == [
        "moectl: error: no built-in model is called 'zz'",
        "  next: `moectl list models` prints all built-in models.",
    ]
    near = moectl("explain", "gpt-oss-21b", code=4).stderr
    assert "Check the path. Did you mean openai/gpt-oss-20b" in near

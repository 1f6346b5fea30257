"""An empty text is refused by every option and argument: it means no default, and no folder."""

import pytest
import typer

from moectl.cli.main import app
from support.invoking import moectl
from support.sampling import every_nth

COMMANDS = typer.main.get_command(app).commands
OPTIONS = [
    (command, given)
    for command, made in COMMANDS.items()
    for one in made.params
    if one.param_type_name == "option" and not one.is_flag and one.nargs == 1
    for name in one.opts
    for given in [(name, ""), *([(f"{name}=",)] if name.startswith("--") else [])]
]
TAKEN = {
    name: ["models" if name == "list" else "x" for one in made.params if one.param_type_name == "argument"]
    for name, made in COMMANDS.items()
}
ARGUMENTS = [(command, at) for command, taken in TAKEN.items() for at in range(len(taken))]
NEEDED = {"convert": ("--to", "marlin"), "serve-check": ("--engine", "vllm")}


def test_every_command_is_here():
    assert len(OPTIONS) > 120 and {command for command, _ in ARGUMENTS} == set(COMMANDS) - {"doctor", "env"}


def refused(command, *given):
    """What is said of empty texts; numbers are refused as what they are."""
    said = moectl(command, *given, *NEEDED.get(command, ()), code=2).stderr
    return "is empty" if "Invalid value" in said else said


@pytest.mark.parametrize(("command", "given"), every_nth(OPTIONS, 2))
def test_an_option_without_a_value(command, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(command, *TAKEN[command], *given)
    assert said == "is empty" or f"{given[0].rstrip('=')} is empty" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "at"), ARGUMENTS)
def test_an_argument_without_a_value(command, at, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = list(TAKEN[command])
    given[at] = ""
    assert "is empty" in refused(command, *given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given",
    [
        ("explain", "gpt-oss-20b", "--gpu", "h200,"),
        ("explain", "gpt-oss-20b", "--gpu", ","),
        ("explain", "gpt-oss-20b", "--gpu", " "),
        ("explain", "gpt-oss-20b", "--packages", ","),
        ("bench", "--model", ","),
        ("bench", "--model", "kimi-k2", "--routing", "uniform,"),
        ("tune", "--model", "kimi-k2,"),
        ("tune", "--model", "kimi-k2", "--families", ","),
    ],
)
def test_a_list_with_an_empty_name(given):
    said = moectl(*given, code=2).stderr
    assert "is empty" in said or "called ''" in said or "profile ''" in said


def test_a_variable_that_is_empty_is_one_that_is_not_set():
    asked = ("explain", "gpt-oss-20b", "--policy", "vllm", "-q")
    set_to_nothing = moectl(*asked, code=None, env={"MOECTL_EXPLAIN_GPU": ""})
    assert set_to_nothing == moectl(*asked, code=None)


def test_an_equals_sign_in_a_value_is_no_empty_option():
    moectl("explain", "gpt-oss-20b", "--gpu", "h200", "--env", "VLLM_MOE_DP_CHUNK_SIZE=", "-q")

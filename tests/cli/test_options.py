"""Options of a command that are fields of a record: of the library's, or of the command's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from moectl.bench import BenchSettings
from moectl.cli.bench.command import SETTINGS
from moectl.cli.convert.command import PORTABLE_OPTIONS
from moectl.cli.options import ArgumentKeepingCommand, ParsedOption, RecordOptions, framed, option
from moectl.cli.output import Output
from moectl.cli.run.command import PLAN
from moectl.convert.portable.options import PortableOptions
from moectl.errors import UsageError
from moectl.run import RunPlan
from support.invoking import moectl


@dataclass(frozen=True)
class Trip:
    """A record of a library: its annotations are strings."""

    people: tuple[str, ...]
    to: str = ""
    days: int = 3


def names(text: str) -> tuple[str, ...]:
    if "," in text and not all(text.split(",")):
        raise UsageError(f"a name is empty in {text!r}")
    return tuple(text.split(","))


TRIP = RecordOptions(
    Trip,
    people=ParsedOption(option("--with", help="Names."), names, kind=str, default="me"),
    days=option("--days", help="How many.", min=1),
)
seen: list[Any] = []


def travel(*, trip: Callable[..., Trip], out: Output) -> None:
    seen.append(trip(to="Rome"))


# Annotations of a command must be what they say when it is decorated.
travel.__annotations__["trip"] = Annotated[Callable[..., Trip], TRIP]
app = typer.Typer()
app.command("travel", cls=ArgumentKeepingCommand)(framed("travel")(travel))


def go(*words: str, **environment: str) -> Any:
    seen.clear()
    return CliRunner().invoke(app, list(words), env=environment)


def test_a_record_is_made_of_defaults_options_and_what_the_command_adds() -> None:
    assert go().exit_code == 0 and seen == [Trip(("me",), "Rome", 3)]
    go("--with", "a,b", "--days", "9")
    assert seen == [Trip(("a", "b"), "Rome", 9)]


def test_variables_stand_for_options_of_a_record() -> None:
    go(MOECTL_TRAVEL_WITH="x,y", MOECTL_DAYS="4")
    assert seen == [Trip(("x", "y"), "Rome", 4)]


def test_what_parsing_refuses_is_a_sentence_and_an_exit_code() -> None:
    done = go("--with", "a,,b")
    assert done.exit_code == 2 and "a name is empty in 'a,,b'" in done.stderr and not seen


def test_an_option_of_no_field_is_refused_when_the_command_is_made() -> None:
    with pytest.raises(KeyError, match="speed"):
        RecordOptions(Trip, speed=option("--speed", help="Fast.")).parameters()


@pytest.mark.parametrize(
    ("options", "record", "others", "expected"),
    [
        (SETTINGS, BenchSettings, {"models": ("kimi-k2",)}, BenchSettings(models=("kimi-k2",))),
        (PLAN, RunPlan, {}, RunPlan()),
        (PORTABLE_OPTIONS, PortableOptions, {"target": "int8"}, PortableOptions("int8")),
    ],
    ids=["bench", "run", "convert"],
)
def test_without_options_a_record_has_its_own_defaults(options, record, others, expected) -> None:
    assert options.record is record
    typed = {parameter.name: parameter.default for parameter in options.parameters()}
    assert options.bound(typed)(**others) == expected


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["explain", "x", "--bogus", "--json"], "explain"),
        (["list", "gpu", "--json"], "list"),
        (["run", "x", "--layer", "many", "--json"], "run"),
        (["frob", "--json"], "moectl"),
        (["--bogus", "list", "--json"], "moectl"),
    ],
    ids=" ".join,
)
def test_errors_of_the_parser_are_documents_too(words: list[str], command: str) -> None:
    done = moectl(*words, code=2)
    document = json.loads(done.stdout)
    assert document["command"] == command and document["error"]["exit_code"] == 2
    assert document["error"]["what"] in done.stderr
    if command != "moectl":
        assert done.document == document, "the schema has it"


def test_a_variable_asks_for_the_document_as_well() -> None:
    for variable in ("MOECTL_JSON", "MOECTL_RUN_JSON"):
        assert "--bogus" in moectl("run", "--bogus", code=2, env={variable: "yes"}).document["error"]["what"]
    assert not moectl("run", "--bogus", code=2, env={"MOECTL_JSON": "1", "MOECTL_RUN_JSON": "0"}).stdout
    assert not moectl("run", "--bogus", "--", "--json", code=2).stdout


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["list", "gpus"], {"MOECTL_JSON": "maybe"}, "'--json' (from MOECTL_JSON): .*boolean.*'maybe'"),
        (["run", "x"], {"MOECTL_RUN_LAYER": "-1"}, "'--layer' (from MOECTL_RUN_LAYER): .*0.*'-1'"),
        (
            ["explain", "kimi-k2"],
            {"MOECTL_EXPLAIN_GPU": "h999"},
            "MOECTL_EXPLAIN_GPU is set to 'h999'.",
        ),
        (["explain", "kimi-k2"], {"MOECTL_GPU": "h100, h999"}, "MOECTL_GPU is set to 'h100, h999'."),
        (["explain", "kimi-k2", "--gpu", "h100"], {"MOECTL_TP": "0"}, "MOECTL_TP is set to '0'."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_of_a_variable_is_shown_with_its_name(words, environment, said) -> None:
    error = " ".join(moectl(*words, code=2, env=environment).stderr.split())
    assert re.search(said.replace("(", r"\(").replace(")", r"\)"), error), error


def test_variables_that_an_error_does_not_speak_of_are_not_named() -> None:
    environment = {"MOECTL_TP": "8", "MOECTL_GPU": "h100"}
    assert "MOECTL" not in moectl("explain", "kimi-k2", "--gpu", "h999", code=2, env=environment).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "gpu"], "Invalid value for 'kind': 'gpu' is not one of"),
        (["run", "x", "--layer", "many"], "'--layer': should be a valid integer, got 'many'"),
        (["run", "x", "--layer=-1"], "greater than or equal to 0, got '-1'"),
    ],
)
def test_wrong_values_are_told_without_words_of_the_parsers_library(words, said) -> None:
    error = moectl(*words, code=2).stderr
    assert said in error and "Value error" not in error and "Input" not in error


@pytest.mark.parametrize("words", [["explain", "kimi-k2", "--gpu", "h100"], ["doctor"]])
def test_markdown_and_json_are_refused_together(words) -> None:
    assert "--json and --md" in moectl(*words, "--json", "--md", code=2).document["error"]["what"]


def test_every_command_shows_the_options_that_all_have() -> None:
    for name in ("explain", "bench", "list"):
        printed = moectl(name, "--help").stdout
        assert all(f"--{shared} " in printed for shared in ("json", "color <str>", "debug")), name

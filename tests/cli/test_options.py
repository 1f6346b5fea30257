"""Options of a command that are fields of a record: of the library's, or of the command's own."""

from __future__ import annotations

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

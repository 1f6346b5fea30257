"""Environment variables of an engine as a table: what a value means to it, and what is odd about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

READ, REMOVED = "read", "removed"
"""Statuses of a variable: the engine reads it, or ignores it since a release in which it went away."""

INTEGER, WORD, ONE = "switch, a whole number", "switch, 1 or true", "switch, 1"
NUMBER, CHOICE, CASELESS, TEXT = "number", "choice", "choice in any case", "text"
"""Kinds of value. The three kinds of switch differ in what else than 0 and 1 they take; a text with
`choices` may be any, but only those mean something."""

SWITCHES = (INTEGER, WORD, ONE)

_LOOKS_ON = frozenset({"1", "true", "t", "yes", "y", "on", "enable", "enabled"})


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of an engine.

    Attributes:
        name, does: the variable, and what it does in half a sentence.
        kind: how its value is read.
        default: the value that an unset variable stands for; empty: none.
        choices: values that are taken, where there is a list.
        status: `READ` or `REMOVED`.
        instead: what to use in place of a removed one; empty where nothing replaces it.
    """

    name: str
    does: str
    kind: str = INTEGER
    default: str = "0"
    choices: tuple[str, ...] = ()
    status: str = READ
    instead: str = ""

    def value(self, text: str) -> bool | int | str:
        """`text` as the engine reads it. ValueError, with what it takes, for a text on which it fails."""
        return _READERS[self.kind](self, text)

    def is_on(self, text: str | None) -> bool:
        """True when a switch is on with `text`; its default for None and for what the engine fails on."""
        if text is None:
            return bool(self.value(self.default))
        try:
            return bool(self.value(text))
        except ValueError:
            return bool(self.value(self.default))

    def values(self) -> str:
        """What it takes, in words."""
        return "0 or 1" if self.kind in SWITCHES else ", ".join(self.choices) or self.kind


def _integer(variable: Variable, text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError("0 or 1") from None


def _number(variable: Variable, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _choice(variable: Variable, text: str) -> str:
    if text not in variable.choices:
        raise ValueError(variable.values())
    return text


def _caseless(variable: Variable, text: str) -> str:
    if text.lower() not in variable.choices:
        raise ValueError(variable.values())
    return text.lower()


_READERS: Mapping[str, Callable[[Variable, str], bool | int | str]] = {
    INTEGER: _integer,
    WORD: lambda variable, text: text.lower() in ("1", "true"),
    ONE: lambda variable, text: text == "1",
    NUMBER: _number,
    CHOICE: _choice,
    CASELESS: _caseless,
    TEXT: lambda variable, text: text,
}


SET, ODD, FAILS, IGNORED, UNKNOWN = "set", "odd", "fails", "ignored", "unknown"
"""What there is to say of a variable that is set: nothing, or why it may not do what was meant."""


@dataclass(frozen=True, slots=True)
class VariableFinding:
    """One variable that is set, and what becomes of it.

    Attributes:
        name, value: as set; `means` is what the engine makes of the value.
        verdict: `SET`, or `ODD`, `FAILS`, `IGNORED`, `UNKNOWN`.
        remark: the sentence for a verdict other than `SET`; `does` what the variable is for.
        instead: what to use for an ignored one.
    """

    name: str
    value: str
    verdict: str
    means: str = ""
    does: str = ""
    remark: str = ""
    instead: str = ""


def judge_variable(variable: Variable, text: str, engine: str) -> VariableFinding:
    """What `engine` makes of `variable` set to `text`."""
    found = VariableFinding(variable.name, text, SET, does=variable.does, instead=variable.instead)
    if variable.status == REMOVED:
        use = f"use {variable.instead}" if variable.instead else "nothing replaces it"
        return replace(found, verdict=IGNORED, remark=f"{engine} ignores {variable.name}; {use}")
    try:
        value = variable.value(text)
    except ValueError as error:
        remark = f"{engine} fails on {variable.name}={text!r}: it takes {error}"
        return replace(found, verdict=FAILS, remark=remark)
    if variable.kind == TEXT and variable.choices and text.lower() not in variable.choices:
        remark = f"{engine} gives no meaning to {variable.name}={text!r}: use {variable.values()}"
        return replace(found, verdict=ODD, remark=remark)
    if variable.kind not in SWITCHES:
        return replace(found, means=str(value))
    means = "on" if value else "off"
    found = replace(found, means=means)
    meant = text.strip().lower() in _LOOKS_ON
    if meant and not value:
        remark = f"{engine} reads {variable.name}={text!r} as off: only {_on_words(variable)} switches it on"
        return replace(found, verdict=ODD, remark=remark)
    if value and not meant:
        return replace(found, verdict=ODD, remark=f"{engine} reads {variable.name}={text!r} as on")
    return found


def _on_words(variable: Variable) -> str:
    return "1" if variable.kind == ONE else "1 or true"


def judge_variables(
    env: Mapping[str, str],
    variables: Mapping[str, Variable],
    engine: str,
    *,
    prefix: str,
    others: Iterable[str] = (),
) -> tuple[VariableFinding, ...]:
    """What `engine` makes of each variable of `env` that is in its table or begins with `prefix`.

    `others` are variables that it reads and that do not concern experts: nothing is said of them. A
    name in neither is `UNKNOWN`, with near matches.
    """
    read = {name for name, variable in variables.items() if variable.status == READ}.union(others)
    known = read.union(variables)
    found = []
    for name, text in sorted(env.items()):
        if variable := variables.get(name):
            found.append(judge_variable(variable, text, engine))
        elif name.startswith(prefix) and name not in known:
            near = [
                *get_close_matches(name, sorted(read), n=2, cutoff=0.75),
                *get_close_matches(name, sorted(known - read), n=1, cutoff=0.9),
            ]
            also = f"; did you mean {' or '.join(near)}?" if near else ""
            remark = f"{engine} has no variable {name}{also}"
            found.append(VariableFinding(name, text, UNKNOWN, remark=remark, instead=near[0] if near else ""))
    return tuple(found)

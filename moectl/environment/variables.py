"""Environment variables of engines: how an engine reads a value, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

READ, REMOVED = "read", "removed"
"""Status of a variable: the engine reads it, or ignores it since it was removed."""

INTEGER, WORD, ONE = "switch, a whole number", "switch, 1 or true", "switch, 1"
NUMBER, CHOICE, CASELESS, TEXT = "number", "choice", "choice in any case", "text"
"""Kinds of value. The three kinds of switch differ in the values they accept besides 0 and 1; a text with
`choices` accepts anything, but only those values have a meaning."""

SWITCHES = (INTEGER, WORD, ONE)

_LOOKS_ON = frozenset({"1", "true", "t", "yes", "y", "on", "enable", "enabled"})


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of an engine.

    Attributes:
        name, does: the variable, and its purpose as half a sentence.
        kind: how its value is parsed.
        default: value of an unset variable; empty if there is none.
        choices: the accepted values, if they are a closed list.
        status: `READ` or `REMOVED`.
        instead: replacement of a removed variable; empty if there is none.
        dropped: the release that removed it, as sentences call it; empty if that is unknown.
        deprecated: the engine reads it, with a warning that a later release will not.
    """

    name: str
    does: str
    kind: str = INTEGER
    default: str = "0"
    choices: tuple[str, ...] = ()
    status: str = READ
    instead: str = ""
    dropped: str = ""
    deprecated: bool = False

    def value(self, text: str) -> bool | int | str:
        """`text` as the engine parses it. ValueError, with the accepted values, if the engine fails on it."""
        return _READERS[self.kind](self, text)

    def is_on(self, text: str | None) -> bool:
        """True when a switch is on with `text`; the default for None and for invalid values."""
        if text is None:
            return bool(self.value(self.default))
        try:
            return bool(self.value(text))
        except ValueError:
            return bool(self.value(self.default))

    def values(self) -> str:
        """The accepted values in words."""
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
"""Verdict on a variable that is set: fine, or why it may not do what was intended."""


@dataclass(frozen=True, slots=True)
class VariableFinding:
    """One variable that is set, and its effect.

    Attributes:
        name, value: as set; `means` is the value as the engine interprets it.
        verdict: `SET`, `ODD`, `FAILS`, `IGNORED` or `UNKNOWN`.
        remark: the sentence for a verdict other than `SET`; `does` is the variable's purpose.
        instead: replacement of an ignored variable.
    """

    name: str
    value: str
    verdict: str
    means: str = ""
    does: str = ""
    remark: str = ""
    instead: str = ""


def judge_variable(variable: Variable, text: str, engine: str) -> VariableFinding:
    """How `engine` interprets `variable` set to `text`."""
    finding = VariableFinding(variable.name, text, SET, does=variable.does, instead=variable.instead)
    if variable.status == REMOVED:
        advice = f"use {variable.instead}" if variable.instead else "nothing replaces it"
        since = f", which {variable.dropped} dropped" if variable.dropped else ""
        return replace(finding, verdict=IGNORED, remark=f"{engine} ignores {variable.name}{since}; {advice}")
    try:
        value = variable.value(text)
    except ValueError as error:
        remark = f"{engine} fails on {variable.name}={text!r}: it takes {error}"
        return replace(finding, verdict=FAILS, remark=remark)
    if variable.deprecated:
        advice = f"; use {variable.instead}" if variable.instead else ""
        return replace(
            finding, verdict=ODD, means=str(value), remark=f"{engine} deprecates {variable.name}{advice}"
        )
    if variable.kind == TEXT and variable.choices and text.lower() not in variable.choices:
        remark = f"{engine} gives no meaning to {variable.name}={text!r}: use {variable.values()}"
        return replace(finding, verdict=ODD, remark=remark)
    if variable.kind not in SWITCHES:
        return replace(finding, means=str(value))
    means = "on" if value else "off"
    finding = replace(finding, means=means)
    looks_on = text.strip().lower() in _LOOKS_ON
    if looks_on and not value:
        remark = f"{engine} reads {variable.name}={text!r} as off: only {_on_words(variable)} switches it on"
        return replace(finding, verdict=ODD, remark=remark)
    if value and not looks_on:
        return replace(finding, verdict=ODD, remark=f"{engine} reads {variable.name}={text!r} as on")
    return finding


def _on_words(variable: Variable) -> str:
    return "1" if variable.kind == ONE else "1 or true"


def judge_variables(
    env: Mapping[str, str],
    variables: Mapping[str, Variable],
    engine: str,
    *,
    prefix: str,
    others: Iterable[str] = (),
    dropped: Callable[[str], str] = lambda name: "",
    added: Callable[[str], str] = lambda name: "",
) -> tuple[VariableFinding, ...]:
    """How `engine` interprets each variable in `env` that is in its table or starts with `prefix`.

    `others` are variables of the engine that do not concern experts and are skipped. A name in neither is
    `IGNORED` if an earlier release `dropped` it, and otherwise `UNKNOWN`, with the later one that `added` it,
    or near matches. Both functions give the release as sentences call it; empty if there is none.
    """
    read = {name for name, variable in variables.items() if variable.status == READ}.union(others)
    known = read.union(variables)
    findings = []
    for name, text in sorted(env.items()):
        if variable := variables.get(name):
            findings.append(judge_variable(variable, text, engine))
        elif name.startswith(prefix) and name not in known and (release := dropped(name)):
            remark = f"{engine} ignores {name}, which {release} dropped"
            findings.append(VariableFinding(name, text, IGNORED, remark=remark))
        elif name.startswith(prefix) and name not in known and (release := added(name)):
            remark = f"{engine} has no variable {name}, which {release} added"
            findings.append(VariableFinding(name, text, UNKNOWN, remark=remark))
        elif name.startswith(prefix) and name not in known:
            near = [
                *get_close_matches(name, sorted(read), n=2, cutoff=0.75),
                *get_close_matches(name, sorted(known - read), n=1, cutoff=0.9),
            ]
            also = f"; did you mean {' or '.join(near)}?" if near else ""
            remark = f"{engine} has no variable {name}{also}"
            findings.append(
                VariableFinding(name, text, UNKNOWN, remark=remark, instead=near[0] if near else "")
            )
    return tuple(findings)

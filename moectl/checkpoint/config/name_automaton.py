"""Matching module names with many regular expressions at once, in bounded time.

A config's expressions come from whoever published it, and Python's engine takes minutes for some of them. The
expressions, as Python parses them, become one automaton, which reads a name once however many there are; what
it learns about a name serves the next one. Its work is counted, and has a limit.

google-re2 would do it, too, but cannot be installed everywhere that moectl is: without it, a config would
have to be refused that another machine reads. It knows no look-ahead either, which published configs have.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

SIZE_LIMIT = 4_000
"""Most parts of one expression: characters, places, ways of a choice, for every count of a repeat."""

DEPTH_LIMIT = 50
"""Most groups inside each other."""

WORK_LIMIT = 3_000_000
"""Most states that an automaton looks at, for all names together: a few seconds."""

KEPT_LIMIT = 500_000
"""States in the sets that are remembered at a time."""

# The parser's module has a public name only in Python 3.10.
_parser: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_BEGIN, _END, _BOUNDARY, _INSIDE, _NAME_END = range(5)
_PLACES = {
    "AT_BEGINNING": _BEGIN,
    "AT_BEGINNING_STRING": _BEGIN,
    "AT_END": _END,
    "AT_END_STRING": _END,
    "AT_BOUNDARY": _BOUNDARY,
    "AT_NON_BOUNDARY": _INSIDE,
}

_START, _WORD, _OTHER = range(3)
"""What precedes a place in a name."""


class NotMatchable(ValueError):
    """An expression that is invalid, too large, or needs to go back in the text; says what."""


class TooMuchWork(Exception):
    """The names and expressions of a config together take more than `WORK_LIMIT`."""


class Expression(NamedTuple):
    """An expression as Python parses it.

    Attributes:
        parts: what it matches must end with a part of the name: before a dot, or at the end.
        looks: it has conditions on what follows.
        size: how many characters, places and ways it has once its repeats are written out.
    """

    items: Any
    flags: int
    parts: bool
    looks: bool = False
    size: int = 0


def parsed_expression(text: str) -> Expression:
    """A regular expression in Python's syntax, for the beginning of names; NotMatchable if invalid."""
    return _parse(text, False)


def parsed_glob(text: str) -> Expression:
    """A glob (``*``, ``?``, ``[...]``) that matches a name or one of its parents; NotMatchable if invalid."""
    return _parse("".join(_glob_pieces(text)), True)


def _parse(text: str, parts: bool) -> Expression:
    try:
        items = _parser.parse(text)
    except re.error as error:
        raise NotMatchable(f"it is invalid: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise NotMatchable("it is too large") from error
    parsed = Expression(items, items.state.flags, parts)
    builder = _Builder()
    builder.add(0, parsed)
    return parsed._replace(looks=builder.looks, size=builder.size)


def _glob_pieces(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        # A bracket right after the opening one, or after ! there, is one of the characters.
        end = text.find("]", at + (2 if text.startswith("!", at) else 1)) if char == "[" else -1
        if char in "*?":
            yield ".*" if char == "*" else "."
        elif end > 0:
            inside = text[at:end].replace("\\", r"\\").replace("[", r"\[")
            inside = inside.replace("&&", r"&\&").replace("~~", r"~\~").replace("||", r"|\|")
            negated = inside.startswith("!")
            first = inside[negated : negated + 1].replace("^", r"\^").replace("]", r"\]")
            yield f"[{'^' if negated else ''}{first}{inside[negated + 1 :]}]"
            at = end + 1
        else:
            yield re.escape(char)


class _Character(NamedTuple):
    test: int
    then: int


class _Choice(NamedTuple):
    of: tuple[int, ...]


class _Place(NamedTuple):
    where: int
    then: int


class _Look(NamedTuple):
    """What follows must, or must not, begin with what the state `first` accepts."""

    wanted: bool
    first: int
    then: int


class _Accept(NamedTuple):
    wanted: int


_State = _Character | _Choice | _Place | _Look | _Accept


class _Builder:
    """States of expressions; each is made after those that follow it."""

    def __init__(self) -> None:
        self.states: list[_State] = []
        self.owners: list[int] = []
        self.tests: list[tuple[str, Any, bool]] = []
        self.looks = False
        self.size = 0
        self._test_ids: dict[tuple[str, str, bool], int] = {}
        self._owner = self._limit = 0

    def add(self, index: int, parsed: Expression) -> int:
        """The first state of an expression whose matches count for `index`."""
        self._owner, self._limit = index, self.size + SIZE_LIMIT
        last = self._state(_Accept(index))
        if parsed.parts:
            last = self._state(_Place(_NAME_END, last))
        return self._sequence(parsed.items, last, parsed.flags, 0)

    def _grow(self, parts: int) -> None:
        """Count what takes time or memory, also if no state comes of it."""
        self.size += parts
        if self.size > self._limit:
            raise NotMatchable(f"it has more than {SIZE_LIMIT} parts")

    def _state(self, state: _State) -> int:
        self.states.append(state)
        self.owners.append(self._owner)
        return len(self.states) - 1

    def _sequence(self, items: Any, then: int, flags: int, depth: int) -> int:
        if depth > DEPTH_LIMIT:
            raise NotMatchable(f"more than {DEPTH_LIMIT} groups are inside each other")
        for operation, argument in reversed(list(items)):
            then = self._item(str(operation), argument, then, flags, depth + 1)
        return then

    def _item(self, operation: str, argument: Any, then: int, flags: int, depth: int) -> int:
        self._grow(1)
        if operation in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return self._state(_Character(self._test(operation, argument, flags), then))
        if operation == "SUBPATTERN":
            _, added, removed, inner = argument
            return self._sequence(inner, then, (flags | added) & ~removed, depth)
        if operation == "BRANCH":
            self._grow(len(argument[1]))
            ways = tuple(self._sequence(way, then, flags, depth) for way in argument[1])
            return self._state(_Choice(ways))
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeat(least, most, inner, then, flags, depth)
        if operation == "AT":
            return self._state(_Place(_PLACES[str(argument)], then))
        if operation in ("ASSERT", "ASSERT_NOT") and argument[0] > 0:
            self.looks = True
            first = self._sequence(argument[1], self._state(_Accept(self._owner)), flags, depth)
            return self._state(_Look(operation == "ASSERT", first, then))
        raise NotMatchable("it looks back in the name, or refers to a group")

    def _repeat(self, least: int, most: int, inner: Any, then: int, flags: int, depth: int) -> int:
        if most == int(_parser.MAXREPEAT):
            again = self._state(_Choice(()))
            self.states[again] = _Choice((self._sequence(inner, again, flags, depth), then))
            first = again
        else:
            first = then
            for _ in range(most - least):
                self._grow(1)
                first = self._state(_Choice((self._sequence(inner, first, flags, depth), then)))
        for _ in range(least):
            once = self._sequence(inner, first, flags, depth)
            if once == first:  # it matches nothing but the empty text
                break
            first = once
        return first

    def _test(self, operation: str, argument: Any, flags: int) -> int:
        key = (operation, repr(argument), bool(flags & re.IGNORECASE))
        if key not in self._test_ids:
            self._test_ids[key] = len(self.tests)
            self.tests.append((operation, argument, key[2]))
        return self._test_ids[key]


def _passes(operation: str, argument: Any, char: str) -> bool:
    """Whether a character is one that an expression's item names."""
    if operation == "ANY":
        return char != "\n"
    if operation in ("LITERAL", "NOT_LITERAL"):
        return bool(ord(char) == argument) == (operation == "LITERAL")
    if operation == "RANGE":
        return bool(argument[0] <= ord(char) <= argument[1])
    if operation == "CATEGORY":
        kind, negated = str(argument).removeprefix("CATEGORY_"), "NOT_" in str(argument)
        kind = kind.removeprefix("NOT_")
        found = {"DIGIT": char.isdecimal(), "SPACE": char.isspace()}.get(kind, _is_word(char))
        return found != negated
    items = [(str(name), value) for name, value in argument]
    negated = bool(items) and items[0][0] == "NEGATE"
    return any(_passes(name, value, char) for name, value in items[negated:]) != negated


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


class _Step(NamedTuple):
    """A place in a name: the states that wait for its next character, what precedes it, and what matched."""

    waiting: tuple[int, ...]
    before: int
    found: int | None


class _NameReader:
    """Reads names with the states of a builder.

    Steps are remembered by the character that follows, unless conditions look further ahead.
    """

    def __init__(self, builder: _Builder, firsts: list[int]) -> None:
        self._states, self._owners, self._tests = builder.states, builder.owners, builder.tests
        self._remembers = not builder.looks
        self._begin = _Step(tuple(firsts), _START, None)
        self._passed: dict[tuple[int, str], bool] = {}
        self._work = 0
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[_Step, int] = {}
        self._steps: list[_Step] = []
        self._after: dict[tuple[int, str], int] = {}
        self._kept = 0

    def first(self, name: str) -> int | None:
        """The least index of an expression that matches at the beginning of `name`."""
        if not self._remembers:
            return self._unremembered(self._begin, name, 0)
        if self._kept > KEPT_LIMIT:
            self._forget()
        at = self._number(self._begin)
        for char in name:
            after = self._after.get((at, char))
            if after is None:
                after = self._after[at, char] = self._number(self._next(self._steps[at], char, name, 0))
            at = after
        ended = self._after.get((at, ""))
        if ended is None:
            ended = self._after[at, ""] = self._number(self._next(self._steps[at], "", name, 0))
        return self._steps[ended].found

    def _unremembered(self, step: _Step, name: str, at: int) -> int | None:
        for place in range(at, len(name)):
            step = self._next(step, name[place], name, place)
        return self._next(step, "", name, len(name)).found

    def _number(self, step: _Step) -> int:
        number = self._numbers.get(step)
        if number is None:
            number = self._numbers[step] = len(self._steps)
            self._steps.append(step)
            self._kept += len(step.waiting)
        return number

    def _next(self, step: _Step, char: str, name: str, at: int) -> _Step:
        """The place after `char`, which is empty at the end; `at` is its number in `name`."""
        states, passed = self._states, self._passed
        found, seen, reached = step.found, set(step.waiting), list(step.waiting)
        waiting: dict[int, None] = {}
        for number in reached:
            state = states[number]
            if type(state) is _Character:
                passes = passed.get((state.test, char))
                if passes is None:
                    passes = passed[state.test, char] = bool(char) and self._passes(state.test, char)
                if passes:
                    waiting[state.then] = None
                continue
            if type(state) is _Choice:
                new = [after for after in state.of if after not in seen]
            elif type(state) is _Accept:
                found = state.wanted if found is None else min(found, state.wanted)
                continue
            elif type(state) is _Place:
                new = [state.then] if _holds(state.where, step.before, char) else []
            else:
                assert type(state) is _Look
                inner = _Step((state.first,), step.before, None)
                matches = self._unremembered(inner, name, at) is not None
                new = [state.then] if matches == state.wanted else []
            reached += [after for after in new if after not in seen]
            seen.update(new)
        self._work += len(reached) + 1
        if self._work > WORK_LIMIT:
            raise TooMuchWork
        # What stands for more than what has matched cannot count any more.
        kept = tuple(n for n in waiting if found is None or self._owners[n] < found)
        return _Step(kept, _WORD if char and _is_word(char) else _OTHER, found)

    def _passes(self, test: int, char: str) -> bool:
        operation, argument, any_case = self._tests[test]
        spellings = {char, char.lower(), char.upper()} if any_case else {char}
        return any(len(one) == 1 and _passes(operation, argument, one) for one in spellings)


def _holds(where: int, before: int, char: str) -> bool:
    """Whether a place between what is `before` and `char`, which is empty at the end, is a `where`."""
    if where == _BEGIN:
        return before == _START
    if where == _END:
        return not char
    if where == _NAME_END:
        return char in ("", ".")
    boundary = (before == _WORD) != (bool(char) and _is_word(char))
    return boundary == (where == _BOUNDARY)


class NameAutomaton:
    """Expressions with the index of what they stand for, and the least index that a name matches.

    Example:
        >>> found = NameAutomaton([(0, parsed_expression("(a+)+b")), (1, parsed_glob("*.mlp"))])
        >>> found.first("aab"), found.first("model.mlp.experts"), found.first("b")
        (0, 1, None)
    """

    def __init__(self, expressions: Iterable[tuple[int, Expression]]) -> None:
        builders = {looks: _Builder() for looks in (False, True)}
        firsts: dict[bool, list[int]] = {False: [], True: []}
        for index, parsed in expressions:
            firsts[parsed.looks].append(builders[parsed.looks].add(index, parsed))
        self._readers = [_NameReader(builders[looks], firsts[looks]) for looks in firsts if firsts[looks]]

    def __bool__(self) -> bool:
        return bool(self._readers)

    def first(self, name: str) -> int | None:
        """The least index of an expression that matches at the beginning of `name`; None if none does.

        Raises TooMuchWork once all names together have cost more than `WORK_LIMIT`.
        """
        found = [index for reader in self._readers if (index := reader.first(name)) is not None]
        return min(found, default=None)

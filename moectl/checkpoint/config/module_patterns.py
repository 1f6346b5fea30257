"""Module names as quantization configs spell them: full names, components, globs and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TypeVar

from ...errors import CheckpointError
from ...files.strict_json import shown
from .name_automaton import (
    Expression,
    NameAutomaton,
    NotMatchable,
    TooMuchWork,
    parsed_expression,
    parsed_glob,
)

REGEX = "re:"
"""Prefix of a regular expression in a list of module names."""

LENGTH_LIMIT = 1024
"""Longest pattern, characters."""

EXPRESSION_LIMIT = 4096
"""Most globs and regular expressions of a config's key."""

SIZE_LIMIT = 250_000
"""Most parts of all of them together (`Expression.size`)."""

_GLOB = re.compile(r"[*?\[]")
_WORD = re.compile(r"[A-Za-z_]{2,}")


Listed = TypeVar("Listed")


class Patterns:
    """A list of module patterns from a quantization config.

    A pattern without wildcards matches every module whose name contains its components in a row, so
    ``gate`` does not match ``gate_proj`` and ``layers.1.`` does not match ``layers.10``. A glob matches a
    module or any of its parents. A regular expression (prefix ``re:``, or every pattern with `regex`) must
    match at the beginning of the full name. With `exact`, as in compressed-tensors, a pattern that is no
    regular expression is a full module name, and matches neither its children nor another spelling of it.

    Raises CheckpointError for a regular expression that is invalid, too large, or looks back.

    Example:
        >>> patterns = Patterns(["lm_head", "re:.*mlp.gate$", "model.layers.0"], "ignore")
        >>> patterns.matches("model.layers.0.mlp.experts.7.up_proj")
        True
        >>> patterns.matches("model.layers.1.mlp.gate_proj")
        False
    """

    def __init__(self, patterns: Iterable[str], where: str, regex: bool = False, exact: bool = False) -> None:
        self.texts, self.where, self._regex, self._exact = tuple(patterns), where, regex, exact
        self.names: set[str] = set()
        self.runs: set[tuple[str, ...]] = set()
        self.expressions: list[Expression] = []
        self.size = 0
        for text in self.texts:
            if len(text) > LENGTH_LIMIT:
                raise _refuse(where, text, f"a pattern of at most {LENGTH_LIMIT} characters")
            if regex or text.startswith(REGEX):
                self._add(_parsed(parsed_expression, text.removeprefix(REGEX), where))
            elif exact:
                self.names.add(text)
            elif _GLOB.search(text):
                self._add(_parsed(parsed_glob, text, where))
            elif components := tuple(filter(None, text.split("."))):
                self.runs.add(components)

    def _add(self, expression: Expression) -> None:
        self.expressions.append(expression)
        self.size += expression.size
        _bounded(len(self.expressions), self.size, self.where)

    def __bool__(self) -> bool:
        return bool(self.names or self.runs or self.expressions)

    def restricted_to(self, names: str) -> Patterns:
        """The patterns that may match one of the space-separated `names`: all of their words occur in it.

        For a regular expression, only a word at its beginning has to occur.
        """
        kept = []
        for text in self.texts:
            regex = self._regex or text.startswith(REGEX)
            words = _WORD.findall(text) if not regex else _WORD.match(text.removeprefix(REGEX)) or ()
            if all(word in names for word in ((words[0],) if isinstance(words, re.Match) else words)):
                kept.append(text)
        return Patterns(kept, self.where, self._regex, self._exact)

    @cached_property
    def _alone(self) -> PatternLists:
        return PatternLists([self])

    def matches(self, module: str) -> bool:
        """True when a pattern matches `module`, a full dotted name."""
        return self._alone.first((module,)) is not None


class PatternLists:
    """Lists of patterns in order; a name is compared with all of them at once.

    Example:
        >>> lists = PatternLists([Patterns(["re:.*gate"], "a"), Patterns(["mlp"], "b")])
        >>> lists.first(["model.mlp.up_proj", "model.mlp"])
        1
    """

    def __init__(self, lists: Sequence[Patterns]) -> None:
        self._names: dict[str, int] = {}
        self._runs: dict[tuple[str, ...], int] = {}
        self._longest_run = 0
        self._where = next((patterns.where for patterns in lists if patterns), "")
        expressions = []
        for index, patterns in enumerate(lists):
            for name in patterns.names:
                self._names.setdefault(name, index)
            for run in patterns.runs:
                self._runs.setdefault(run, index)
                self._longest_run = max(self._longest_run, len(run))
            expressions += [(index, expression) for expression in patterns.expressions]
        self._automaton = NameAutomaton(expressions)

    def first(self, modules: Iterable[str]) -> int | None:
        """The index of the first list that matches one of `modules`, full dotted names; None if none does.

        Raises CheckpointError for expressions that cost too much.
        """
        found = (index for module in modules for index in self._indices(module))
        return min(found, default=None)

    def _indices(self, module: str) -> Iterator[int]:
        if module in self._names:
            yield self._names[module]
        if self._runs:
            parts = module.split(".")
            for first in range(len(parts)):
                for last in range(first + 1, min(len(parts), first + self._longest_run) + 1):
                    if (run := tuple(parts[first:last])) in self._runs:
                        yield self._runs[run]
        try:
            index = self._automaton.first(module) if self._automaton else None
        except TooMuchWork as error:
            raise CheckpointError(
                f"quantization_config.{self._where}: its patterns cost too much to compare with the modules.",
                hint="Name the modules, or use fewer and simpler expressions.",
            ) from error
        if index is not None:
            yield index


def few_expressions(lists: Iterable[Listed], patterns: Callable[[Listed], Patterns]) -> Iterator[Listed]:
    """`lists`, which are made as they are asked for; CheckpointError if all their `patterns` are too many."""
    expressions = size = 0
    for item in lists:
        found = patterns(item)
        expressions += len(found.expressions)
        size += found.size
        _bounded(expressions, size, found.where)
        yield item


def _bounded(expressions: int, size: int, where: str) -> None:
    """CheckpointError for so many globs and regular expressions, of so many parts together."""
    if expressions > EXPRESSION_LIMIT or size > SIZE_LIMIT:
        raise CheckpointError(
            f"quantization_config.{where}: at most {EXPRESSION_LIMIT} globs and expressions are read, "
            f"of {SIZE_LIMIT} characters in all with their counted repeats written out.",
            hint="Name the modules, or use fewer and simpler expressions.",
        )


def _refuse(where: str, text: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config.{where}: {shown(text)} must be {expected}.", hint="Check config.json."
    )


def _parsed(parse: Callable[[str], Expression], text: str, where: str) -> Expression:
    try:
        return _remembered(parse, text)
    except NotMatchable as error:
        raise _refuse(where, text, f"a pattern that can be matched, and {error}") from error


@lru_cache(maxsize=4096)
def _remembered(parse: Callable[[str], Expression], text: str) -> Expression:
    return parse(text)

"""Module names as quantization configs spell them: full names, components, globs and regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from ...errors import CheckpointError
from ...files.strict_json import shown

REGEX = "re:"
"""Prefix of a regular expression in a list of module names."""

LENGTH_LIMIT = 1024
"""Longest pattern, characters."""

REPEAT_LIMIT = 6
"""Maximum number of repeats in a regular expression or glob, which bounds the cost of matching a name."""

_GLOB = re.compile(r"[*?\[]")
_WORD = re.compile(r"[A-Za-z_]{2,}")


class Patterns:
    """A list of module patterns from a quantization config.

    A pattern without wildcards matches every module whose name contains its components in a row, so
    ``gate`` does not match ``gate_proj`` and ``layers.1.`` does not match ``layers.10``. A glob matches a
    module or any of its parents. A regular expression (prefix ``re:``, or every pattern with `regex`) must
    match at the beginning of the full name. With `exact`, as in compressed-tensors, a pattern that is no
    regular expression is a full module name, and matches neither its children nor another spelling of it.

    Raises CheckpointError for an invalid regular expression, or one that is too expensive to match.

    Example:
        >>> patterns = Patterns(["lm_head", "re:.*mlp.gate$", "model.layers.0"], "ignore")
        >>> patterns.matches("model.layers.0.mlp.experts.7.up_proj")
        True
        >>> patterns.matches("model.layers.1.mlp.gate_proj")
        False
    """

    def __init__(self, patterns: Iterable[str], where: str, regex: bool = False, exact: bool = False) -> None:
        self.texts, self._where, self._regex, self._exact = tuple(patterns), where, regex, exact
        self._names: set[str] = set()
        self._runs: set[tuple[str, ...]] = set()
        self._tests: list[Callable[[str], Any]] = []
        self._inside: list[Callable[[str], Any]] = []
        for text in self.texts:
            if len(text) > LENGTH_LIMIT:
                raise _refuse(where, text, f"a pattern of at most {LENGTH_LIMIT} characters")
            if regex or text.startswith(REGEX):
                self._tests.append(_regex(text.removeprefix(REGEX), where))
            elif exact:
                self._names.add(text)
            elif _GLOB.search(text):
                self._inside.append(_glob(text, where))
            elif components := tuple(filter(None, text.split("."))):
                self._runs.add(components)

    def __bool__(self) -> bool:
        return bool(self._names or self._runs or self._tests or self._inside)

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
        return Patterns(kept, self._where, self._regex, self._exact)

    def matches(self, module: str) -> bool:
        """True when a pattern matches `module`, a full dotted name."""
        if module in self._names or any(test(module) for test in self._tests):
            return True
        parts = module.split(".")
        if self._runs and not self._runs.isdisjoint(_runs_of(parts)):
            return True
        names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)] if self._inside else []
        return any(test(name) for test in self._inside for name in names)


def _runs_of(parts: list[str]) -> Iterator[tuple[str, ...]]:
    for first in range(len(parts)):
        for last in range(first + 1, len(parts) + 1):
            yield tuple(parts[first:last])


def _refuse(where: str, text: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config.{where}: {shown(text)} must be {expected}.", hint="Check config.json."
    )


def _regex(text: str, where: str) -> Callable[[str], Any]:
    pattern = _compiled(text)
    if pattern is None:
        raise _refuse(
            where, text, f"a regular expression with at most {REPEAT_LIMIT} repeats, none inside another"
        )
    return pattern.match


def _glob(text: str, where: str) -> Callable[[str], Any]:
    if text.count("*") > REPEAT_LIMIT:
        raise _refuse(where, text, f"a pattern with at most {REPEAT_LIMIT} stars")
    return re.compile(fnmatch.translate(text)).match


@lru_cache(maxsize=4096)
def _compiled(text: str) -> re.Pattern[str] | None:
    """The compiled regular expression; None if it is invalid or could be slow on a short name."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
    depth, most = _repeats(text)
    return pattern if depth <= 1 and most <= REPEAT_LIMIT else None


def _repeats(text: str) -> tuple[int, int]:
    """The nesting depth and the number of the repeats in a valid regular expression.

    Counted on the text: repeating a group nests the repeats inside it. ``?`` does not count as a repeat.
    """
    stack: list[int] = [0]
    total = deepest = 0
    closed = 0
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
            closed = 0
            continue
        if char == "[":
            end = text.find("]", at + 2)
            at = (end if end > 0 else len(text)) + 1
            closed = 0
            continue
        if char == "(":
            stack.append(0)
            at += 1
            if text[at : at + 1] == "?":
                at += 1
            continue
        if char == ")":
            closed = stack.pop() if len(stack) > 1 else 0
            stack[-1] = max(stack[-1], closed)
        elif char in "*+{":
            total += 1
            stack[-1] = max(stack[-1], closed + 1)
            deepest = max(deepest, stack[-1])
            closed = 0
        elif char != "?":
            closed = 0
        at += 1
    return deepest, total

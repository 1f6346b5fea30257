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
"""What marks a regular expression in a list of names."""

LENGTH_LIMIT = 1024
"""Longest pattern, characters."""

REPEAT_LIMIT = 6
"""Most repeats in a regular expression or glob, so that matching a short name stays cheap."""

_GLOB = re.compile(r"[*?\[]")
_WORD = re.compile(r"[A-Za-z_]{2,}")


class Patterns:
    """A list of module patterns; `matches` says whether one of them covers a module.

    A name covers itself and everything inside it; a part of a name covers every module with these
    components in a row, so that ``gate`` is not ``gate_proj`` and ``layers.1.`` is not ``layers.10``.
    A glob covers what it fits and everything inside. A regular expression, marked by ``re:`` or all of
    them with `regex`, must fit the beginning of the whole name.

    Raises CheckpointError for a regular expression that is none, or costs too much to match.
    """

    def __init__(self, patterns: Iterable[str], where: str, regex: bool = False) -> None:
        self.texts, self._where, self._regex = tuple(patterns), where, regex
        self._runs: set[tuple[str, ...]] = set()
        self._tests: list[Callable[[str], Any]] = []
        self._inside: list[Callable[[str], Any]] = []
        for text in self.texts:
            if len(text) > LENGTH_LIMIT:
                raise _refuse(where, text, f"a pattern of at most {LENGTH_LIMIT} characters")
            if regex or text.startswith(REGEX):
                self._tests.append(_regex(text.removeprefix(REGEX), where))
            elif _GLOB.search(text):
                self._inside.append(_glob(text, where))
            elif parts := tuple(filter(None, text.split("."))):
                self._runs.add(parts)

    def __bool__(self) -> bool:
        return bool(self._runs or self._tests or self._inside)

    def about(self, names: str) -> Patterns:
        """The patterns that may cover one of `names`: those whose words are all in it.

        Of a regular expression only a word at its beginning must be.
        """
        kept = []
        for text in self.texts:
            regex = self._regex or text.startswith(REGEX)
            words = _WORD.findall(text) if not regex else _WORD.match(text.removeprefix(REGEX)) or ()
            if all(word in names for word in ((words[0],) if isinstance(words, re.Match) else words)):
                kept.append(text)
        return Patterns(kept, self._where, self._regex)

    def matches(self, module: str) -> bool:
        """True when a pattern covers `module`, a full name with dots."""
        if any(test(module) for test in self._tests):
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
    found = _compiled(text)
    if found is None:
        raise _refuse(
            where, text, f"a regular expression with at most {REPEAT_LIMIT} repeats, none inside another"
        )
    return found.match


def _glob(text: str, where: str) -> Callable[[str], Any]:
    if text.count("*") > REPEAT_LIMIT:
        raise _refuse(where, text, f"a pattern with at most {REPEAT_LIMIT} stars")
    return re.compile(fnmatch.translate(text)).match


@lru_cache(maxsize=4096)
def _compiled(text: str) -> re.Pattern[str] | None:
    """The regular expression, or None when it is none or could take long on a short name."""
    try:
        found = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
    depth, most = _repeats(text)
    return found if depth <= 1 and most <= REPEAT_LIMIT else None


def _repeats(text: str) -> tuple[int, int]:
    """How deep repeats stand inside one another in a valid regular expression, and how many there are.

    Counted in the text itself: a repeat of a group counts the repeats inside the group. What is optional
    is no repeat.
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

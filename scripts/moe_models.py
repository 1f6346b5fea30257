"""Parsers of option values: names, numbers, directories and routings. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path

from moectl.errors import UsageError
from moectl.kernels.routing_distributions import check_distribution


def names_of(choices: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of `choices`."""
    known = tuple(choices)

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise ArgumentTypeError(f"no {what} is called {name!r}; choose from {', '.join(known)}")
        return names

    return read


def whole_numbers(text: str) -> list[int]:
    """Comma-separated positive integers."""
    numbers = text.split(",")
    if not all(n.isdecimal() and int(n) for n in numbers):
        raise ArgumentTypeError(f"expected positive integers separated by commas, got {text!r}")
    return [int(n) for n in numbers]


def whole_number(text: str) -> int:
    """A positive integer."""
    if not (text.isdecimal() and int(text)):
        raise ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def directory(text: str) -> Path:
    """An existing directory."""
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"there is no directory {text}")
    return Path(text)


def distribution(text: str) -> str:
    """A routing distribution."""
    try:
        check_distribution(text)
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def distributions(text: str) -> list[str]:
    """Comma-separated routing distributions."""
    return [distribution(name) for name in text.split(",")]

"""How options of scripts name models, formats, routings and numbers. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable

from moectl.errors import UsageError
from moectl.kernels.routing_distributions import check_distribution


def names_of(choices: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """What reads an option's names of `choices`, with commas between."""
    known = tuple(choices)

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise ArgumentTypeError(f"no {what} is called {name!r}; there are {', '.join(known)}")
        return names

    return read


def whole_numbers(text: str) -> list[int]:
    """An option's numbers, from 1, with commas between."""
    found = text.split(",")
    if not all(n.isdecimal() and int(n) for n in found):
        raise ArgumentTypeError(f"it takes whole numbers from 1, with commas between, got {text!r}")
    return [int(n) for n in found]


def whole_number(text: str) -> int:
    """An option's number, from 1."""
    if not (text.isdecimal() and int(text)):
        raise ArgumentTypeError(f"it takes a whole number from 1, got {text!r}")
    return int(text)


def distribution(text: str) -> str:
    """An option's routing."""
    try:
        check_distribution(text)
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def distributions(text: str) -> list[str]:
    """An option's routings, with commas between."""
    return [distribution(name) for name in text.split(",")]

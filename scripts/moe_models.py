"""How options of scripts name models, formats, routings and numbers. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable


def is_distribution(text: str) -> bool:
    """Whether `text` is ``uniform``, ``zipf:A`` or ``experts:N``."""
    name, _, argument = text.partition(":")
    if name == "experts":
        return argument.isdigit() and int(argument) > 0
    return text == "uniform" or (name == "zipf" and argument.replace(".", "", 1).isdigit())


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


def distributions(text: str) -> list[str]:
    """An option's routings, with commas between."""
    found = text.split(",")
    if not all(map(is_distribution, found)):
        raise ArgumentTypeError(f"it takes uniform, zipf:A and experts:N, got {text!r}")
    return found

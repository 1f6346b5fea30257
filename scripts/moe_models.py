"""The layers that scripts time, formats, routings, and how options name them. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping

from moectl.problem import SILU, SWIGLU_OAI, Dims, MoEProblem
from moectl.schemes import MXFP4, Scheme, WeightFormat, int_format

FORMATS: Mapping[str, WeightFormat] = {
    "mxfp4": MXFP4,
    "int4-g32": int_format(4, 32),
    "int4-g128": int_format(4, 128),
}


def _gpt_oss(experts: int) -> MoEProblem:
    dims = Dims(2880, 2880)
    return MoEProblem(dims, experts, 4, Scheme(MXFP4), SWIGLU_OAI, rows="interleaved", bias=True)


def _plain(hidden: int, intermediate: int, experts: int, top_k: int, weight: str) -> MoEProblem:
    return MoEProblem(Dims(hidden, intermediate), experts, top_k, Scheme(FORMATS[weight]), SILU)


MODELS: Mapping[str, MoEProblem] = {
    "gpt-oss-120b": _gpt_oss(128),
    "gpt-oss-20b": _gpt_oss(32),
    "kimi-k2": _plain(7168, 2048, 384, 8, "int4-g32"),
    "qwen3-30b": _plain(2048, 768, 128, 8, "int4-g128"),
    "deepseek-v3": _plain(7168, 2048, 256, 8, "int4-g128"),
}
"""Expert layers of published models, each with the format that it is timed in by default."""


def default_format(model: str) -> str:
    """The name in `FORMATS` of a model's usual format."""
    return next(name for name, weight in FORMATS.items() if weight == MODELS[model].scheme.weight)


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

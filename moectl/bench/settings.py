"""Settings of a bench as plain values, so that runs can be compared. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files.safe_reading import open_given
from ..kernels.routing_distributions import DISTRIBUTIONS, check_distribution, spelled
from ..problem.moe_problem import MAX_TOKENS

ROUTER = "router"
"""The routing by the checkpoint's own router."""

TRACE = "trace:"
"""Prefix of the name of a routing that is read from a file."""


@dataclass(frozen=True)
class BenchSettings:
    """One bench: the cross product of layers, backends, routings and numbers of tokens.

    Attributes:
        checkpoint: a directory or a name; empty if there are `models`.
        models: names of layers with random weights (`moectl.problem.published_layers`), as ``NAME`` or
            ``NAME:FORMAT``.
        tokens: numbers of tokens of a call.
        routings: distributions as in `make_inputs`, ``trace:FILE`` or ``router``.
        backends: names; empty for every usable one.
        also: names of backends in addition to these; one that cannot run is a row with the reason.
        layer: number of the only layer; None for the first of each group of identical layers.
        tp, ep: ranks that each expert is sliced over, and ranks that the experts are distributed over; the
            first rank is timed.
        dispatched: the tokens are those that a dispatch brings to the rank, each for one of its experts.
        input: a safetensors file with ``x``, for ``router``; empty for random tokens.
        device: ``cpu`` or ``cuda``; empty for a GPU if there is one.
        rounds: measurements of each row; fewer if they would take too long.
        warm: leave weights in the cache, if they fit.
        seed: seed of tokens and routings.

    Example:
        >>> BenchSettings(models=("gpt-oss-20b",), tokens=parse_counts("1,64")).caches
        'cold'
    """

    checkpoint: str = ""
    models: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (1, 8, 64)
    routings: tuple[str, ...] = ("uniform",)
    backends: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    layer: int | None = None
    tp: int = 1
    ep: int = 1
    dispatched: bool = False
    input: str = ""
    device: str = ""
    rounds: int = 11
    warm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.checkpoint) == bool(self.models):
            given = "both were given" if self.checkpoint else "neither was given"
            raise UsageError(
                f"a bench needs either a checkpoint or named models, and {given}",
                hint="leave one of them out"
                if self.checkpoint
                else "give CKPT, or --model with a name of `moectl list models`",
            )
        if not self.tokens or min(self.tokens) < 1 or max(self.tokens) > MAX_TOKENS:
            raise UsageError(f"token counts must be from 1 to {MAX_TOKENS}, got {list(self.tokens)}")
        if not self.routings:
            raise UsageError("a bench needs a routing", hint="give --routing uniform")
        for routing in self.routings:
            check_routing(routing)
        if self.rounds < 1:
            raise UsageError(f"a bench needs one round or more, got {self.rounds}")
        if self.dispatched and (self.ep == 1 or not self.models):
            raise UsageError(
                "--dispatched is about the tokens that reach one of several expert-parallel ranks",
                hint="give --model and an --ep above 1",
            )
        if self.input and ROUTER not in self.routings:
            raise UsageError(
                "--input is for the checkpoint's router, and no routing is `router`",
                hint="add --routing router",
            )

    @property
    def caches(self) -> str:
        """``warm`` or ``cold``."""
        return "warm" if self.warm else "cold"

    @property
    def files(self) -> tuple[str, ...]:
        """Input files: traces and tokens."""
        traces = [routing[len(TRACE) :] for routing in self.routings if routing.startswith(TRACE)]
        return (*traces, *([self.input] if self.input else []))

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the SHA-256 of `files`; UsageError if one cannot be read."""
        return {**asdict(self), "files": {name: _sha256(Path(name)) for name in self.files}}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_given(path, str(path), "a file") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_routing(text: str) -> None:
    """Raises UsageError if `text` is not a routing, or names a trace that does not exist."""
    if text == ROUTER:
        return
    if not text.startswith(TRACE):
        if text.partition(":")[0] not in DISTRIBUTIONS:
            names = (*map(spelled, DISTRIBUTIONS), f"{TRACE}FILE", ROUTER)
            raise UsageError(f"routing {text!r} is not known", hint=f"use {', '.join(names)}")
        check_distribution(text)
        return
    if not Path(text[len(TRACE) :]).is_file():
        raise UsageError(
            f"routing {text!r} names a file that does not exist",
            hint="write trace:FILE, with a .safetensors or .jsonl file of expert ids",
        )


EXTENDABLE = ("models", "tokens", "routings", "backends", "also")
"""Settings that a resumed run may extend; an empty list of backends stands for all of them."""

FIXED_OPTIONS = {
    "checkpoint": "CKPT",
    "layer": "--layer",
    "tp": "--tp",
    "ep": "--ep",
    "dispatched": "--dispatched",
    "input": "--input",
    "rounds": "--repeats",
    "warm": "--warm",
    "seed": "--seed",
}
"""Settings that must be equal for rows to be comparable, and their options.

``--device`` is not one of them, since rows record the device itself.
"""

_LATER = {"dispatched": False}
"""Values of settings in the files of versions that had no such setting."""


def merge_settings(first: Mapping[str, Any], *later: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, as plain data, of rows measured partly with `first`, partly with those after it."""
    merged = {**first}
    for name in EXTENDABLE:
        lists = [_as_list(settings.get(name)) for settings in (first, *later)]
        all_backends = name == "backends" and not all(lists)
        merged[name] = [] if all_backends else list(dict.fromkeys(item for items in lists for item in items))
    merged["files"] = {
        file: digest
        for settings in (first, *later)
        for file, digest in _as_dict(settings.get("files")).items()
    }
    return merged


def differences(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """Why rows of two settings, as plain data, are not comparable, a phrase each; empty if they are."""
    reasons = [
        f"{option} is {_value_text(later.get(name))}, was {_value_text(earlier.get(name))}"
        for name, option in FIXED_OPTIONS.items()
        if later.get(name, _LATER.get(name)) != earlier.get(name, _LATER.get(name))
    ]
    files = _as_dict(earlier.get("files"))
    return reasons + [
        f"the content of {name} has changed"
        for name, digest in _as_dict(later.get("files")).items()
        if files.get(name, digest) != digest
    ]


def other_software(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """Differences in device and versions between two runs, a phrase each."""
    reasons = []
    if later.get("device") != earlier.get("device"):
        reasons.append(
            f"the device is {later.get('device') or 'unknown'}, was {earlier.get('device') or 'unknown'}"
        )
    before, after = _as_dict(earlier.get("versions")), _as_dict(later.get("versions"))
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            label = "hash of moectl's kernels" if name == "kernels" else f"version of {name}"
            reasons.append(f"the {label} is {after.get(name) or 'none'}, was {before.get(name) or 'none'}")
    return reasons


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _as_dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return "not given" if value in (None, "") else str(value)


def parse_counts(text: str) -> tuple[int, ...]:
    """Token counts of a list such as ``1,8,64-1024*4``, without duplicates; UsageError for anything else.

    Example:
        >>> parse_counts("1,8,64-1024*4")
        (1, 8, 64, 256, 1024)
    """
    counts: list[int] = []
    for item in text.split(","):
        try:
            first, dash, rest = item.strip().partition("-")
            if not dash:
                counts.append(int(first))
                continue
            last, star, factor = rest.partition("*")
            value, end, times = int(first), int(last), int(factor) if star else 2
            if times < 2 or value < 1:
                raise ValueError(item)
            if value > end:
                raise UsageError(
                    f"token counts go up from A to B in A-B, got {item.strip()!r}",
                    hint=f"write {end}-{value}",
                )
            while value <= end:
                counts.append(value)
                value *= times
        except ValueError as error:
            raise UsageError(
                f"token counts must look like 1,8,64-1024*4, got {item.strip()!r} in {text!r}",
                hint="A-B*F counts from A to B by factors of F (2 by default)",
            ) from error
    if not counts or min(counts) < 1 or max(counts) > MAX_TOKENS:
        raise UsageError(f"token counts must be from 1 to {MAX_TOKENS}, got {text!r}")
    return tuple(dict.fromkeys(counts))

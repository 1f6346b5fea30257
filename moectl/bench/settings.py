"""What a bench is asked for: plain values, so that two runs can be told apart. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files.safe_reading import unreadable
from ..kernels.routing_distributions import DISTRIBUTIONS, check_distribution, spelled
from ..problem.moe_problem import MAX_TOKENS

ROUTER = "router"
"""The routing by the checkpoint's own router."""

TRACE = "trace:"
"""How the name of a routing begins that is read from a file."""


@dataclass(frozen=True)
class BenchSettings:
    """One bench: the cross product of layers, backends, routings and numbers of tokens.

    Attributes:
        checkpoint: a folder or a name; empty where `models` are asked for.
        models: names of layers with random weights (`moectl.problem.published_layers`), as ``NAME`` or
            ``NAME:FORMAT``.
        tokens: numbers of tokens of a call.
        routings: distributions as in `make_inputs`, ``trace:FILE`` or ``router``.
        backends: names; none for every usable one.
        layer: number of the one layer; None for the first of each group of equal layers.
        tp, ep: ranks that slice each expert, and ranks that whole experts are spread over; the bench is
            of the first rank.
        input: a safetensors file with ``x``, for ``router``; empty for random tokens.
        device: ``cpu`` or ``cuda``; empty for a GPU where there is one.
        rounds: measurements of each row, unless they would take too long.
        warm: leave weights in the cache, where they fit.
        seed: of tokens and routings.
    """

    checkpoint: str = ""
    models: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (1, 8, 64)
    routings: tuple[str, ...] = ("uniform",)
    backends: tuple[str, ...] = ()
    layer: int | None = None
    tp: int = 1
    ep: int = 1
    input: str = ""
    device: str = ""
    rounds: int = 11
    warm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.checkpoint) == bool(self.models):
            raise UsageError(
                "a bench is of a checkpoint or of named models, and of one of the two",
                hint="give CKPT, or --model with a name of `moectl bench --help`",
            )
        if not self.tokens or min(self.tokens) < 1 or max(self.tokens) > MAX_TOKENS:
            raise UsageError(f"token counts must be from 1 to {MAX_TOKENS}, got {list(self.tokens)}")
        if not self.routings:
            raise UsageError("a bench needs a routing", hint="give --routing uniform")
        for routing in self.routings:
            check_routing(routing)
        if self.rounds < 1:
            raise UsageError(f"a bench needs one round or more, got {self.rounds}")
        if self.input and ROUTER not in self.routings:
            raise UsageError(
                "--input is what the checkpoint's router routes, and no routing is `router`",
                hint="add --routing router",
            )

    @property
    def caches(self) -> str:
        """``warm`` or ``cold``."""
        return "warm" if self.warm else "cold"

    @property
    def files(self) -> tuple[str, ...]:
        """Files whose content decides what is measured."""
        traces = [routing[len(TRACE) :] for routing in self.routings if routing.startswith(TRACE)]
        return (*traces, *([self.input] if self.input else []))

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the SHA-256 of `files`; UsageError when one cannot be read."""
        return {**asdict(self), "files": {name: _sha256(Path(name)) for name in self.files}}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise unreadable(str(path), path, error, "a file") from error
    return digest.hexdigest()


def check_routing(text: str) -> None:
    """Raises UsageError when `text` names no routing of a bench, or a trace that is not a file."""
    if text == ROUTER:
        return
    if not text.startswith(TRACE):
        if text.partition(":")[0] not in DISTRIBUTIONS:
            known = (*map(spelled, DISTRIBUTIONS), f"{TRACE}FILE", ROUTER)
            raise UsageError(f"routing {text!r} is not known", hint=f"use {', '.join(known)}")
        check_distribution(text)
        return
    if not Path(text[len(TRACE) :]).is_file():
        raise UsageError(
            f"routing {text!r} is of a file that is not there",
            hint="write trace:FILE, with a .safetensors or .jsonl file of expert ids",
        )


GROWING = ("models", "tokens", "routings", "backends")
"""Settings that a later run of the same rows may add to; of backends, none stands for every one."""

OPTIONS = {
    "checkpoint": "CKPT",
    "layer": "--layer",
    "tp": "--tp",
    "ep": "--ep",
    "input": "--input",
    "rounds": "--repeats",
    "warm": "--warm",
    "seed": "--seed",
}
"""Settings without which rows are not of the same kind, as a user knows them.

What ``--device`` asks for is the machine's device, which rows tell.
"""


def both(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, as plain data, of rows of which some were asked for by `then` and some by `now`."""
    made = {**then}
    for name in GROWING:
        lists = [_listed(settings.get(name)) for settings in (then, now)]
        every = name == "backends" and not all(lists)
        made[name] = [] if every else list(dict.fromkeys(item for some in lists for item in some))
    made["files"] = {**_named(then.get("files")), **_named(now.get("files"))}
    return made


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Why rows of two settings, as plain data, do not belong together, a phrase each; none where they do."""
    found = [
        f"{option} is {_told(now.get(name))}, was {_told(then.get(name))}"
        for name, option in OPTIONS.items()
        if now.get(name) != then.get(name)
    ]
    files = _named(then.get("files"))
    return found + [
        f"{name} has other content than it had"
        for name, digest in _named(now.get("files")).items()
        if files.get(name, digest) != digest
    ]


def other_software(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """How the device and versions that rows were taken on differ, a phrase each."""
    found = []
    if now.get("device") != then.get("device"):
        found.append(
            f"the device is {now.get('device') or 'not known'}, was {then.get('device') or 'not known'}"
        )
    before, after = _named(then.get("versions")), _named(now.get("versions"))
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            called = "hash of moectl's kernels" if name == "kernels" else f"version of {name}"
            found.append(f"the {called} is {after.get(name) or 'none'}, was {before.get(name) or 'none'}")
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _named(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return "not given" if value in (None, "") else str(value)


def parse_counts(text: str) -> tuple[int, ...]:
    """Token counts of ``1,8,64-1024*4`` in order, each once; UsageError for anything else."""
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

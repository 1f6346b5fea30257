"""Engines by name: the one place that lists them."""

from __future__ import annotations

from collections.abc import Mapping

from ..environment.package_probes import Probe
from ..errors import UsageError
from .engine import Engine, newest
from .engines.moectl import MOECTL
from .engines.vllm_0_33_0 import VLLM_0_33_0
from .policy import Policy

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (VLLM_0_33_0, MOECTL)}
"""The default engine first; of one family, the newest version first."""


def engine_named(name: str = "") -> Engine:
    """The engine called `name`, or the newest of that family; the default one for an empty name.

    UsageError lists what there is.
    """
    if not name:
        return next(iter(ENGINES.values()))
    known = {**{engine.family: engine for engine in newest_engines()}, **ENGINES}
    if name not in known:
        raise UsageError(f"there is no policy {name!r}; known are {', '.join(ENGINES)}")
    return known[name]


def policy_named(name: str = "") -> Policy:
    """The policy of the engine that `engine_named` gives for `name`."""
    return engine_named(name).policy


def newest_engines() -> tuple[Engine, ...]:
    """One engine of each family."""
    return newest(ENGINES.values())


def engine_names() -> list[str]:
    """Every name that `engine_named` takes."""
    return list(dict.fromkeys([*ENGINES, *(engine.family for engine in ENGINES.values())]))


def known_packages() -> Mapping[str, Probe]:
    """Every optional package that an engine's rules ask for, by the name under which `Packages` lists it."""
    found: dict[str, Probe] = {}
    for engine in ENGINES.values():
        for name, probe in engine.packages.items():
            found.setdefault(name, probe)
    return found


def engine_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those of `env` that are some engine's."""
    engines = ENGINES.values()
    return {name: text for name, text in env.items() if any(engine.reads(name) for engine in engines)}

"""The registry of engines, by name."""

from __future__ import annotations

from collections.abc import Mapping

from ..environment.package_probes import Probe
from ..errors import UsageError
from .engine import Engine, newest
from .engines.moectl import MOECTL
from .engines.vllm_0_33_0 import VLLM_0_33_0
from .policy import Policy

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (VLLM_0_33_0, MOECTL)}
"""The default engine first; in a family, the newest version first."""


def engine_named(name: str = "") -> Engine:
    """The engine called `name`, or the newest of that family; the default engine for an empty name.

    Raises UsageError, with the known names, for any other.

    Example:
        >>> engine_named("moectl").name
        'moectl'
    """
    if not name:
        return next(iter(ENGINES.values()))
    by_name = {**{engine.family: engine for engine in newest_engines()}, **ENGINES}
    if name not in by_name:
        raise UsageError(f"there is no policy {name!r}; known are {', '.join(ENGINES)}")
    return by_name[name]


def versioned(name: str) -> str:
    """The engine called `name` as sentences call it; `name` itself if it is not registered.

    Example:
        >>> versioned("moectl")
        'moectl'
    """
    return ENGINES[name].versioned if name in ENGINES else name


def policy_named(name: str = "") -> Policy:
    """The policy of `engine_named(name)`."""
    return engine_named(name).policy


def newest_engines() -> tuple[Engine, ...]:
    """One engine of each family."""
    return newest(ENGINES.values())


def engine_names() -> list[str]:
    """Every name that `engine_named` accepts."""
    return list(dict.fromkeys([*ENGINES, *(engine.family for engine in ENGINES.values())]))


def known_packages() -> Mapping[str, Probe]:
    """The probe of every optional package that an engine's rules check, by its name in `Packages`."""
    probes: dict[str, Probe] = {}
    for engine in ENGINES.values():
        for name, probe in engine.packages.items():
            probes.setdefault(name, probe)
    return probes


def engine_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables in `env` that belong to an engine."""
    engines = ENGINES.values()
    return {name: text for name, text in env.items() if any(engine.reads(name) for engine in engines)}

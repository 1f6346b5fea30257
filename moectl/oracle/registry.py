"""The registry of engines, by name."""

from __future__ import annotations

from collections.abc import Mapping

from ..environment.package_probes import Probe, release_numbers
from ..errors import UsageError
from .engine import Engine, newest
from .engines.moectl import MOECTL
from .engines.sglang_0_5_23 import SGLANG_0_5_23
from .engines.tensorrt_llm import TENSORRT_LLM
from .engines.transformers_5 import TRANSFORMERS_5
from .engines.vllm import RELEASES as VLLM
from .policy import Policy

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (*VLLM, MOECTL, SGLANG_0_5_23, *TRANSFORMERS_5, TENSORRT_LLM)
}
"""The default engine first; in a family, the newest version first."""


def engine_named(name: str = "") -> Engine:
    """The engine called `name`, or the newest of that family; the default engine for an empty name.

    ``FAMILY==VERSION`` is the family's release VERSION, or the last known one before it.

    Raises UsageError, with the known names, for any other, and for a release before all known ones.

    Example:
        >>> engine_named("moectl").name
        'moectl'
    """
    if not name:
        return next(iter(ENGINES.values()))
    family, pinned, version = name.partition("==")
    if pinned:
        return _release(family.strip(), version.strip())
    by_name = {**{engine.family: engine for engine in newest_engines()}, **ENGINES}
    if name not in by_name:
        raise UsageError(f"there is no policy {name!r}; known are {', '.join(ENGINES)}")
    return by_name[name]


def _release(family: str, version: str) -> Engine:
    """The newest engine of `family` that is not newer than `version`."""
    known = [engine for engine in ENGINES.values() if release_numbers(engine.version)]
    releases = [engine for engine in known if engine.family == family]
    if not releases:
        pinned = ", ".join(dict.fromkeys(engine.family for engine in known))
        raise UsageError(f"there are no releases of {family!r}; known are those of {pinned}")
    wanted, title = release_numbers(version), releases[0].title
    if not wanted:
        raise UsageError(
            f"{family}=={version} names no release", hint=f"state one such as {family}=={releases[0].version}"
        )
    for engine in releases:
        if release_numbers(engine.version) <= wanted:
            return engine
    raise UsageError(
        f"moectl has no rules for {title} {version}: the oldest release that it knows is "
        f"{releases[-1].version}",
        hint=f"name {' or '.join(f'{family}=={engine.version}' for engine in releases)}",
    )


def answered_by(name: str) -> str:
    """That another release answers for ``FAMILY==VERSION``, in a sentence; empty if that one is known."""
    version = name.partition("==")[2].strip()
    if not version:
        return ""
    engine = engine_named(name)
    if not engine.other_version(version):
        return ""
    return (
        f"moectl has no rules for {engine.title} {version}: {engine.version}, the last known release before "
        "it, answers; its choice may differ"
    )


def versioned(name: str) -> str:
    """The engine called `name` as sentences call it; `name` itself if it is not registered.

    Example:
        >>> versioned("moectl")
        'moectl'
    """
    return ENGINES[name].versioned if name in ENGINES else name


def request_note(name: str, request: str) -> str:
    """Which release of the engine called `name` added or dropped the backend name `request`, as the end of a
    sentence; empty if it is unknown."""
    engine = ENGINES.get(name)
    if engine is None or engine.history is None:
        return ""
    history = engine.history.backends
    if gone := history.dropped(request, engine.version):
        return f", which {engine.title} {gone} dropped"
    added = history.added(request, engine.version)
    return f", which {engine.title} {added} added" if added else ""


def policy_named(name: str = "") -> Policy:
    """The policy of `engine_named(name)`."""
    return engine_named(name).policy


def newest_engines() -> tuple[Engine, ...]:
    """One engine of each family."""
    return newest(ENGINES.values())


def answering_engines() -> tuple[Engine, ...]:
    """One engine of each family that answers without being named."""
    return tuple(engine for engine in newest_engines() if engine.beside)


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

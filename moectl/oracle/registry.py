"""The registry of engines, by name. The rules of a release are made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module

from ..environment.package_probes import Probe, release_numbers
from ..errors import UsageError
from .engine import Engine
from .policy import Policy


@dataclass(frozen=True, slots=True)
class KnownRelease:
    """A release whose rules are not made yet: what is said of an engine without them.

    `package` is the subpackage of `engines` whose function `engine` makes it; the other fields are those
    of `Engine`.
    """

    package: str
    family: str
    title: str
    version: str = ""
    beside: bool = True

    @property
    def name(self) -> str:
        """As `Engine.name`."""
        return f"{self.family}-{self.version}" if self.version else self.family

    @property
    def versioned(self) -> str:
        """As `Engine.versioned`."""
        return f"{self.title} {self.version}".rstrip()

    def make(self) -> Engine:
        """The engine, with its rules."""
        engine: Engine = import_module(f".engines.{self.package}", __package__).engine(self.version)
        return engine


class Engines(MutableMapping[str, Engine]):
    """Engines by name; each is made when it is first looked up."""

    def __init__(self, releases: Iterable[KnownRelease]) -> None:
        self._rows: dict[str, Engine | KnownRelease] = {release.name: release for release in releases}

    def __getitem__(self, name: str) -> Engine:
        row = self._rows[name]
        if isinstance(row, KnownRelease):
            row = self._rows[name] = row.make()
        return row

    def __setitem__(self, name: str, engine: Engine) -> None:
        self._rows[name] = engine

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def known(self) -> tuple[Engine | KnownRelease, ...]:
        """Every release, made or not, for its name, title and version."""
        return tuple(self._rows.values())

    def made(self) -> tuple[str, ...]:
        """The names of the engines that were looked up."""
        return tuple(name for name, row in self._rows.items() if isinstance(row, Engine))

    def newest(self) -> tuple[Engine | KnownRelease, ...]:
        """The first release of each family."""
        by_family: dict[str, Engine | KnownRelease] = {}
        for row in self.known():
            by_family.setdefault(row.family, row)
        return tuple(by_family.values())


_VLLM = "0.33.0 0.32.0 0.31.0 0.30.0 0.28.0 0.26.0 0.24.0 0.23.0 0.22.0 0.20.0 0.19.0"
_TRANSFORMERS = "5.23.0 5.17.0"
ENGINES = Engines(
    (
        *(KnownRelease("vllm", "vllm", "vLLM", version) for version in _VLLM.split()),
        KnownRelease("moectl", "moectl", "moectl"),
        KnownRelease("sglang_0_5_23", "sglang", "SGLang", "0.5.23", beside=False),
        *(
            KnownRelease("transformers_5", "transformers", "transformers", version, beside=False)
            for version in _TRANSFORMERS.split()
        ),
        KnownRelease("tensorrt_llm", "tensorrt-llm", "TensorRT-LLM", "d1fce83", beside=False),
    )
)
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
        return ENGINES[next(iter(ENGINES))]
    family, pinned, version = name.partition("==")
    if pinned:
        return _release(family.strip(), version.strip())
    names = {**{row.family: row.name for row in ENGINES.newest()}, **dict(zip(ENGINES, ENGINES, strict=True))}
    if name not in names:
        raise UsageError(f"there is no policy {name!r}; known are {known_releases()}")
    return ENGINES[names[name]]


def _release(family: str, version: str) -> Engine:
    """The newest engine of `family` that is not newer than `version`."""
    known = [row for row in ENGINES.known() if release_numbers(row.version)]
    releases = [row for row in known if row.family == family]
    if not releases:
        pinned = ", ".join(dict.fromkeys(row.family for row in known))
        unversioned = family == "all" or any(row.family == family for row in ENGINES.known())
        raise UsageError(
            f"there are no releases of {family!r}; known are those of {pinned}",
            hint=f"name {family} without a release"
            if unversioned
            else f"name one of these, such as {known[0].family}",
        )
    wanted, title = release_numbers(version), releases[0].title
    if not wanted:
        raise UsageError(
            f"{family}=={version} names no release", hint=f"state one such as {family}=={releases[0].version}"
        )
    for row in releases:
        if release_numbers(row.version) <= wanted:
            return ENGINES[row.name]
    newest, oldest = releases[0].version, releases[-1].version
    others = f", or another release from {oldest} on" if len(releases) > 1 else ""
    raise UsageError(
        f"moectl has no rules for {title} {version}: the oldest release that it knows is {oldest}",
        hint=f"name {family}=={newest}{others}",
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
    return next((row.versioned for row in ENGINES.known() if row.name == name), name)


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
    return tuple(ENGINES[row.name] for row in ENGINES.newest())


def answering_engines() -> tuple[Engine, ...]:
    """One engine of each family that answers without being named."""
    return tuple(ENGINES[row.name] for row in ENGINES.newest() if row.beside)


def engine_names() -> list[str]:
    """Every name that `engine_named` accepts."""
    return list(dict.fromkeys([*ENGINES, *(row.family for row in ENGINES.known())]))


def known_releases() -> str:
    """The engines with their releases, in words.

    Example:
        >>> known_releases().endswith("TensorRT-LLM d1fce83")
        True
    """
    by_title: dict[str, list[str]] = {}
    for row in ENGINES.known():
        by_title.setdefault(row.title, []).append(row.version)
    *named, last = (f"{title} {_span(versions)}".rstrip() for title, versions in by_title.items())
    return f"{', '.join(named)} and {last}" if named else last


def _span(versions: list[str]) -> str:
    """The oldest and the newest of `versions`, which are newest first."""
    joined = " and " if len(versions) == 2 else " to "
    return joined.join(dict.fromkeys((versions[-1], versions[0])))


def known_packages() -> Mapping[str, Probe]:
    """The probe of every optional package that an engine's rules check, by its name in `Packages`.

    Older releases check no others; see `Difference.before`.
    """
    probes: dict[str, Probe] = {}
    for engine in newest_engines():
        for name, probe in engine.packages.items():
            probes.setdefault(name, probe)
    return probes


def engine_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables in `env` that belong to an engine."""
    engines = newest_engines()
    return {name: text for name, text in env.items() if any(engine.reads(name) for engine in engines)}

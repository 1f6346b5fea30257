"""Launches that were tuned on this machine: one file a device, an entry for each layer and software.

An entry has the fastest launch by number of tokens (`LaunchRow`), and of numbers of tokens that are not done
what was tried so far (`LaunchAttempt`), so that tuning goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..environment import Device
from ..errors import Unavailable
from ..files.records import from_json, to_json
from ..problem.moe_problem import MoEProblem
from .cache_file import CacheFileKind, Document, change, device_key, read
from .measurement_keys import built, layer_key

KIND = CacheFileKind("launches", 1)
"""Launches of moectl's own kernels."""

ENGINE = CacheFileKind("engine-launches", 1)
"""Launches that are found for an engine's tuned files; `LaunchRow.tile` has its choices."""

KINDS = (KIND, ENGINE)


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """The fastest launch of a layer for a number of tokens.

    Attributes:
        family, tile: the kernel family, and its tile's fields.
        us: microseconds of a call; `before_us` of the launch that was taken until then.
        error: relative difference from the portable kernels' result.
        tried, rejected: launches measured, and those that failed or were wrong.
        when: the time at which it was measured, as ISO 8601.
    """

    tokens: int
    family: str
    tile: Mapping[str, int]
    us: float
    before_us: float
    error: float
    tried: int
    rejected: int
    when: str


@dataclass(frozen=True, slots=True)
class LaunchAttempt:
    """One launch that was tried: `us` and `error`, or why it is out; neither while it runs.

    `begun` counts how often it was started: what twice did not come back is not tried a third time.
    """

    family: str
    tile: Mapping[str, int]
    us: float | None = None
    error: float | None = None
    why: str = ""
    begun: int = 1


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer under one set of software, as `built` and `layer_key` give them."""

    software: Mapping[str, str]
    layer: Mapping[str, Any]
    rows: tuple[LaunchRow, ...] = ()
    unfinished: Mapping[int, tuple[LaunchAttempt, ...]] = field(default_factory=dict)

    @property
    def stale(self) -> str:
        """What has changed since it was measured; empty when it holds."""
        now = built()
        changed = [name for name in now if self.software.get(name) != now[name]]
        return ", ".join(f"{name} {self.software.get(name, '?')}, now {now[name]}" for name in changed)

    def to_json(self) -> Document:
        """Plain data."""
        return {
            "built": to_json(self.software),
            "layer": to_json(self.layer),
            "rows": to_json(self.rows),
            "unfinished": to_json(self.unfinished),
        }


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """What one file holds: `note` says why it is ignored, and then there are no entries."""

    path: Path
    device: Mapping[str, Any] = field(default_factory=dict)
    entries: tuple[CachedLayer, ...] = ()
    note: str = ""


def load(path: Path, device: Device | None = None, kind: CacheFileKind = KIND) -> LaunchFile:
    """The entries of the file at `path`; of `device` where that is known."""
    document, note = read(path, kind, None if device is None else device_key(device))
    if document is None:
        return LaunchFile(path, note=note)
    try:
        return LaunchFile(path, document["device"], tuple(map(_entry, document["entries"])))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return LaunchFile(path, note=f"{path} is ignored: an entry is damaged ({error})")


def rows_of(problem: MoEProblem, device: Device) -> tuple[tuple[LaunchRow, ...], str]:
    """The tuned rows of a layer on a device that hold for this software, and why a file is ignored."""
    path = KIND.path(device)
    try:
        about = path.stat()
    except OSError:
        return (), ""
    found = _loaded(path, device, about.st_mtime_ns, about.st_size)
    key = layer_key(problem)
    rows = [row for entry in found.entries if entry.layer == key and not entry.stale for row in entry.rows]
    return tuple(rows), found.note


@lru_cache(maxsize=8)
def _loaded(path: Path, device: Device, changed_ns: int, size: int) -> LaunchFile:
    """The file as it was when last changed: a model's layers ask for it one after the other."""
    return load(path, device)


def _entry(item: Mapping[str, Any]) -> CachedLayer:
    software, layer = dict(item["built"]), dict(item["layer"])
    if not all(isinstance(value, str) for value in software.values()):
        raise ValueError("a version is no text")
    unfinished = {
        int(tokens): tuple(from_json(LaunchAttempt, one, "an attempt", ValueError) for one in tried)
        for tokens, tried in item["unfinished"].items()
    }
    return CachedLayer(software, layer, tuple(map(_row, item["rows"])), unfinished)


def _row(item: Any) -> LaunchRow:
    row = from_json(LaunchRow, item, "a row", ValueError)
    if row.tokens < 1 or row.us <= 0:
        raise ValueError(f"a row has {row.tokens} tokens in {row.us} us")
    return row


@dataclass(frozen=True, slots=True)
class LaunchesStore:
    """The entry of one layer on one device under today's software, on disk."""

    path: Path
    device: Device
    layer: Mapping[str, Any]
    kind: CacheFileKind = KIND

    @staticmethod
    def of(problem: MoEProblem, device: Device, kind: CacheFileKind = KIND) -> LaunchesStore:
        """The place of a layer; Unavailable when the file there is not moectl's."""
        path = kind.path(device)
        found = load(path, device, kind)
        if found.note:
            raise Unavailable(f"the cache cannot be used: {found.note}", hint=f"remove {path}")
        return LaunchesStore(path, device, layer_key(problem), kind)

    def entry(self) -> CachedLayer:
        """What is known so far."""
        entries = load(self.path, self.device, self.kind).entries
        return next((e for e in entries if self._is_own(e)), CachedLayer(built(), dict(self.layer)))

    def row(self, tokens: int) -> LaunchRow | None:
        """The finished row of a number of tokens."""
        return next((row for row in self.entry().rows if row.tokens == tokens), None)

    def attempts(self, tokens: int) -> tuple[LaunchAttempt, ...]:
        """What was tried of a number of tokens that is not done."""
        return self.entry().unfinished.get(tokens, ())

    def note(self, tokens: int, attempt: LaunchAttempt) -> None:
        """Keeps an attempt instead of an earlier one of the same launch."""

        def with_it(entry: CachedLayer) -> CachedLayer:
            kept = [a for a in entry.unfinished.get(tokens, ()) if not _same(a, attempt)]
            return replace(entry, unfinished={**entry.unfinished, tokens: (*kept, attempt)})

        self._edit(with_it)

    def finish(self, row: LaunchRow) -> None:
        """Keeps the row of a number of tokens, and drops what was tried on the way to it."""

        def with_it(entry: CachedLayer) -> CachedLayer:
            rows = {old.tokens: old for old in (*entry.rows, row)}
            left = {tokens: tried for tokens, tried in entry.unfinished.items() if tokens != row.tokens}
            return replace(entry, rows=tuple(rows[tokens] for tokens in sorted(rows)), unfinished=left)

        self._edit(with_it)

    def forget(self, tokens: int) -> None:
        """Drops what is known of a number of tokens."""

        def without(entry: CachedLayer) -> CachedLayer:
            left = {known: tried for known, tried in entry.unfinished.items() if known != tokens}
            return replace(entry, rows=tuple(r for r in entry.rows if r.tokens != tokens), unfinished=left)

        self._edit(without)

    def _is_own(self, entry: CachedLayer) -> bool:
        return entry.layer == self.layer and not entry.stale

    def _edit(self, made: Callable[[CachedLayer], CachedLayer]) -> None:
        def edit(entries: list[Any]) -> None:
            known = [_entry(item) for item in entries]
            own = next((i for i, entry in enumerate(known) if self._is_own(entry)), len(known))
            before = known[own] if own < len(known) else CachedLayer(built(), dict(self.layer))
            entries[own:] = [made(before).to_json(), *entries[own + 1 :]]

        change(self.path, self.kind, device_key(self.device), edit)


def _same(one: LaunchAttempt, other: LaunchAttempt) -> bool:
    return one.family == other.family and dict(one.tile) == dict(other.tile)


def clear(path: Path, drop: Callable[[CachedLayer], bool], kind: CacheFileKind = KIND) -> int:
    """Drops the entries of the file at `path` for which `drop` holds; how many there were.

    A file that is ignored is removed whole, and counts as none.
    """
    found = load(path, kind=kind)
    if found.note:
        path.unlink(missing_ok=True)
        return 0
    gone = [entry for entry in found.entries if drop(entry)]
    if len(gone) == len(found.entries):
        path.unlink(missing_ok=True)
    elif gone:

        def edit(entries: list[Any]) -> None:
            entries[:] = [item for item in entries if not drop(_entry(item))]

        change(path, kind, found.device, edit)
    return len(gone)

"""Kernel launches tuned on this machine: one file per device, one entry per layer and software version.

An entry holds the fastest launch for each number of tokens (`LaunchRow`) and, for interrupted tuning, the
launches tried so far (`LaunchAttempt`), so that tuning resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..environment import Device
from ..errors import Unavailable
from ..files.records import Above0, Count, From0, Size, to_json
from ..problem.moe_problem import MoEProblem
from .cache_file import CacheFileKind, DeviceKey, change, device_key, read, remove
from .measurement_keys import LayerKey, built, layer_key


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """The fastest launch of a layer for one number of tokens.

    Attributes:
        family, tile: the kernel family, and the fields of its tile.
        us: microseconds per call; `before_us`: of the launch used before tuning.
        error: relative difference from the portable kernels' result.
        tried, rejected: number of launches measured, and of those that failed or gave wrong results.
        when: time of the measurement, ISO 8601.
    """

    tokens: Count
    family: str
    tile: Mapping[str, int]
    us: Above0
    before_us: From0
    error: From0
    tried: Size
    rejected: Size
    when: str


@dataclass(frozen=True, slots=True)
class LaunchAttempt:
    """One launch that was tried: `us` and `error`, or `why` it was rejected; neither while it runs.

    `begun` counts its starts: a launch that did not return twice is not tried a third time.
    """

    family: str
    tile: Mapping[str, int]
    us: Above0 | None = None
    error: From0 | None = None
    why: str = ""
    begun: Size = 1


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The launches of one layer with one set of software versions, as `measurement_keys.built`."""

    built: Mapping[str, str]
    layer: LayerKey
    rows: tuple[LaunchRow, ...] = ()
    unfinished: Mapping[int, tuple[LaunchAttempt, ...]] = field(default_factory=dict)

    @property
    def stale(self) -> str:
        """The versions that changed since the measurement; empty when it is still valid."""
        now = built()
        changed = [name for name in now if self.built.get(name) != now[name]]
        return ", ".join(f"{name} {self.built.get(name, '?')}, now {now[name]}" for name in changed)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON values."""
        return {**to_json(self), "layer": self.layer.to_json()}


KIND = CacheFileKind("launches", 2, CachedLayer)
"""Launches of moectl's own kernels. Version 1 stored the kernel family under another key."""

ENGINE = CacheFileKind("engine-launches", 2, CachedLayer)
"""Launches for an engine's own tuning files; `LaunchRow.tile` holds its parameters."""

KINDS = (KIND, ENGINE)


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """The contents of one file; if it cannot be used, `note` says why and there are no entries."""

    path: Path
    device: DeviceKey | None = None
    entries: tuple[CachedLayer, ...] = ()
    note: str = ""


LaunchFileKind = CacheFileKind[CachedLayer]


def load(path: Path, device: Device | None = None, kind: LaunchFileKind = KIND) -> LaunchFile:
    """The entries of the file at `path`, which is ignored unless it is for `device` (None: any device)."""
    found = read(path, kind, None if device is None else device_key(device))
    return LaunchFile(path, found.device, found.entries, found.note)


def rows_of(problem: MoEProblem, device: Device) -> tuple[tuple[LaunchRow, ...], str]:
    """The tuned rows of a layer on a device that are valid for this software, and why a file is ignored."""
    path = KIND.path(device)
    try:
        status = path.stat()
    except OSError:
        return (), ""
    file = _loaded(path, device, status.st_mtime_ns, status.st_size)
    key = layer_key(problem)
    rows = [row for entry in file.entries if entry.layer == key and not entry.stale for row in entry.rows]
    return tuple(rows), file.note


@lru_cache(maxsize=8)
def _loaded(path: Path, device: Device, changed_ns: int, size: int) -> LaunchFile:
    """The file, cached until its time or size changes: each layer of a model looks it up."""
    return load(path, device)


@dataclass(frozen=True, slots=True)
class LaunchesStore:
    """The entry on disk of one layer on one device, for the current software."""

    path: Path
    device: Device
    layer: LayerKey
    kind: LaunchFileKind = KIND

    @staticmethod
    def of(problem: MoEProblem, device: Device, kind: LaunchFileKind = KIND) -> LaunchesStore:
        """The store of a layer; Unavailable when its file cannot be used."""
        path = kind.path(device)
        file = load(path, device, kind)
        if file.note:
            raise Unavailable(f"the cache cannot be used: {file.note}", hint=f"remove {path}")
        return LaunchesStore(path, device, layer_key(problem), kind)

    def entry(self) -> CachedLayer:
        """The entry as stored; an empty one if there is none yet."""
        entries = load(self.path, self.device, self.kind).entries
        return next((e for e in entries if self._is_own(e)), CachedLayer(built(), self.layer))

    def row(self, tokens: int) -> LaunchRow | None:
        """The finished row for a number of tokens; None if it is not tuned."""
        return next((row for row in self.entry().rows if row.tokens == tokens), None)

    def attempts(self, tokens: int) -> tuple[LaunchAttempt, ...]:
        """The launches tried so far for a number of tokens that is not finished."""
        return self.entry().unfinished.get(tokens, ())

    def note(self, tokens: int, attempt: LaunchAttempt) -> None:
        """Stores an attempt, replacing an earlier one of the same launch."""

        def updated(entry: CachedLayer) -> CachedLayer:
            kept = [a for a in entry.unfinished.get(tokens, ()) if not _same(a, attempt)]
            return replace(entry, unfinished={**entry.unfinished, tokens: (*kept, attempt)})

        self._edit(updated)

    def finish(self, row: LaunchRow) -> None:
        """Stores the final row for a number of tokens, and drops its attempts."""

        def updated(entry: CachedLayer) -> CachedLayer:
            rows = {old.tokens: old for old in (*entry.rows, row)}
            left = {tokens: tried for tokens, tried in entry.unfinished.items() if tokens != row.tokens}
            return replace(entry, rows=tuple(rows[tokens] for tokens in sorted(rows)), unfinished=left)

        self._edit(updated)

    def forget(self, tokens: int) -> None:
        """Drops the row and the attempts for a number of tokens."""

        def without(entry: CachedLayer) -> CachedLayer:
            left = {known: tried for known, tried in entry.unfinished.items() if known != tokens}
            return replace(entry, rows=tuple(r for r in entry.rows if r.tokens != tokens), unfinished=left)

        self._edit(without)

    def _is_own(self, entry: CachedLayer) -> bool:
        return entry.layer == self.layer and not entry.stale

    def _edit(self, update: Callable[[CachedLayer], CachedLayer]) -> None:
        def edit(layers: tuple[CachedLayer, ...]) -> tuple[CachedLayer, ...]:
            own = next((i for i, entry in enumerate(layers) if self._is_own(entry)), len(layers))
            before = layers[own] if own < len(layers) else CachedLayer(built(), self.layer)
            return (*layers[:own], update(before), *layers[own + 1 :])

        change(self.path, self.kind, device_key(self.device), edit)


def _same(one: LaunchAttempt, other: LaunchAttempt) -> bool:
    return one.family == other.family and dict(one.tile) == dict(other.tile)


def clear(path: Path, drop: Callable[[CachedLayer], bool], kind: LaunchFileKind = KIND) -> int:
    """Deletes the entries of the file at `path` for which `drop` is true, and returns their number.

    A file that cannot be used is deleted; it counts as 0 entries.
    """
    file = load(path, kind=kind)
    if file.device is None:
        remove(path)
        return 0
    dropped = 0

    def kept(entries: tuple[CachedLayer, ...]) -> list[CachedLayer]:
        nonlocal dropped
        left = [entry for entry in entries if not drop(entry)]
        dropped = len(entries) - len(left)
        return left

    if any(drop(entry) for entry in file.entries):
        change(path, kind, file.device, kept)
    return dropped

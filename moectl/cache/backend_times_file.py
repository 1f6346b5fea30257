"""Times of backends measured on this machine (`moectl bench --save`): one file per device."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..environment import Device
from ..errors import UsageError
from ..files.records import to_json
from ..problem.moe_problem import MoEProblem
from .backend_times import BackendTime, MeasuredTimes, current_name, is_time
from .cache_file import CacheFileKind, change, device_key, read
from .measurement_keys import LayerKey, built, layer_key


@dataclass(frozen=True, slots=True)
class TimesEntry:
    """Times of one layer, taken with one moectl (`built`) and these `versions` of packages."""

    built: Mapping[str, str]
    layer: LayerKey
    versions: Mapping[str, str]
    rows: tuple[BackendTime, ...]

    def to_json(self) -> dict[str, Any]:
        """The entry as plain data."""
        return {**to_json(self), "layer": self.layer.to_json()}

    @property
    def times(self) -> tuple[BackendTime, ...]:
        """The rows, with the backends' names as they are now."""
        return tuple(replace(row, backend=current_name(row.backend)) for row in self.rows)


KIND = CacheFileKind("measured", 1, TimesEntry)


@dataclass(frozen=True, slots=True)
class CachedTimes:
    """The cached times of one layer on one device, with notes for the user."""

    path: Path
    measured: MeasuredTimes = field(default_factory=MeasuredTimes)
    notes: tuple[str, ...] = ()


def now() -> str:
    """The current UTC time in seconds, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def save(
    device: Device,
    problem: MoEProblem,
    rows: Sequence[BackendTime],
    *,
    versions: Mapping[str, str],
    source: str,
    when: str = "",
) -> Path:
    """Stores times of a layer, replacing older ones of the same cases, and returns the file's path.

    Rows measured with other package versions are kept in a separate entry.

    Args:
        device: the device they were measured on.
        problem: one rank's share of the layer, as it was measured.
        rows: the times.
        versions: of the packages that the backends come from, see `known`.
        source: the tool that measured them, such as ``moectl bench``.
        when: time of the measurement, ISO 8601; now by default.

    Raises:
        UsageError: a time is none that a call can take, or an error is not finite.
        Unavailable: the cache cannot be written.
    """
    for row in rows:
        if not (is_time(row.us) and math.isfinite(row.error)):
            raise UsageError(f"a time of {row.us} us with an error of {row.error} is no measurement")
    path, software, layer = KIND.path(device), built(), layer_key(problem)
    digest = _digest(versions)
    stamped = [replace(row, source=source, when=when or now(), software=digest) for row in rows]

    def edit(entries: tuple[TimesEntry, ...]) -> list[TimesEntry]:
        fresh = {(timed.backend, timed.cell) for timed in stamped}
        merged: list[BackendTime] = []
        others: list[TimesEntry] = []
        for entry in entries:
            if (entry.built, entry.layer) != (software, layer):
                others.append(entry)
                continue
            kept = tuple(old for old in entry.times if (old.backend, old.cell) not in fresh)
            if entry.versions == dict(versions):
                merged += kept
            elif kept:
                others.append(replace(entry, rows=kept))
        return [*others, TimesEntry(software, layer, dict(versions), (*merged, *stamped))]

    change(path, KIND, device_key(device), edit)
    return path


def _digest(versions: Mapping[str, str]) -> str:
    """8 hexadecimal digits that identify `versions`."""
    text = json.dumps(dict(versions), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def known(device: Device, problem: MoEProblem, versions: Mapping[str, str] | None = None) -> CachedTimes:
    """The times of a layer on a device that are valid for this software.

    `versions` are the packages' current versions: times measured with a different version are ignored, with
    a note.
    """
    path = KIND.path(device)
    found = read(path, KIND, device_key(device))
    notes, rows = [found.note] if found.note else [], list[BackendTime]()
    for entry in found.entries:
        if entry.layer != layer_key(problem):
            continue
        changed = [name for name, value in built().items() if entry.built.get(name) != value]
        before, after = entry.versions, versions or {}
        both = [name for name in before if before[name] and after.get(name)]
        changed += [name for name in both if before[name] != after[name] and name not in changed]
        if changed:
            notes.append(f"times of other software are not used ({', '.join(changed)} changed): {path}")
        else:
            rows += [replace(row, source=f"{row.source} in {path}") for row in entry.times]
    return CachedTimes(path, MeasuredTimes(tuple(rows)), tuple(dict.fromkeys(notes)))

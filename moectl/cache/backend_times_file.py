"""Times of backends on this machine, as `moectl bench --save` keeps them: one file a device."""

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
from ..files.records import from_json, to_json
from ..problem.moe_problem import MoEProblem
from .backend_times import BackendTime, MeasuredTimes
from .cache_file import CacheFileKind, change, device_key, read
from .measurement_keys import built, layer_key

KIND = CacheFileKind("measured", 1)


@dataclass(frozen=True, slots=True)
class Known:
    """What the cache has of one layer on one device, and what a person should know of it."""

    path: Path
    measured: MeasuredTimes = field(default_factory=MeasuredTimes)
    notes: tuple[str, ...] = ()


def now() -> str:
    """The time in UTC to the second, as ISO 8601."""
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
    """Keeps `rows` of a layer, in place of older ones of the same cells; the file they are in.

    Rows of other versions stay what they are: an entry of their own.

    Args:
        problem: one rank's share, as it was measured.
        versions: of the packages that the backends come from (`known`).
        source: what measured them, such as ``moectl bench``.
        when: they were measured, as ISO 8601; now by default.

    Raises UsageError for a time that is none, Unavailable when the cache cannot be written.
    """
    for row in rows:
        if not (math.isfinite(row.us) and row.us > 0 and math.isfinite(row.error)):
            raise UsageError(f"a time of {row.us} us with an error of {row.error} is no measurement")
    path, software, layer = KIND.path(device), built(), layer_key(problem)
    told = _digest(versions)
    stamped = [replace(row, source=source, when=when or now(), software=told) for row in rows]

    def edit(entries: list[Any]) -> None:
        own = {"built": software, "layer": layer, "versions": dict(versions)}
        fresh = {(timed.backend, timed.cell) for timed in stamped}
        same = [item for item in entries if item["built"] == software and item["layer"] == layer]
        merged: list[BackendTime] = []
        for item in same:
            kept = [old for old in map(_timed, item["rows"]) if (old.backend, old.cell) not in fresh]
            item["rows"] = to_json(kept)
            if item["versions"] == own["versions"]:
                merged += kept
        done = [item for item in same if not item["rows"] or item["versions"] == own["versions"]]
        entries[:] = [item for item in entries if item not in done]
        entries.append({**own, "rows": to_json((*merged, *stamped))})

    change(path, KIND, device_key(device), edit)
    return path


def _timed(item: Any) -> BackendTime:
    return from_json(BackendTime, item, "a row", ValueError)


def _digest(versions: Mapping[str, str]) -> str:
    """8 digits that tell `versions` from others."""
    text = json.dumps(dict(versions), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def known(device: Device, problem: MoEProblem, versions: Mapping[str, str] | None = None) -> Known:
    """What was measured of a layer on a device with this software; nothing that is in doubt.

    `versions` are those of packages now: what was measured with another one of a package is not used.
    """
    path = KIND.path(device)
    document, note = read(path, KIND, device_key(device))
    if document is None:
        return Known(path, notes=(note,) if note else ())
    key, notes, rows = layer_key(problem), [], list[BackendTime]()
    try:
        for item in document["entries"]:
            if item["layer"] != key:
                continue
            made = [_timed(row) for row in item["rows"]]
            if not all(row.us > 0 and row.tokens > 0 for row in made):
                raise ValueError("a time is not positive")
            changed = [name for name, value in built().items() if item["built"].get(name) != value]
            before, after = item["versions"], versions or {}
            both = [name for name in before if before[name] and after.get(name)]
            changed += [name for name in both if before[name] != after[name] and name not in changed]
            if changed:
                notes.append(f"times of other software are not used ({', '.join(changed)} changed): {path}")
            else:
                rows += [replace(row, source=f"{row.source} in {path}") for row in made]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Known(path, notes=(f"{path} is ignored: an entry is damaged ({error})",))
    return Known(path, MeasuredTimes(tuple(rows)), tuple(dict.fromkeys(notes)))

"""Tables and documents of tuned launches: the results of a search, and the contents of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...cache.cache_file import device_key
from ...cache.launches_file import KINDS, CachedLayer, LaunchFile, LaunchFileKind, LaunchRow, clear, load
from ...cache.measurement_keys import layer_key
from ...files.records import to_json
from ..output import count, table

if TYPE_CHECKING:
    from ...tuning.tune import Tuning
    from ...tuning.tuned_layers import TunedLayer


def tile_words(tile: Any) -> str:
    """A tile's fields as ``name=value``, separated by blanks."""
    return " ".join(f"{name}={value}" for name, value in dict(tile).items())


def search_document(tuning: Tuning) -> dict[str, Any]:
    """A search's results as plain data."""
    result = tuning.found
    return {
        "device": to_json(device_key(tuning.device)),
        "cache": str(tuning.path),
        "refused": dict(tuning.refused),
        "done": result.done,
        "rows": [
            {"layer": case.name, "state": state, **asdict(row)}
            for state, rows in (("new", result.rows), ("kept", result.kept))
            for case, row in rows
        ],
        "left": [{"layer": case.name, "tokens": case.tokens} for case in result.left],
    }


SEARCH = ("layer", "M", "us", "before", "gain", "tried", "rejected", "launch")


def draw_search(tuning: Tuning, console: Any) -> None:
    """Prints a search's results as a table."""
    result = tuning.found
    launches = table(*SEARCH, right=SEARCH[1:-1], optional=("rejected", "tried"))
    rows = [(case, row, "") for case, row in result.rows]
    rows += [(case, row, " (cached)") for case, row in result.kept]
    for case, row, state in sorted(rows, key=lambda item: (item[0].name, item[0].tokens)):
        launches.add_row(case.name, *_cells(row), f"{row.family} {tile_words(row.tile)}{state}")
    for case in result.left:
        launches.add_row(case.name, str(case.tokens), *["-"] * 5, "not done")
    console.print(launches)
    console.print(f"{tuning.device.name}; cached in {tuning.path}")


def _cells(row: LaunchRow) -> tuple[str, ...]:
    gain = f"{100 * (1 - row.us / row.before_us):.0f}%"
    return (
        str(row.tokens),
        f"{row.us:.1f}",
        f"{row.before_us:.1f}",
        gain,
        str(row.tried),
        str(row.rejected),
    )


@dataclass(frozen=True)
class Listed:
    """Selected entries of the cache with their files; `ignored` are files that are not used at all."""

    entries: tuple[tuple[LaunchFileKind, LaunchFile, CachedLayer], ...]
    ignored: tuple[tuple[LaunchFileKind, LaunchFile], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "entries": [
                {
                    "file": str(file.path),
                    "of": kind.folder,
                    "device": to_json(file.device),
                    "stale": entry.stale or None,
                    **entry.to_json(),
                }
                for kind, file, entry in self.entries
            ],
            "ignored": [{"file": str(file.path), "why": file.note} for _, file in self.ignored],
        }

    def brief(self) -> list[str]:
        """One line per entry: device, sizes, number of rows, and whether it is used."""
        return [
            f"{file.device.name if file.device else ''}\t{entry.layer}\t{len(entry.rows)}\t"
            f"{'stale' if entry.stale else 'used'}"
            for _, file, entry in self.entries
        ]

    def clear(self) -> int:
        """Drops these entries, and those of ignored files; returns how many."""
        selected = [entry for _, _, entry in self.entries]
        files = {file.path: kind for kind, file, _ in self.entries}
        files |= {file.path: kind for kind, file in self.ignored}
        return sum(clear(path, lambda entry: entry in selected, kind) for path, kind in files.items())


def listed(layers: Sequence[TunedLayer] | None, stale: bool) -> Listed:
    """Cached launches of `layers`, or of all layers; with `stale` only those that are not used."""
    keys = None if layers is None else [layer_key(layer.problem) for layer in layers]
    files = [(kind, load(path, kind=kind)) for kind in KINDS for path in kind.files()]
    return Listed(
        tuple(
            (kind, file, entry)
            for kind, file in files
            for entry in file.entries
            if (keys is None or entry.layer in keys) and (not stale or entry.stale)
        ),
        tuple((kind, file) for kind, file in files if file.note) if keys is None else (),
    )


def draw_list(cached: Listed, dropped: int | None, console: Any) -> None:
    """Prints cached launches as a table, and how many layers were dropped."""
    launches = table("device", "layer", "M", "us", "launch", "used", right=("M", "us"))
    for _, file, entry in cached.entries:
        device = file.device.name if file.device else ""
        words, state = str(entry.layer), f"no: {entry.stale}" if entry.stale else "yes"
        for row in entry.rows:
            launch = f"{row.family} {tile_words(row.tile)}"
            launches.add_row(device, words, str(row.tokens), f"{row.us:.1f}", launch, state)
        for tokens, attempts in entry.unfinished.items():
            launch = f"{count(len(attempts), 'tile')} tried, not done"
            launches.add_row(device, words, str(tokens), "-", launch, state)
    if cached.entries:
        console.print(launches)
    for _, file in cached.ignored:
        console.print(file.note)
    if dropped is not None:
        console.print(f"{count(dropped, 'layer')} dropped")
    elif not cached.entries:
        console.print("nothing is cached")

"""How tuned launches are shown: what a search found, and what the cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.folder import device_key
from .output import count, table

if TYPE_CHECKING:
    from ..cache.launches import Entry, Row
    from ..tuning.here import Tuning
    from ..tuning.layers import Layer


def tile_words(tile: Any) -> str:
    """A tile's fields in one phrase."""
    return " ".join(f"{name}={value}" for name, value in dict(tile).items())


def search_document(tuning: Tuning) -> dict[str, Any]:
    """What a search found, as plain data."""
    found = tuning.found
    return {
        "device": device_key(tuning.device),
        "cache": str(tuning.path),
        "refused": dict(tuning.refused),
        "done": found.done,
        "rows": [
            {"layer": cell.name, "state": state, **asdict(row)}
            for state, rows in (("new", found.rows), ("kept", found.kept))
            for cell, row in rows
        ],
        "left": [{"layer": cell.name, "tokens": cell.tokens} for cell in found.left],
    }


SEARCH = ("layer", "M", "us", "was", "gain", "tried", "out", "launch")


def draw_search(tuning: Tuning, console: Any) -> None:
    """What a search found, as a table."""
    found = tuning.found
    made = table(*SEARCH, right=SEARCH[1:-1])
    rows = [(cell, row, "") for cell, row in found.rows] + [(c, r, " (kept)") for c, r in found.kept]
    for cell, row, state in sorted(rows, key=lambda item: (item[0].name, item[0].tokens)):
        made.add_row(cell.name, *_cells(row), f"{row.regime} {tile_words(row.tile)}{state}")
    for cell in found.left:
        made.add_row(cell.name, str(cell.tokens), *["-"] * 5, "not done")
    console.print(made)
    console.print(f"{tuning.device.name}; kept in {tuning.path}", markup=False)


def _cells(row: Row) -> tuple[str, ...]:
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
    """Entries of the cache by file, those that were asked for; `notes` of files that are ignored."""

    entries: tuple[tuple[Path, dict[str, Any], Entry], ...]
    notes: tuple[tuple[Path, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "entries": [
                {"file": str(path), "device": device, "stale": entry.stale or None, **entry.to_json()}
                for path, device, entry in self.entries
            ],
            "ignored": [{"file": str(path), "why": note} for path, note in self.notes],
        }

    def brief(self) -> list[str]:
        """One line an entry: device, sizes, how many rows, and whether it is used."""
        from ..cache.keys import layer_words

        return [
            f"{device['name']}\t{layer_words(dict(entry.layer))}\t{len(entry.rows)}\t"
            f"{'stale' if entry.stale else 'used'}"
            for _, device, entry in self.entries
        ]

    def clear(self) -> int:
        """Drops all of it, files that are ignored included; how many entries there were."""
        from ..cache.launches import clear

        wanted = [entry for _, _, entry in self.entries]
        paths = dict.fromkeys([*(path for path, _, _ in self.entries), *(path for path, _ in self.notes)])
        return sum(clear(path, lambda entry: entry in wanted) for path in paths)


def listed(layers: Sequence[Layer] | None, stale: bool) -> Listed:
    """What the cache keeps of `layers`, or of all; only what is not used with `stale`."""
    from ..cache.keys import layer_key
    from ..cache.launches import KIND, load

    keys = None if layers is None else [layer_key(layer.problem) for layer in layers]
    files = [load(path) for path in KIND.files()]
    return Listed(
        tuple(
            (found.path, dict(found.device), entry)
            for found in files
            for entry in found.entries
            if (keys is None or entry.layer in keys) and (not stale or entry.stale)
        ),
        tuple((found.path, found.note) for found in files if found.note) if keys is None else (),
    )


def draw_list(found: Listed, dropped: int | None, console: Any) -> None:
    """The cache as a table, and what was dropped of it."""
    from ..cache.keys import layer_words

    made = table("device", "layer", "M", "us", "launch", "used", right=("M", "us"))
    for _, device, entry in found.entries:
        words, state = layer_words(dict(entry.layer)), f"no: {entry.stale}" if entry.stale else "yes"
        for row in entry.rows:
            launch = f"{row.regime} {tile_words(row.tile)}"
            made.add_row(device["name"], words, str(row.tokens), f"{row.us:.1f}", launch, state)
        for tokens, attempts in entry.unfinished.items():
            launch = f"{count(len(attempts), 'tile')} tried, not done"
            made.add_row(device["name"], words, str(tokens), "-", launch, state)
    if found.entries:
        console.print(made)
    for _, note in found.notes:
        console.print(note, markup=False)
    if dropped is not None:
        console.print(f"{count(dropped, 'layer')} dropped", markup=False)
    elif not found.entries:
        console.print("nothing is kept", markup=False)

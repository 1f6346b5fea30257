# ruff: noqa: PTH120 - paths are text in logs
"""What a disk may hold after the power was cut: the changes until then, with what was synced or without."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .watched_disk import DiskChange, DiskLog

CUTS = ("cut, synced", "cut, names first", "cut, data first", "cut, some")
"""What of the changes that nothing has synced reached the disk: nothing; what is in directories, but not in
files; what is in files, but not in directories; of each directory the first ones, and any of files'."""

_IN_FILES = ("write", "resize")


def after(log: DiskLog, step: int) -> Mapping[str, bytes | Path]:
    """The files behind `step` changes, by path; of links to others their paths.

    Directories are paths that end with a slash.
    """
    return _replayed(log, log.changes[:step], zeros=True)


def cut(log: DiskLog, step: int, kind: str, dice: random.Random) -> Mapping[str, bytes | Path]:
    """The files after the power was cut behind `step` changes, as `after`."""
    kept = [*_kept(log, log.changes[:step], kind, dice)]
    return _replayed(log, kept, zeros=dice.random() < 0.5)


def _kept(log: DiskLog, done: Sequence[DiskChange], kind: str, dice: random.Random) -> Iterator[DiskChange]:
    synced_files: set[int] = set()
    synced_folders: set[str] = set()
    synced = [False] * len(done)
    for at in range(len(done) - 1, -1, -1):
        change = done[at]
        if change.name == "sync":
            (synced_files.add(change.file) if change.file else synced_folders.add(change.path))
        elif change.name in _IN_FILES:
            synced[at] = change.file in synced_files
        else:
            synced[at] = bool(_folders_of(change) & synced_folders)
            if change.name == "create" and not synced[at]:
                # That an existing file was emptied is a change of the file.
                existing = any(number == change.file for number, _ in log.begin.values())
                synced[at] = existing and change.file in synced_files
    open_folders: dict[str, bool] = {}
    for change, is_synced in zip(done, synced, strict=True):
        if change.name == "sync":
            continue
        in_file = change.name in _IN_FILES
        if is_synced or kind == ("cut, data first" if in_file else "cut, names first"):
            yield change
        elif kind == "cut, some":
            if in_file:
                if dice.random() < 0.5:
                    yield change
            elif all(open_folders.get(folder, True) for folder in _folders_of(change)):
                if dice.random() < 0.6:
                    yield change
                else:
                    open_folders.update(dict.fromkeys(_folders_of(change), False))


def _folders_of(change: DiskChange) -> set[str]:
    """The directories whose entries a change changes."""
    renamed = {os.path.dirname(change.before)} if change.name in ("rename", "exchange") else set()
    return {os.path.dirname(change.path), *renamed}


def _replayed(log: DiskLog, changes: Sequence[DiskChange], *, zeros: bool) -> Mapping[str, bytes | Path]:
    names: dict[str, int | Path] = {path: number for path, (number, _) in log.begin.items()}
    contents = {number: bytearray(data) for number, data in log.begin.values()}
    folders = set(log.folders)
    for change in changes:
        path, data = change.path, contents.setdefault(change.file, bytearray())
        if change.name == "create":
            names[path] = change.file
            data.clear()
        elif change.name == "write":
            data.extend(bytes(max(0, change.offset + len(change.data) - len(data))))
            data[change.offset : change.offset + len(change.data)] = change.data
        elif change.name == "resize":
            del data[change.offset :]
            data.extend(bytes(change.offset - len(data)) if zeros else b"")
        elif change.name == "link":
            outside = not change.before.startswith(log.root)
            names[path] = Path(change.before).resolve() if outside else change.file
        elif change.name == "mkdir":
            folders.add(path)
        elif change.name == "rmdir":
            folders.discard(path)
        elif change.name == "unlink":
            names.pop(path, None)
        elif change.name == "exchange":
            aside = f"{change.before}\0"
            for old, new in ((path, aside), (change.before, path), (aside, change.before)):
                names, folders = _moved(names, folders, old, new)
        elif change.name == "rename" and change.file:
            held = names.pop(change.before, change.file)
            names[path] = held
        elif change.name == "rename":
            names, folders = _moved(names, folders, change.before, path)
    found: dict[str, bytes | Path] = {
        f"{folder}/": b"" for folder in folders if _reachable(folder, folders, log.root)
    }
    for path, held in names.items():
        if _reachable(os.path.dirname(path), folders, log.root):
            found[path] = held if isinstance(held, Path) else bytes(contents[held])
    return found


def _moved(
    names: Mapping[str, int | Path], folders: set[str], old: str, new: str
) -> tuple[dict[str, int | Path], set[str]]:
    """The names of files and directories after all below `old`, and itself, are below `new`."""

    def now(path: str) -> str:
        return new + path.removeprefix(old) if path == old or path.startswith(f"{old}/") else path

    return {now(path): held for path, held in names.items()}, {now(folder) for folder in folders}


def _reachable(folder: str, folders: set[str], root: str) -> bool:
    while f"{folder}/" != root:
        if folder not in folders:
            return False
        folder = os.path.dirname(folder)
    return True


def lay_out(files: Mapping[str, bytes | Path]) -> None:
    """Makes the files that `DiskLog.cut` says are there; their directory is empty."""
    for path in sorted(files):
        held = files[path]
        if path.endswith("/"):
            Path(path).mkdir(parents=True, exist_ok=True)
        elif isinstance(held, Path):
            os.link(held, path)
        else:
            Path(path).write_bytes(held)

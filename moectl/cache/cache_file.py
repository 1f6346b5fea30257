"""Atomic reads and updates of the JSON files in the user's cache directory.

A file that is not as moectl writes it is set aside under another name, so that it can be looked into, and
made anew; one of another version or device is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..environment import Device
from ..environment.cache_folder import VARIABLE, cache_folder
from ..errors import CheckpointError, Unavailable
from ..files.atomic import replace_file
from ..files.records import Size, from_json, to_json
from ..files.safe_reading import read_bounded
from ..files.strict_json import parse_document

LARGEST = 64 << 20
"""Maximum size of a cache file, bytes."""

Entry = TypeVar("Entry")

ASIDE = ".damaged"
"""What is appended to the name of a file that is set aside; an earlier one is replaced."""


class CacheWarning(UserWarning):
    """Warns that a cache file is ignored, and why. Nothing fails because of it."""


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """The properties of a device that measured times depend on."""

    name: str
    arch: str
    sms: Size


def device_key(device: Device) -> DeviceKey:
    """The key of a device."""
    return DeviceKey(device.name, device.arch, device.sms)


@dataclass(frozen=True, slots=True)
class CacheFileKind(Generic[Entry]):
    """One kind of cache file: its subdirectory, the version in its header, and the record of an entry."""

    folder: str
    version: int
    entry: type[Entry]

    def path(self, device: Device, env: Mapping[str, str] | None = None) -> Path:
        """Path of the file for one device."""
        return cache_folder(env) / _file_in(self.folder, device.name, device.arch, device.sms)

    def files(self, env: Mapping[str, str] | None = None) -> tuple[Path, ...]:
        """Every file of this kind, for all devices."""
        return tuple(sorted((cache_folder(env) / self.folder).glob("*.json")))

    @property
    def format(self) -> str:
        """The format in the header."""
        return f"moectl-{self.folder}"

    def document(self, device: DeviceKey, entries: Sequence[Entry] = ()) -> dict[str, Any]:
        """The document of `entries` for `device`, as plain data."""
        head = {"format": self.format, "version": self.version, "device": to_json(device)}
        return {**head, "entries": [_plain(entry) for entry in entries]}


@lru_cache(maxsize=64)
def _file_in(folder: str, *words: object) -> Path:
    """The file of the device that `words` tell apart, in `folder` of the cache."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(map(str, words))).strip("-")
    return Path(folder, f"{name}.json")


def _plain(entry: Any) -> Any:
    """An entry as plain data, by its own `to_json` if it has one."""
    return entry.to_json() if hasattr(entry, "to_json") else to_json(entry)


@dataclass(frozen=True, slots=True)
class CacheContents(Generic[Entry]):
    """What a file holds; if it cannot be used, `note` says why and there are no entries.

    Attributes:
        device: whose times they are; None if the file cannot be used or there is none.
        damaged: the bytes of a file that is not as moectl writes it.
    """

    device: DeviceKey | None = None
    entries: tuple[Entry, ...] = ()
    note: str = ""
    damaged: bytes | None = field(default=None, repr=False)


def read(path: Path, kind: CacheFileKind[Entry], device: DeviceKey | None = None) -> CacheContents[Entry]:
    """The contents of the file at `path`, without a note if there is no file.

    A damaged one is set aside, with a `CacheWarning`: the next reader finds none.

    `device` is the expected one, if known.
    """
    found = _contents(path, kind, device)
    if found.damaged is None:
        return found
    try:
        with locked(path.with_suffix(".lock")):
            # Another process may have made it anew since.
            if read_bounded(path, LARGEST, path.name) == found.damaged:
                warnings.warn(set_aside(path, found.note), CacheWarning, stacklevel=2)
                return CacheContents()
    except (OSError, CheckpointError):
        pass
    return CacheContents(note=f"{path} is ignored: {found.note}")


def set_aside(path: Path, why: str) -> str:
    """Renames the damaged file `path`, which `why` says what is wrong with; returns a note on it.

    Raises OSError when the system refuses.
    """
    aside = path.with_name(path.name + ASIDE)
    path.replace(aside)
    return f"{path} is damaged and begun anew ({why}); what it was is in {aside.name}"


def _contents(path: Path, kind: CacheFileKind[Entry], device: DeviceKey | None) -> CacheContents[Entry]:
    """The contents of a file; the note on a `damaged` one is only what is wrong."""
    try:
        path.stat()
        data = read_bounded(path, LARGEST, path.name)
    except (FileNotFoundError, NotADirectoryError):
        return CacheContents()
    except CheckpointError as error:
        return CacheContents(note=f"{path} is ignored: {error.what.removesuffix('.')}")
    except OSError as error:
        return CacheContents(note=f"{path} is ignored: it cannot be read ({error.strerror or error})")
    try:
        document = parse_document(data, "it", ValueError)
        if document.get("format") != kind.format:
            raise ValueError(f"it is not a {kind.format} file")
        if document.get("version") != kind.version:
            return CacheContents(
                note=f"{path} is ignored: it has version {document.get('version')!r}, "
                f"this moectl reads version {kind.version}"
            )
        owner = from_json(DeviceKey, document.get("device"), "device", ValueError)
        if device is not None and owner != device:
            return CacheContents(note=f"{path} is ignored: it belongs to another device ({owner.name!r})")
        entries = document.get("entries")
        if not isinstance(entries, list):
            raise ValueError("it has no list of entries")
        return CacheContents(
            owner,
            tuple(
                from_json(kind.entry, item, f"entries[{number}]", ValueError)
                for number, item in enumerate(entries)
            ),
        )
    except ValueError as error:
        return CacheContents(note=str(error).removesuffix("."), damaged=data)


def change(
    path: Path,
    kind: CacheFileKind[Entry],
    device: DeviceKey,
    edit: Callable[[tuple[Entry, ...]], Sequence[Entry]],
) -> None:
    """Replaces the entries in the file at `path`, which is created if missing, by what `edit` makes of them.

    A file without entries is removed. A lock allows one writer at a time; readers see the file either before
    or after the update. A damaged file is set aside, with a `CacheWarning`.

    Raises Unavailable when the existing file is of another version or device, in which case it is left
    unchanged, and when the system refuses to write.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            found = _contents(path, kind, device)
            if found.damaged is not None:
                warnings.warn(set_aside(path, found.note), CacheWarning, stacklevel=2)
            elif found.note:
                raise Unavailable(f"the cache cannot be written: {found.note}", hint=f"remove {path}")
            entries = edit(found.entries)
            if not entries:
                path.unlink(missing_ok=True)
                return
            document = kind.document(device, entries)
            replace_file(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def remove(path: Path) -> None:
    """Removes a file that cannot be used; Unavailable when the system refuses."""
    try:
        if path.exists():
            with locked(path.with_suffix(".lock")):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"cannot write {path}: {error.strerror or error}", hint=f"name another folder with {VARIABLE}"
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, if the file system supports locks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # without locks the last writer wins, and its file is still whole
        yield
    finally:
        os.close(fd)

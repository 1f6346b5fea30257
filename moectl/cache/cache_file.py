"""Atomic reads and updates of the JSON files in the user's cache directory."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..environment import Device
from ..environment.cache_folder import VARIABLE, cache_folder
from ..errors import CheckpointError, Unavailable
from ..files.atomic import replace_file
from ..files.safe_reading import read_bounded

LARGEST = 64 << 20
"""Maximum size of a cache file, bytes."""

CacheDocument = dict[str, Any]


class CacheWarning(UserWarning):
    """Warns that a cache file is ignored, and why. Nothing fails because of it."""


def device_key(device: Device) -> dict[str, Any]:
    """The properties of a device that measured times depend on."""
    return {"name": device.name, "arch": device.arch, "sms": device.sms}


@dataclass(frozen=True, slots=True)
class CacheFileKind:
    """One kind of cache file: its subdirectory, and the version in its header."""

    folder: str
    version: int

    def path(self, device: Device, env: Mapping[str, str] | None = None) -> Path:
        """Path of the file for one device."""
        return cache_folder(env) / _file_in(self.folder, device.name, device.arch, device.sms)

    def files(self, env: Mapping[str, str] | None = None) -> tuple[Path, ...]:
        """Every file of this kind, for all devices."""
        return tuple(sorted((cache_folder(env) / self.folder).glob("*.json")))

    def head(self, device: Mapping[str, Any]) -> CacheDocument:
        """The header: a document without entries."""
        return {"format": f"moectl-{self.folder}", "version": self.version, "device": dict(device)}


@lru_cache(maxsize=64)
def _file_in(folder: str, *words: object) -> Path:
    """The file of the device that `words` tell apart, in `folder` of the cache."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(map(str, words))).strip("-")
    return Path(folder, f"{name}.json")


def read(
    path: Path, kind: CacheFileKind, device: Mapping[str, Any] | None = None
) -> tuple[CacheDocument | None, str]:
    """The document at `path`, or None and a note why it cannot be used; the note is empty without a file.

    `device` is the expected `device_key`, if known.
    """
    try:
        path.stat()
        document = json.loads(read_bounded(path, LARGEST, path.name).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        return None, f"{path} is ignored: it cannot be read ({error})"
    expected = kind.head(device or {})
    if not isinstance(document, dict) or document.get("format") != expected["format"]:
        return None, f"{path} is ignored: it is not a {expected['format']} file"
    if document.get("version") != kind.version:
        return None, (
            f"{path} is ignored: it has version {document.get('version')!r}, "
            f"this moectl reads version {kind.version}"
        )
    owner = document.get("device")
    if not isinstance(owner, dict) or (device is not None and owner != dict(device)):
        return None, f"{path} is ignored: it belongs to another device ({owner!r})"
    if not isinstance(document.get("entries"), list):
        return None, f"{path} is ignored: it has no list of entries"
    return document, ""


def change(
    path: Path, kind: CacheFileKind, device: Mapping[str, Any], edit: Callable[[list[Any]], None]
) -> None:
    """Applies `edit` to the list of entries in the file at `path`, which is created if missing.

    A lock allows one writer at a time; readers see the file either before or after the update.

    Raises Unavailable when the existing file cannot be used, in which case it is left unchanged, and when
    the system refuses to write.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            document, note = read(path, kind, device)
            if note:
                raise Unavailable(f"the cache cannot be written: {note}", hint=f"remove {path}")
            document = document or {**kind.head(device), "entries": []}
            edit(document["entries"])
            replace_file(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise Unavailable(
            f"cannot write {path}: {error.strerror or error}", hint=f"name another folder with {VARIABLE}"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, if the file system supports locks."""
    with path.open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # without locks the last writer wins, and its file is still whole
        yield

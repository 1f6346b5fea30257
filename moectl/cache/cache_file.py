"""The user's cache folder, and how a JSON file in it is read and changed: whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment import Device
from ..errors import Unavailable

VARIABLE = "MOECTL_CACHE"
"""Names a folder instead of the platform's."""

LARGEST = 64 << 20
"""Bytes of a file that may be one of moectl's."""

Document = dict[str, Any]


class CacheWarning(UserWarning):
    """A file of the cache is not used, and why. A person should know; nothing fails for it."""


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """The folder of this user: `VARIABLE`, else ``moectl`` where the platform keeps caches."""
    env = os.environ if env is None else env
    if named := env.get(VARIABLE):
        return Path(named).expanduser()
    home = Path(env.get("HOME") or Path.home())
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "moectl"
    return Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "moectl"


def device_key(device: Device) -> dict[str, Any]:
    """What of a device its times depend on."""
    return {"name": device.name, "arch": device.arch, "sms": device.sms}


@dataclass(frozen=True, slots=True)
class CacheFileKind:
    """One kind of file: its folder in the cache, and what its head says."""

    folder: str
    version: int

    def path(self, device: Device, env: Mapping[str, str] | None = None) -> Path:
        """The file of one device."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device.name} {device.arch} {device.sms}").strip("-")
        return cache_folder(env) / self.folder / f"{name}.json"

    def files(self, env: Mapping[str, str] | None = None) -> tuple[Path, ...]:
        """Every file of this kind, whatever device it is of."""
        return tuple(sorted((cache_folder(env) / self.folder).glob("*.json")))

    def head(self, device: Mapping[str, Any]) -> Document:
        """A file without entries."""
        return {"format": f"moectl-{self.folder}", "version": self.version, "device": dict(device)}


def read(
    path: Path, kind: CacheFileKind, device: Mapping[str, Any] | None = None
) -> tuple[Document | None, str]:
    """The document at `path`, and why it cannot be used; neither where there is none.

    `device` is whose it must be, where that is known.
    """
    try:
        if path.stat().st_size > LARGEST:
            return None, f"{path} is ignored: it is larger than any file of moectl's cache"
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path} is ignored: it cannot be read ({error})"
    wanted = kind.head(device or {})
    if not isinstance(document, dict) or document.get("format") != wanted["format"]:
        return None, f"{path} is ignored: it is no {wanted['format']} file"
    if document.get("version") != kind.version:
        return None, (
            f"{path} is ignored: it has version {document.get('version')!r}, "
            f"this moectl reads version {kind.version}"
        )
    found = document.get("device")
    if not isinstance(found, dict) or (device is not None and found != dict(device)):
        return None, f"{path} is ignored: it is of another device ({found!r})"
    if not isinstance(document.get("entries"), list):
        return None, f"{path} is ignored: it has no list of entries"
    return document, ""


def change(
    path: Path, kind: CacheFileKind, device: Mapping[str, Any], edit: Callable[[list[Any]], None]
) -> None:
    """Lets `edit` change the entries of the file at `path`, which is made where there is none.

    One process at a time does so, and readers see the file before or after it.

    Raises Unavailable for a file that is not moectl's, which is left as it is, and where the system
    refuses to write.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            document, note = read(path, kind, device)
            if note:
                raise Unavailable(f"the cache cannot be written: {note}", hint=f"remove {path}")
            document = document or {**kind.head(device), "entries": []}
            edit(document["entries"])
            _write(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise Unavailable(
            f"cannot write {path}: {error.strerror or error}", hint=f"name another folder with {VARIABLE}"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with a file, where the file system has locks; else as if."""
    with path.open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # without locks the last writer wins, and its file is still whole
        yield


def _write(path: Path, text: str) -> None:
    """`text` at `path` through a temporary name of its own, synced before the rename."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

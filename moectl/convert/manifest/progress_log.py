"""What a long operation reports while it runs, and the log by which a conversion is resumed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, Unavailable, UsageError
from ...files.atomic import disk_errors, write_exactly
from ...files.lock import Lock
from ...files.records import from_json, to_json
from ...files.safe_reading import open_regular
from ...files.strict_json import parse_json_object
from .manifest_records import LOG as LOG
from .manifest_records import LayerRecord, PassthroughRecord

PLAIN = frozenset({"format", "moectl", "layout version", "rank", "experts only"})
"""Facts of a conversion whose values a person can read; the others are digests."""

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and what is being worked on."""


def silent(done: int, total: int, text: str) -> None:
    """A `Progress` that shows nothing."""


class Meter:
    """Counts bytes towards a total and passes them on to a `Progress`."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done, self._text = progress, total, 0, ""

    def say(self, text: str) -> None:
        """What is being worked on from now."""
        self._text = text
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        self._done += nbytes
        self._progress(self._done, self._total, self._text)


@dataclass
class ProgressLog:
    """The resume log of one conversion, open and locked: which files are finished, with their hashes.

    Every line is synced before the next file is begun; a last line cut short by a crash is dropped.
    """

    path: Path
    fd: int
    lock: Lock
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    rest: dict[str, PassthroughRecord] = field(default_factory=dict)

    def add(self, record: LayerRecord | PassthroughRecord) -> None:
        """Appends a finished file's record."""
        if isinstance(record, LayerRecord):
            self._append({"layer": to_json(record)})
            self.layers[record.layer] = record
        else:
            self._append({"rest": to_json(record)})
            self.rest[record.file] = record

    def close(self, *, remove: bool = False) -> None:
        """Releases the lock; `remove` deletes the log of a finished conversion."""
        if remove:
            self.path.unlink(missing_ok=True)
        self.lock.release()
        os.close(self.fd)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode()
        with disk_errors(self.path, len(line)):
            end = os.fstat(self.fd).st_size
            try:
                write_exactly(self.fd, memoryview(line), end)
            except BaseException:
                os.ftruncate(self.fd, end)
                raise
            os.fsync(self.fd)


def refuse_another(folder: Path, held: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    """UsageError when `folder` holds another conversion than is wanted, naming the facts that differ."""
    wrong = [key for key in sorted({*held, *wanted}) if held.get(key) != wanted.get(key)]
    if not wrong:
        return
    shown = [f"{key} ({held.get(key)}, not {wanted.get(key)})" if key in PLAIN else key for key in wrong]
    # Another layout changes other facts with it.
    what = (
        f"{folder} holds a {held.get('layout')} conversion, not {wanted.get('layout')}."
        if "layout" in wrong
        else f"{folder} holds another conversion; it differs in {', '.join(shown)}."
    )
    raise UsageError(what, hint="Resume with the same arguments, or convert into an empty folder.")


def open_log(folder: Path, fingerprint: Mapping[str, str], name: str = LOG) -> ProgressLog:
    """The log called `name` in `folder`, created with `fingerprint` or read back; locked.

    Raises:
        UsageError: the log belongs to another conversion; the differing fields are named.
        Unavailable: another process is writing there.
        CheckpointError: no regular file, or a line that this program cannot have written.
    """
    path = folder / name
    with disk_errors(path, 0):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    lock = Lock(path, fd)
    log = ProgressLog(path, fd, lock)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is not a file.", hint="Convert into an empty folder.")
        lock.take()
        if not _is_at(path, fd):
            raise Unavailable(
                f"another conversion has just finished in {folder}.", hint="Run the same command again."
            )
        entries = _read(fd)
        if not entries:
            os.ftruncate(fd, 0)
            log._append({"conversion": dict(fingerprint)})
            return log
        begun = entries[0].get("conversion")
        if not isinstance(begun, Mapping):
            raise CheckpointError(
                f"{name} does not begin with a conversion.", hint="Convert into an empty folder."
            )
        refuse_another(folder, begun, fingerprint)
        for entry in entries[1:]:
            _take(log, entry)
    except BaseException:
        lock.release()
        os.close(fd)
        raise
    return log


def conversion_of(path: Path) -> Mapping[str, Any] | None:
    """The facts that a log begins with, as another process may be writing it; None before they are there."""
    with open_regular(path, str(path)) as file:
        line = file.readline(1 << 20)
    if not line.endswith(b"\n"):
        return None
    begun = parse_json_object(line, f"line 1 of {path.name}").get("conversion")
    return begun if isinstance(begun, Mapping) else None


def _read(fd: int) -> list[dict[str, Any]]:
    """Whole lines of the log; what follows the last newline was never finished and is cut off."""
    data = bytearray()
    while piece := os.pread(fd, 1 << 20, len(data)):
        data += piece
    end = data.rfind(b"\n") + 1
    os.ftruncate(fd, end)
    lines = bytes(data[:end]).splitlines()
    return [parse_json_object(line, f"line {number} of {LOG}") for number, line in enumerate(lines, 1)]


def _is_at(path: Path, fd: int) -> bool:
    """True when `path` still names the open file: a log is removed by the conversion that it was of."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _take(log: ProgressLog, entry: Mapping[str, Any]) -> None:
    if "layer" in entry:
        layer = from_json(LayerRecord, entry["layer"], LOG)
        log.layers[layer.layer] = layer
    elif "rest" in entry:
        rest = from_json(PassthroughRecord, entry["rest"], LOG)
        log.rest[rest.file] = rest
    else:
        raise CheckpointError(f"{LOG} has a line that is neither a layer nor a file.")

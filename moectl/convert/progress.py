"""What a long operation reports while it runs, and the log by which a conversion is resumed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.strict_json import parse_json_object
from ..errors import CheckpointError, Unavailable, UsageError
from .disk import disk_errors, write_exactly
from .manifest_record import LOG as LOG
from .manifest_record import LayerRecord, RestRecord
from .records import from_json, to_json

PLAIN = frozenset({"format", "moectl", "layout", "experts only"})
"""Keys of a conversion's fingerprint whose values a person can read; the others are digests."""

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
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    rest: dict[str, RestRecord] = field(default_factory=dict)

    def add(self, record: LayerRecord | RestRecord) -> None:
        """Appends a finished file's record."""
        kind = "layer" if isinstance(record, LayerRecord) else "rest"
        self._append({kind: to_json(record)})

    def close(self, *, remove: bool = False) -> None:
        """Releases the lock; `remove` deletes the log of a finished conversion."""
        if remove:
            self.path.unlink(missing_ok=True)
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


def differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """The keys in which two records differ, with both values, for a loader that refuses."""
    return [
        f"{key}: expected {expected.get(key)!r}, got {got.get(key)!r}"
        for key in sorted(set(expected) | set(got))
        if expected.get(key) != got.get(key)
    ]


def open_log(folder: Path, fingerprint: Mapping[str, str]) -> ProgressLog:
    """The log in `folder`, created with `fingerprint` or read back.

    Raises:
        UsageError: the log belongs to another conversion; the differing fields are named.
        Unavailable: another process is writing there.
        CheckpointError: a line that this program cannot have written.
    """
    path = folder / LOG
    with disk_errors(path, 0):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    log = ProgressLog(path, fd)
    try:
        _lock(fd, folder)
        entries = _read(fd)
        if not entries:
            os.ftruncate(fd, 0)
            log._append({"conversion": dict(fingerprint)})
            return log
        begun = entries[0].get("conversion", {})
        wrong = differences(fingerprint, begun)
        if wrong:
            # A digest tells nobody anything, and another layout changes others with it.
            told = wrong if begun.get("layout") == fingerprint.get("layout") else ["layout"]
            shown = [
                f"{key}: {begun.get(key)!r}, not {fingerprint.get(key)!r}" if key in PLAIN else key
                for key in sorted({item.split(":")[0] for item in told})
            ]
            raise UsageError(
                f"{folder} holds the beginning of another conversion; it differs in {'; '.join(shown)}.",
                hint="Resume with the same arguments, or convert into an empty folder.",
            )
        for entry in entries[1:]:
            _take(log, entry)
    except BaseException:
        os.close(fd)
        raise
    return log


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Unavailable(
            f"another conversion is writing to {folder}.", hint="Wait for it, or choose another folder."
        ) from None


def _read(fd: int) -> list[dict[str, Any]]:
    """Whole lines of the log; what follows the last newline was never finished and is cut off."""
    data = bytearray()
    while piece := os.pread(fd, 1 << 20, len(data)):
        data += piece
    end = data.rfind(b"\n") + 1
    os.ftruncate(fd, end)
    lines = bytes(data[:end]).splitlines()
    return [parse_json_object(line, f"line {number} of {LOG}") for number, line in enumerate(lines, 1)]


def _take(log: ProgressLog, entry: Mapping[str, Any]) -> None:
    if "layer" in entry:
        layer = from_json(LayerRecord, entry["layer"], LOG)
        log.layers[layer.layer] = layer
    elif "rest" in entry:
        rest = from_json(RestRecord, entry["rest"], LOG)
        log.rest[rest.file] = rest
    else:
        raise CheckpointError(f"{LOG} has a line that is neither a layer nor a file.")

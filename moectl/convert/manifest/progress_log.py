"""Progress reporting of long operations, and the log from which a conversion resumes."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UsageError
from ...files.access import BY_UMASK, Access
from ...files.atomic import PARTIAL, disk_errors, remove_file, sync_folder, write_exactly
from ...files.folder_handle import open_inside
from ...files.lock import Busy, Lock, is_at
from ...files.output_folder import new_folder
from ...files.records import from_json, to_json
from ...files.strict_json import parse_document
from ..worker_partition import partitions_in
from .manifest_records import LOG as LOG
from .manifest_records import LayerRecord, PassthroughRecord
from .signed_document import LONGEST_MANIFEST

PLAIN = frozenset({"format", "moectl", "layout version", "rank", "experts only"})
"""Facts of a conversion whose values are readable; the others are digests."""

Progress = Callable[[int, int, str], None]
"""Called with bytes done, total bytes, and the name of the current item."""


def silent(done: int, total: int, text: str) -> None:
    """A `Progress` that ignores everything."""


class Meter:
    """Counts bytes towards a total and passes them on to a `Progress`."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done, self._text = progress, total, 0, ""

    def start(self, text: str) -> None:
        """Sets the name of the current item."""
        self._text = text
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        """Reports `nbytes` more bytes as done."""
        self._done += nbytes
        self._progress(self._done, self._total, self._text)


@dataclass
class ProgressLog:
    """The open, locked resume log of one conversion: the finished files and their hashes.

    Every line is synced before the next one is appended; a last line truncated by a crash is dropped.

    Attributes:
        new: whether it was created now, by this process.
        source: the digest of the source (`PinnedSource`) that all logged layers were made from; empty if it
            is not known.
    """

    path: Path
    fd: int
    lock: Lock
    new: bool = False
    source: str = ""
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    passthrough: dict[str, PassthroughRecord] = field(default_factory=dict)

    def add(self, record: LayerRecord | PassthroughRecord) -> None:
        """Appends a finished file's record."""
        if isinstance(record, LayerRecord):
            self._append({"layer": to_json(record)})
            self.layers[record.layer] = record
        else:
            self._append({"rest": to_json(record)})
            self.passthrough[record.file] = record

    def pin(self, source: str) -> None:
        """Notes that all layers logged so far, and those that follow, are made from `source`, a digest."""
        if self.source != source:
            self._append({"source": source})
            self.source = source

    def refuse_company(self) -> None:
        """Raises Busy if a file is beside the log, which is new: another process wrote it."""
        names = sorted(path.name for path in self.path.parent.iterdir() if not path.is_dir())
        if others := [name for name in names if not name.startswith(self.path.name)]:
            raise Busy(
                f"another process has written to {self.path.parent} meanwhile: it has {others[0]}.",
                hint="Choose an empty directory.",
            )

    def close(self, *, remove: bool = False) -> None:
        """Releases the lock; `remove` deletes the log of a finished conversion. Closing twice is allowed.

        Raises Unavailable when the system refuses to remove it.
        """
        if self.fd < 0:
            return
        try:
            if remove:
                remove_file(self.path)
                with disk_errors(self.path, 0):
                    sync_folder(self.path.parent)
        finally:
            self.lock.release()
            os.close(self.fd)
            self.fd = -1

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = log_line(entry)
        with disk_errors(self.path, len(line)):
            end = os.fstat(self.fd).st_size
            try:
                write_exactly(self.fd, memoryview(line), end)
            except BaseException:
                os.ftruncate(self.fd, end)
                raise
            os.fsync(self.fd)


def refuse_other_conversion(folder: Path, existing: Mapping[str, Any], requested: Mapping[str, str]) -> None:
    """Raises UsageError naming the differing facts if `folder` holds another conversion than requested."""
    differing = [key for key in sorted({*existing, *requested}) if existing.get(key) != requested.get(key)]
    if not differing:
        return
    descriptions = [
        f"{key} ({existing.get(key)}, not {requested.get(key)})" if key in PLAIN else key for key in differing
    ]
    # A different layout changes other facts as well, so only the layout is named.
    what = (
        f"{folder} holds a {existing.get('layout')} conversion, not {requested.get('layout')}."
        if "layout" in differing
        else f"{folder} holds another conversion; it differs in {', '.join(descriptions)}."
    )
    raise UsageError(what, hint="Resume with the same arguments, or convert into an empty directory.")


def open_log(
    folder: Path, fingerprint: Mapping[str, str], name: str = LOG, access: Access = BY_UMASK
) -> ProgressLog:
    """The locked log called `name` in `folder`, created with `fingerprint` or read back.

    Raises:
        UsageError: the log belongs to another conversion; the differing facts are named.
        Busy: another process is writing to the directory.
        CheckpointError: not a regular file, or a line that this program cannot have written.
    """
    path = folder / name
    with disk_errors(path, 0):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, access.of_file(folder))
    lock = Lock(path, fd)
    log = ProgressLog(path, fd, lock)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is not a file.", hint="Convert into an empty directory.")
        lock.take()
        if not is_at(path, fd):
            raise Busy(
                f"another conversion has just finished in {folder}.", hint="Run the same command again."
            )
        entries = _read(fd, name)
        if not entries:
            os.ftruncate(fd, 0)
            log._append({"conversion": dict(fingerprint)})
            log.new = True
            return log
        logged = entries[0].conversion
        if logged is None:
            raise CheckpointError(
                f"{name} does not begin with a conversion.", hint="Convert into an empty directory."
            )
        refuse_other_conversion(folder, logged, fingerprint)
        for entry in entries[1:]:
            _load_entry(log, entry)
    except BaseException:
        lock.release()
        os.close(fd)
        raise
    return log


@contextmanager
def only_writer(out: Path, work: str, names: Iterable[str], access: Access = BY_UMASK) -> Iterator[None]:
    """Creates the directory `out`, in which the block alone writes files, `names`; on an error they go again.

    Other writers are kept out by a log, of `work`, which stays if the process is killed. Files of `names`
    that lie beside such a log are removed first, finished or not.

    Raises Busy if there is another writer, or something that it has written, and leaves that as it is.
    """
    names = tuple(names)
    with new_folder(out, access):
        log = open_log(out, {"layout": work}, access=access)
        try:
            if not log.new:
                for name in names:
                    remove_file(out / name)
                    remove_file(out / (name + PARTIAL))
            log.refuse_company()
            try:
                yield
            except BaseException:
                for name in names:
                    with suppress(OSError):
                        (out / name).unlink()
                raise
        finally:
            log.close(remove=True)


def logged_conversion(path: Path) -> Mapping[str, Any] | None:
    """The facts in a log's first line; None if another process has not finished writing that line."""
    with open_inside(path.parent, path.name, str(path)) as file:
        line = file.readline(1 << 20)
    if not line.endswith(b"\n"):
        return None
    return log_entry(line, f"line 1 of {path.name}").conversion


def _read(fd: int, name: str) -> list[LogEntry]:
    """The complete lines of the log; an unfinished last line is truncated.

    Raises CheckpointError for a log that is longer than any manifest, or a line that was changed.
    """
    if (size := os.fstat(fd).st_size) > LONGEST_MANIFEST:
        raise CheckpointError(
            f"{name} has {size} bytes, expected at most {LONGEST_MANIFEST}.",
            hint="Convert into an empty directory.",
        )
    data = bytearray()
    while block := os.pread(fd, 1 << 20, len(data)):
        data += block
    end = data.rfind(b"\n") + 1
    os.ftruncate(fd, end)
    lines = bytes(data[:end]).splitlines()
    return [log_entry(line, f"line {number} of {name}") for number, line in enumerate(lines, 1)]


@dataclass(frozen=True)
class LogEntry:
    """A line of a log: one of these."""

    conversion: Mapping[str, str] | None = None
    layer: LayerRecord | None = None
    source: str | None = None
    rest: PassthroughRecord | None = None


def log_line(entry: Mapping[str, Any]) -> bytes:
    """The line of a log that says `entry`, one field of `LogEntry`; it ends with its own SHA-256.

    Example:
        >>> log_entry(log_line({"source": "abc"}), "line 1").source
        'abc'
    """
    return _signed(json.dumps(entry, ensure_ascii=False).encode()[:-1])


_SIGNATURE = b', "sha256": "'


def _signed(text: bytes) -> bytes:
    """A line of `text`, JSON up to its last brace, and its SHA-256."""
    return text + _SIGNATURE + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def log_entry(line: bytes, where: str) -> LogEntry:
    """What a line of a log says; CheckpointError if it was changed, or is none that this program writes.

    `where` names it in errors.
    """
    entry = parse_document(line, where)
    entry.pop("sha256", None)
    if len(entry) != 1:
        raise CheckpointError(
            f"{where} must be one of {', '.join(_ENTRIES)}, got {len(entry)} fields.",
            hint="Convert into an empty directory.",
        )
    if _signed(line.rpartition(_SIGNATURE)[0]).strip() != line.strip():
        raise CheckpointError(
            f"{where} is not as it was written: its SHA-256 is another one.",
            hint="Convert into an empty directory.",
        )
    return from_json(LogEntry, entry, f"{where}: ")


_ENTRIES = ("conversion", "layer", "source", "rest")


def _load_entry(log: ProgressLog, found: LogEntry) -> None:
    if found.layer is not None:
        log.layers[found.layer.layer] = found.layer
    if found.source is not None:
        log.source = found.source
    if found.rest is not None:
        log.passthrough[found.rest.file] = found.rest


def remove_logs(folder: Path, mark: str) -> None:
    """Removes the logs of a directory that `mark` shows to be finished, whose writer was killed after that.

    Those that another process holds are left to it.
    """
    names = [LOG, *(partition.log for partition in partitions_in(folder))]
    for path in (folder / name for name in names):
        with suppress(OSError, Busy):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            lock = Lock(path, fd)
            try:
                lock.take()
                if (folder / mark).exists() and is_at(path, fd):
                    path.unlink()
            finally:
                lock.release()
                os.close(fd)

"""The file to which a bench appends its rows as they are measured, and which a later run can resume."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import SCHEMA_VERSION, __version__
from ..errors import Unavailable, UsageError
from ..files.atomic import sync_folder
from ..files.lock import Lock
from ..files.safe_reading import read_given, unreadable
from .bench_rows import BenchRow
from .read_rows import BenchRows, read_rows
from .settings import differences, merge_settings, other_software


@dataclass(frozen=True)
class RunHeader:
    """The conditions of a run, written before its rows.

    Attributes:
        settings: `BenchSettings.to_json`.
        machine: `run_metadata.machine_metadata`: ``device``, ``driver``, ``versions``, ``rates`` and more.
    """

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        about = {"schema_version": SCHEMA_VERSION, "moectl": __version__, "command": "bench"}
        return {**about, "settings": dict(self.settings), **self.machine}


RUN = {"kind": "run"}
"""How the first line of a file begins."""

LONGEST_HEADER = 1 << 24
"""Bytes within which the first line of a file ends."""


class RowJournal:
    """A JSONL file of rows, whose first line describes the run.

    Each line is synced to disk before the next row is measured, so that a run that is killed keeps its rows.
    Only one process at a time can have the file open.

    Attributes:
        before: the rows of earlier runs; None in a new file.
    """

    def __init__(self, path: Path, fd: int, lock: Lock) -> None:
        self.path, self._fd, self._lock = path, fd, lock
        self.before: BenchRows | None = None

    @classmethod
    def open(cls, path: Path, *, resume: bool = False) -> RowJournal:
        """Opens or creates the file at `path` for this process alone.

        With `resume` it may hold rows; an incomplete last line is truncated, and a file that ends within its
        first line is begun anew.

        Raises UsageError when it is not empty without `resume`, or holds something else; Unavailable when
        another process has it open, or it cannot be written.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise _unwritable(path, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise unreadable(str(path), path, OSError(), "a file")
        journal = cls(path, fd, Lock(path, fd, work="bench", target=path))
        try:
            journal._lock.take()
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(fd)):
                raise Unavailable(f"another bench has just removed {path}", hint="run the same command again")
            if os.fstat(fd).st_size:
                journal._read_earlier(resume)
        except BaseException:
            journal._close()
            raise
        return journal

    def _read_earlier(self, resume: bool) -> None:
        if not resume:
            raise UsageError(
                f"{self.path} is not empty",
                hint="continue it with --resume, remove it, or give another name",
            )
        if _is_cut_header(os.pread(self._fd, LONGEST_HEADER, 0)):
            os.ftruncate(self._fd, 0)
            return
        self.before = read_rows(self.path)
        data = read_given(self.path, "a file of rows")
        os.ftruncate(self._fd, data.rfind(b"\n") + 1)

    def begin(self, run: RunHeader) -> Mapping[str, Any]:
        """Writes the header of the rows that follow, and returns that of all rows as plain data.

        After rows of earlier runs it is written only if this run requests more. Raises UsageError if the new
        rows would not be comparable: other settings, another device or other software.
        """
        if self.before is None:
            self._write({**RUN, **run.to_json()})
            return run.to_json()
        earlier = self.before.settings
        reasons = [*differences(run.settings, earlier), *other_software(run.machine, self.before.about)]
        if reasons:
            raise UsageError(
                f"rows of {self.path} would not be comparable with new ones: {'; '.join(reasons)}",
                hint="use the settings that it was started with (-m, --backend, --model and --routing may "
                "be extended), or start a new file",
            )
        merged = merge_settings(earlier, run.settings)
        if merged != merge_settings(earlier, earlier):
            self._write({**RUN, **run.to_json()})
        return {**self.before.about, "settings": merged}

    def add(self, row: BenchRow) -> None:
        """Appends one row."""
        self._write({"kind": "row", **row.to_json()})

    def _write(self, data: Mapping[str, Any]) -> None:
        line = (json.dumps(data, allow_nan=False) + "\n").encode()
        end = os.fstat(self._fd).st_size
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
            if not end:
                sync_folder(self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
            raise _unwritable(self.path, error) from error

    def _close(self) -> None:
        self._lock.release()
        os.close(self._fd)

    def __enter__(self) -> RowJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not os.fstat(self._fd).st_size:
            with contextlib.suppress(OSError):
                self.path.unlink()  # no row was measured
        self._close()


def _is_cut_header(data: bytes) -> bool:
    """True for what a bench leaves that is killed while it writes its first line: a part of that line."""
    start = json.dumps(RUN).removesuffix("}").encode()
    return b"\n" not in data and data[: len(start)] == start[: len(data)]


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"cannot write {path}: {error.strerror or error}")

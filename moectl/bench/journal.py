"""The file that a bench writes its rows to as they come, and that a later run goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import SCHEMA_VERSION, __version__
from ..errors import Unavailable, UsageError
from ..files.lock import Lock
from .bench_rows import BenchRow
from .read_rows import BenchRows, read_rows
from .settings import both, differences, other_software


@dataclass(frozen=True)
class RunHeader:
    """What rows were taken on.

    Attributes:
        settings: as plain data, of `Settings.to_json`.
        machine: ``device``, ``driver``, ``versions``, ``rates``, ``caches``, and what else is worth knowing.
    """

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        about = {"schema_version": SCHEMA_VERSION, "moectl": __version__, "command": "bench"}
        return {**about, "settings": dict(self.settings), **self.machine}


class RowJournal:
    """A JSONL file of rows that are written as they come: a first line says what they were taken on.

    Each line is on its way to the disk before the next row is measured, so that a run that is killed
    keeps its rows. One process at a time has the file.

    Attributes:
        before: what earlier runs have left in it; None in a new one.
    """

    def __init__(self, path: Path, fd: int, lock: Lock) -> None:
        self.path, self._fd, self._lock = path, fd, lock
        self.before: BenchRows | None = None

    @classmethod
    def open(cls, path: Path, *, resume: bool = False) -> RowJournal:
        """The file at `path`, made where there is none, for this process alone.

        With `resume`, there may be rows in it; a line that was not finished is cut off.

        Raises UsageError when something is in it and is not to be gone on with, or is no rows; Unavailable
        when another process has the file, or it cannot be written.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unwritable(path, error) from error
        made = cls(path, fd, Lock(path, fd, work="bench", target=path))
        try:
            made._lock.take()
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(fd)):
                raise Unavailable(
                    f"another bench has just given {path} up", hint="run the same command again"
                )
            if os.fstat(fd).st_size:
                made._go_on(resume)
        except BaseException:
            made._close()
            raise
        return made

    def _go_on(self, resume: bool) -> None:
        if not resume:
            raise UsageError(
                f"{self.path} has something in it already",
                hint="go on with it by --resume, or remove it, or give another name",
            )
        self.before = read_rows(self.path)
        data = self.path.read_bytes()
        os.ftruncate(self._fd, data.rfind(b"\n") + 1)

    def begin(self, run: RunHeader) -> Mapping[str, Any]:
        """Says what the rows to come are taken on; of all rows, as plain data.

        After rows of earlier runs, that is written again only where more is asked for. Raises UsageError when
        rows to come could not be held against those: of other settings, another device or other software.
        """
        if self.before is None:
            self._write({"kind": "run", **run.to_json()})
            return run.to_json()
        then = self.before.settings
        others = [*differences(run.settings, then), *other_software(run.machine, self.before.about)]
        if others:
            raise UsageError(
                f"rows of {self.path} could not be held against new ones: {'; '.join(others)}",
                hint="ask for what it was begun with (more -m, --backend, --model and --routing may be), "
                "or begin a new file",
            )
        asked = both(then, run.settings)
        if asked != both(then, then):
            self._write({"kind": "run", **run.to_json()})
        return {**self.before.about, "settings": asked}

    def add(self, row: BenchRow) -> None:
        """Writes one row."""
        self._write({"kind": "row", **row.to_json()})

    def _write(self, data: Mapping[str, Any]) -> None:
        line = (json.dumps(data, allow_nan=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as error:
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
            self.path.unlink(missing_ok=True)  # nothing came of it
        self._close()


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"cannot write {path}: {error.strerror or error}")

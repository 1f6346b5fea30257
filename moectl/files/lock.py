"""A lock for a single writer: `flock`, or a lock file on file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import Unavailable
from ..whole_numbers import whole_number
from .safe_reading import text_or_empty

SUFFIX = ".lock"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of network file systems that do not support locks."""


def is_at(path: Path, fd: int) -> bool:
    """True if `path` still names the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def wait_for(fd: int) -> None:
    """Locks the open file once no other process has it locked; does nothing where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (*_NO_LOCKS, errno.EBADF):  # NFS locks only what is open for writing
            raise


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keeps other processes that take this lock out of an existing folder during the block; waits for them.

    It leaves nothing behind, and does nothing where there are no locks. Raises OSError.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        wait_for(fd)
        yield
    finally:
        os.close(fd)


class Busy(Unavailable):
    """Another process holds a lock."""


class Lock:
    """An exclusive lock on the open file `fd` at `path`.

    Errors name the holder another `work` that is writing to `target`: by default, a conversion and the
    file's directory.

    If the file system has no locks, a lock file next to it records the host and process of the holder. A
    lock file of a process on this host that has ended is replaced; one of another host has to be removed by
    the user.
    """

    def __init__(self, path: Path, fd: int, *, work: str = "conversion", target: Path | None = None) -> None:
        self._path, self._fd, self._work, self._target = path, fd, work, target or path.parent
        self._lock_file = path.with_name(path.name + SUFFIX)
        self._owns_lock_file = False

    def take(self) -> None:
        """Acquires the lock; Busy when another process holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another {self._work} is writing to {self._target}.",
                hint="Wait for it, or choose another name.",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise self._refused(error) from error
            try:
                self._create_lock_file()
            except OSError as refused:
                raise self._refused(refused) from refused

    def _refused(self, error: OSError) -> Unavailable:
        return Unavailable(
            f"cannot lock {self._path}: {error.strerror or error}.", hint="Check the output folder."
        )

    def release(self) -> None:
        """Removes the lock file, if there is one; a `flock` ends when the file is closed."""
        if self._owns_lock_file:
            self._owns_lock_file = False
            with suppress(OSError):
                self._lock_file.unlink()

    def _create_lock_file(self) -> None:
        host = socket.gethostname()
        for _ in range(2):
            try:
                fd = os.open(self._lock_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                if not os.path.lexists(self._lock_file):  # released in the meantime
                    continue
                holder = text_or_empty(self._lock_file).split()
                process = whole_number(holder[1]) if len(holder) == 2 and holder[0] == host else None
                if process is None or _runs(process):
                    break
                self._lock_file.unlink(missing_ok=True)
                continue
            with os.fdopen(fd, "w") as file:
                file.write(f"{host} {os.getpid()}")
            self._owns_lock_file = True
            return
        raise Busy(
            f"another {self._work} is writing to {self._target}, says {self._lock_file.name}.",
            reason="This file system has no locks that end with a process.",
            hint=f"If no {self._work} runs on any machine, remove {self._lock_file}.",
        )


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True

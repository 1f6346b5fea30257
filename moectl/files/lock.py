"""One writer to a file: a lock that ends with its process, or a file beside it where there are no locks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from ..errors import Unavailable

SUFFIX = ".lock"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What network file systems say that have no locks."""


class Lock:
    """The right to write the open file `fd`, called `path`.

    Errors call who may have it another `work`, and what is written to `place`; by default, a conversion
    and the file's folder.

    Where the file system has no locks, a file beside it says which host and process has the right. Left
    by a process of this host that is no more, it is taken over; nobody can tell for another host.
    """

    def __init__(self, path: Path, fd: int, *, work: str = "conversion", place: Path | None = None) -> None:
        self._path, self._fd, self._work, self._place = path, fd, work, place or path.parent
        self._beside = path.with_name(path.name + SUFFIX)
        self._own = False

    def take(self) -> None:
        """Takes the right; Unavailable when another process has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"another {self._work} is writing to {self._place}.",
                hint="Wait for it, or choose another name.",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise Unavailable(f"cannot lock {self._path}: {error.strerror or error}.") from error
            self._take_beside()

    def release(self) -> None:
        """Gives the right back, where closing the file does not."""
        if self._own:
            self._own = False
            self._beside.unlink(missing_ok=True)

    def _take_beside(self) -> None:
        host = socket.gethostname()
        for _ in range(2):
            try:
                fd = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                try:
                    held = self._beside.read_text(errors="replace").split()
                except FileNotFoundError:  # given back since
                    continue
                if len(held) != 2 or held[0] != host or not held[1].isdecimal() or _runs(int(held[1])):
                    break
                self._beside.unlink(missing_ok=True)
                continue
            with os.fdopen(fd, "w") as file:
                file.write(f"{host} {os.getpid()}")
            self._own = True
            return
        raise Unavailable(
            f"another {self._work} is writing to {self._place}, says {self._beside.name}.",
            reason="This file system has no locks that end with a process.",
            hint=f"If no {self._work} runs on any machine, remove {self._beside}.",
        )


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True

# ruff: noqa: PTH100, PTH112, PTH115, PTH116, PTH118 - functions of `os` are what is replaced here
"""Every call of a process that changes what a disk has: counted, recorded, or made to fail.

The functions of `os` and `open` are replaced, in a process that is made for it. Files that Python writes
through its own buffers are written through `os.write` as well.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

NEEDS_ROOM = ("create", "write", "resize", "mkdir", "link", "symlink", "rename")
"""Calls that a full disk or a used-up quota refuses."""


@dataclass(frozen=True)
class DiskChange:
    """A call that changes what a disk has, once it is done.

    Attributes:
        name: ``create`` (also of an existing file, which it empties), ``write``, ``resize``, ``sync``,
            ``rename``, ``exchange``, ``link``, ``symlink``, ``unlink``, ``mkdir``, ``rmdir``.
        path: what it is about; the new name for ``rename`` and ``link``.
        file: a number that stands for the file, whatever names it has.
        before: the old name for ``rename`` and ``link``, the other one for ``exchange``, a symlink's target.
        data, offset: what a ``write`` writes; for ``resize`` the size is the offset.
    """

    name: str
    path: str
    file: int = 0
    before: str = ""
    data: bytes = b""
    offset: int = 0


@dataclass(frozen=True)
class DiskLog:
    """What a command changed.

    Attributes:
        root: the directory below which it did, with a slash.
        begin: the files there at first: their numbers and contents, by path; `folders`, the directories.
        changes: in their order.
    """

    root: str
    begin: Mapping[str, tuple[int, bytes]]
    folders: frozenset[str]
    changes: Sequence[DiskChange]


class DiskFault:
    """What is done at the call with number `step`, which counts from 1; nothing for 0.

    `kind` is one of `KINDS`.
    """

    def __init__(self, kind: str = "", step: int = 0) -> None:
        self.kind, self.step = kind, step

    def __str__(self) -> str:
        return f"{self.kind} at call {self.step}"


KINDS = ("kill", "kill within", "ENOSPC", "EDQUOT", "EIO", "disk full", "read-only", "dead disk")
"""Killed before a call, or a write in its middle; one call that fails; calls that fail from there on."""

_FOR_GOOD = {"disk full": errno.ENOSPC, "read-only": errno.EROFS, "dead disk": errno.EIO}


class WatchedDisk:
    """Counts, and with `record` keeps, the calls that change something below `root`.

    Attributes:
        count: calls so far.
    """

    def __init__(
        self, root: Path, fault: DiskFault | None = None, *, record: bool = False, each: Any = None
    ) -> None:
        self.root, self.count, self._changes = f"{os.path.realpath(root)}{os.sep}", 0, list[DiskChange]()
        self._fault, self._record, self._each = fault or DiskFault(), record, each
        self._lock, self._numbers = threading.RLock(), dict[int, int]()
        self._next = itertools.count(1)
        self._begin: dict[str, tuple[int, bytes]] = {}
        self._folders = frozenset[str]()
        if record:
            self._folders = frozenset(str(path) for path in Path(root).rglob("*") if path.is_dir())
            for path in Path(root).rglob("*"):
                if path.is_file():
                    self._begin[str(path)] = (self._number(path.stat().st_ino), path.read_bytes())

    def install(self) -> None:
        """Replaces the functions of `os` and `open`, for the rest of the process."""
        self._plain = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
        self._plain_open = io.open
        for name in ("write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync"):
            setattr(os, name, partial(getattr(self, f"_{name}")))
        for name in ("rename", "replace"):
            setattr(os, name, self._rename)
        for name in ("link", "symlink", "mkdir", "rmdir"):
            setattr(os, name, getattr(self, f"_{name}"))
        os.unlink = os.remove = self._unlink
        os.open = self._open
        from moectl.files import atomic

        self._plain["exchange"], atomic.rename_exchange = atomic.rename_exchange, self._exchange
        builtins.open = io.open = self._open_file

    def log(self) -> DiskLog:
        """What was changed until now."""
        return DiskLog(self.root, self._begin, self._folders, tuple(self._changes))

    def _number(self, inode: int) -> int:
        """The number of a file that exists."""
        if inode not in self._numbers:
            self._numbers[inode] = next(self._next)
        return self._numbers[inode]

    def _place(self, path: Any, folder: int | None = None) -> str:
        """The path below `root`; empty for others."""
        if isinstance(path, int):
            try:
                place = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
            except OSError:
                return ""
        else:
            name = os.fsdecode(path)
            if folder is not None:
                name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
            place = os.path.abspath(name)
        return place if place.startswith(self.root) or f"{place}/" == self.root else ""

    def _call(
        self,
        name: str,
        place: str,
        plain: Callable[[], Any],
        done: Callable[[Any], DiskChange],
        half: Any = None,
    ) -> Any:
        """Does a call, or what is to be done in its place."""
        with self._lock:
            self.count += 1
            if self._each:
                self._each(self.count)
            kind, step = self._fault.kind, self._fault.step
            if step and self.count >= step:
                self._refuse(name, place, kind, self.count == step, half)
            if not self._record:
                return plain()
            result = plain()
            self._changes.append(done(result))
            return result

    def _refuse(self, name: str, place: str, kind: str, first: bool, half: Any) -> None:
        if kind.startswith("kill"):
            if kind == "kill within" and half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        refused = _FOR_GOOD.get(kind) or getattr(errno, kind)
        if kind == "disk full" and first and half:
            half()
        if kind not in _FOR_GOOD and not first:
            return
        if refused in (errno.ENOSPC, errno.EDQUOT) and name not in NEEDS_ROOM and name != "sync":
            return
        if kind == "read-only" and name == "sync":
            return
        raise OSError(refused, os.strerror(refused), place)

    # The functions.

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        plain = partial(self._plain["open"], path, flags, mode, dir_fd=dir_fd)
        place = self._place(path, dir_fd)
        if not place or not flags & (os.O_CREAT | os.O_TRUNC):
            return int(plain())
        known = os.path.lexists(place)
        if known and not flags & os.O_TRUNC:
            return int(plain())
        if known and not os.stat(place).st_size:
            return int(plain())

        def done(fd: int) -> DiskChange:
            inode = os.fstat(fd).st_ino
            if not known:
                self._numbers[inode] = next(self._next)  # perhaps that of a file that is gone
            return DiskChange("create", place, self._number(inode))

        return int(self._call("create", place, plain, done))

    def _written(self, fd: int, data: Any, offset: int, plain: Callable[[Any], int]) -> int:
        place = self._place(fd)
        if not place:
            return plain(data)

        def done(written: int) -> DiskChange:
            what = bytes(memoryview(data).cast("B")[:written])
            return DiskChange("write", place, self._number(os.fstat(fd).st_ino), "", what, offset)

        view = memoryview(data).cast("B")
        return int(
            self._call("write", place, lambda: plain(data), done, lambda: plain(view[: len(view) // 2]))
        )

    def _write(self, fd: int, data: Any) -> int:
        offset = 0
        if self._place(fd):
            import fcntl

            append = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
            offset = os.fstat(fd).st_size if append else os.lseek(fd, 0, os.SEEK_CUR)
        return self._written(fd, data, offset, lambda view: self._plain["write"](fd, view))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self._written(fd, data, offset, lambda view: self._plain["pwrite"](fd, view, offset))

    def _resized(self, fd: int, size: int, plain: Callable[[], Any]) -> None:
        place = self._place(fd)
        if not place or os.fstat(fd).st_size == size:
            plain()
            return
        self._call(
            "resize",
            place,
            plain,
            lambda _: DiskChange("resize", place, self._number(os.fstat(fd).st_ino), offset=size),
        )

    def _ftruncate(self, fd: int, size: int) -> None:
        self._resized(fd, size, lambda: self._plain["ftruncate"](fd, size))

    def _posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        size = max(os.fstat(fd).st_size, offset + length)
        self._resized(fd, size, lambda: self._plain["posix_fallocate"](fd, offset, length))

    def _fsync(self, fd: int) -> None:
        place = self._place(fd)
        if not place:
            return
        number = 0 if os.path.isdir(place) else self._number(os.fstat(fd).st_ino)
        # The disk of a test need not wait.
        self._call("sync", place, lambda: None, lambda _: DiskChange("sync", place, number))

    _fdatasync = _fsync

    def _rename(
        self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        plain = partial(self._plain["replace"], old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        before, after = self._place(old, src_dir_fd), self._place(new, dst_dir_fd)
        if not before or not after:
            plain()
            return
        number = self._number(os.lstat(before).st_ino) if os.path.lexists(before) else 0
        folder = os.path.isdir(before)
        self._call(
            "rename",
            before,
            plain,
            lambda _: DiskChange("rename", after, 0 if folder else number, before),
        )

    def _exchange(self, first: Path, second: Path) -> bool:
        before, after = self._place(first), self._place(second)
        plain = partial(self._plain["exchange"], first, second)
        if not before or not after:
            return bool(plain())
        return bool(
            self._call("exchange", after, plain, lambda _: DiskChange("exchange", after, before=before))
        )

    def _link(self, old: Any, new: Any, **options: Any) -> None:
        plain, place = partial(self._plain["link"], old, new, **options), self._place(new)
        if not place:
            plain()
            return
        self._call(
            "link",
            place,
            plain,
            lambda _: DiskChange("link", place, self._number(os.stat(place).st_ino), os.fsdecode(old)),
        )

    def _symlink(self, old: Any, new: Any, *rest: Any, **options: Any) -> None:
        plain, place = partial(self._plain["symlink"], old, new, *rest, **options), self._place(new)
        if not place:
            plain()
            return
        self._call("symlink", place, plain, lambda _: DiskChange("symlink", place, 0, os.fsdecode(old)))

    def _removed(self, name: str, path: Any, dir_fd: int | None, number: bool) -> None:
        plain, place = partial(self._plain[name], path, dir_fd=dir_fd), self._place(path, dir_fd)
        if not place or not os.path.lexists(place):
            plain()
            return
        file = self._number(os.lstat(place).st_ino) if number else 0
        self._call(name, place, plain, lambda _: DiskChange(name, place, file))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("unlink", path, dir_fd, True)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("rmdir", path, dir_fd, False)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        plain, place = partial(self._plain["mkdir"], path, mode, dir_fd=dir_fd), self._place(path, dir_fd)
        if not place or os.path.lexists(place):
            plain()
            return
        self._call("mkdir", place, plain, lambda _: DiskChange("mkdir", place))

    def _open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """`open`, whose writes below `root` go through `os.write`."""
        if not set(mode) & set("wax+") or not self._place(file):
            return self._plain_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        flags = {"w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}
        how = next((flag for letter, flag in flags.items() if letter in mode), 0) | os.O_CLOEXEC
        how |= os.O_RDWR if "+" in mode else os.O_WRONLY
        fd = file if isinstance(file, int) else os.open(file, how, 0o666)
        raw = _RawFile(fd, closefd, "+" in mode)
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)


class _RawFile(io.RawIOBase):
    """An open file by the functions of `os`."""

    def __init__(self, fd: int, owns: bool, reads: bool) -> None:
        self._fd, self._owns, self._reads = fd, owns, reads

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._fd, [buffer])

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._fd, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self._fd, size)
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._owns:
                os.close(self._fd)

"""Atomic file writes: temporary name, fsync, rename; system errors become `Unavailable`."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import Unavailable
from .access import BY_UMASK, Access
from .lock import is_at, wait_for
from .safe_reading import CHUNK, read_exactly
from .sizes import size as size_words

PARTIAL = ".partial"
"""Suffix of a file while it is being written."""

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_FULL[errno.EFBIG] = "the file would be larger than the allowed file size"

_NO_LINK = (
    errno.EXDEV,
    errno.EPERM,
    errno.EMLINK,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.ENOENT,
)
"""Errors of linking after which a file is copied; the last one without /proc, or if the file was removed."""


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2."""


@contextmanager
def disk_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Converts an OSError while writing `nbytes` to `path` to `Unavailable`."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, nbytes, error) from error


def _cannot_write(path: Path, nbytes: int, error: OSError) -> Unavailable:
    if error.errno in _FULL:
        return Unavailable(
            f"cannot write {path.name}, which needs {size_words(nbytes)}: {_FULL[error.errno]}.",
            hint="Make room, then run the same command again with --resume.",
        )
    return Unavailable(f"cannot write {path}: {error.strerror or error}.", hint="Check the output folder.")


class WriteRefused(OSError):
    """The operating system failed to write to the open file `fd`."""

    def __init__(self, fd: int, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.fd = fd


def write_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Writes all of `view` at `offset`; WriteRefused when the system cannot."""
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            raise WriteRefused(fd, error) from error


def sync_folder(folder: Path) -> None:
    """Makes new, renamed and removed names in `folder` durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_file(path: Path) -> None:
    """Removes a file if it is there; Unavailable when the system refuses."""
    with disk_errors(path, 0):
        path.unlink(missing_ok=True)


def exchange(first: Path, second: Path) -> None:
    """Exchanges the names of two files or directories at once, so that neither is ever missing.

    Where the system cannot, they are renamed one after the other. Raises OSError.
    """
    if rename_exchange(first, second):
        return
    aside = first.with_name(f"{first.name}.old")
    second.rename(aside)
    try:
        first.rename(second)
    except BaseException:
        aside.rename(second)
        raise
    aside.rename(first)


def rename_exchange(first: Path, second: Path) -> bool:
    """Linux's ``renameat2`` with RENAME_EXCHANGE; False where that is not possible. Raises OSError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(second))


class _Replacement:
    """An empty file under a temporary name beside `path`, whose place it takes. Raises OSError.

    One process at a time has it: another one waits until that has committed or discarded it. What a killed
    process left under the temporary name, or a link there, is removed and never written to.
    """

    def __init__(self, path: Path, access: Access = BY_UMASK) -> None:
        self.path, self.partial = path, path.with_name(path.name + PARTIAL)
        self.fd = -1
        flags, mode = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, access.of_file(path.parent)
        while self.fd < 0:
            try:
                fd, new = os.open(self.partial, flags | os.O_CREAT | os.O_EXCL, mode), True
            except FileExistsError:
                fd, new = self._left_over(flags), False
            if fd < 0:
                continue
            try:
                wait_for(fd)
                if is_at(self.partial, fd):
                    if new:
                        self.fd = fd
                    else:
                        self.partial.unlink()
            finally:
                if self.fd < 0:
                    os.close(fd)

    def _left_over(self, flags: int) -> int:
        """Opens what has the temporary name; negative if it is gone, or was a link, which is removed."""
        try:
            return os.open(self.partial, flags | os.O_NONBLOCK)
        except FileNotFoundError:
            return -1
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self.partial.unlink(missing_ok=True)
            return -1

    def commit(self) -> None:
        """Syncs the file and renames it to its final name."""
        try:
            os.fsync(self.fd)
            self.partial.replace(self.path)
        except BaseException:
            self.discard()
            raise
        self._close()
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes the file, unless it was committed. A file that the system keeps is left."""
        if self.fd >= 0:
            with suppress(OSError):
                self.partial.unlink()
            self._close()

    def _close(self) -> None:
        # After this the temporary name may be another process's.
        fd, self.fd = self.fd, -1
        os.close(fd)


def replace_file(path: Path, data: bytes, access: Access = BY_UMASK) -> None:
    """Replaces `path` by `data`: readers see the old or the new contents. Raises OSError.

    Of several writers the last one to end counts.
    """
    file = _Replacement(path, access)
    try:
        write_exactly(file.fd, memoryview(data), 0)
        file.commit()
    except BaseException:
        file.discard()
        raise


class NewFile:
    """A file of known size, written under a temporary name, then either committed or discarded.

    What has one of the two names, such as a link, is replaced and never written to. Raises Unavailable when
    the system refuses to create, write or rename it.
    """

    def __init__(self, path: Path, size: int, access: Access = BY_UMASK) -> None:
        self.path, self.size = path, size
        with disk_errors(path, size):
            self._file = _Replacement(path, access)

    @property
    def fd(self) -> int:
        """The descriptor; negative once the file was committed or discarded."""
        return self._file.fd

    def reserve(self) -> None:
        """Preallocates the file, so that a full disk is detected before the work."""
        with disk_errors(self.path, self.size):
            _reserve(self.fd, self.size)

    def write(self, view: memoryview, offset: int) -> None:
        """Writes all of `view` at `offset`."""
        try:
            write_exactly(self.fd, view, offset)
        except WriteRefused as error:
            raise self.refused(error) from error

    def refused(self, error: OSError) -> Unavailable:
        """The error to raise when the system failed to write the file."""
        return _cannot_write(self.path, self.size, error)

    def commit(self) -> None:
        """Syncs the file and renames it to its final name; discards it when the system refuses."""
        with disk_errors(self.path, self.size):
            self._file.commit()

    def discard(self) -> None:
        """Removes the temporary file, unless it was committed."""
        self._file.discard()


@contextmanager
def replacing(path: Path, size: int, access: Access = BY_UMASK) -> Iterator[int]:
    """A descriptor of a file with `size` preallocated bytes, which replaces `path` when the block succeeds.

    The data are written to a temporary file and synced; on any error, including an interrupt, that file is
    removed and `path` is unchanged. Unavailable when the file cannot be written; other errors of the block
    propagate unchanged.
    """
    file = NewFile(path, size, access)
    try:
        file.reserve()
        try:
            yield file.fd
        except WriteRefused as error:
            if error.fd != file.fd:
                raise
            raise file.refused(error) from error
        file.commit()
    except BaseException:
        file.discard()
        raise


def _reserve(fd: int, size: int) -> None:
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.ftruncate(fd, size)


def write_file(path: Path, data: bytes, access: Access = BY_UMASK) -> None:
    """Replaces `path` by `data` atomically: readers see the old file or the complete new one."""
    with replacing(path, len(data), access) as fd:
        write_exactly(fd, memoryview(data), 0)


def copy_bytes(source: int, target: int, read_at: int, write_at: int, nbytes: int, name: str) -> None:
    """Copies `nbytes` between open files in chunks; `name` is the source's name in errors."""
    buffer = memoryview(bytearray(min(CHUNK, nbytes)))
    done = 0
    while done < nbytes:
        piece = buffer[: min(len(buffer), nbytes - done)]
        read_exactly(source, piece, read_at + done, name)
        write_exactly(target, piece, write_at + done)
        done += len(piece)


def copy_file(source: int, name: str, target: Path, access: Access = BY_UMASK) -> None:
    """Copies the open file `source`, called `name` in errors, to a temporary name, then renames it."""
    size = os.fstat(source).st_size
    with replacing(target, size, access) as out:
        copy_bytes(source, out, 0, 0, size, name)


def link_or_copy(source: int, name: str, target: Path, access: Access = BY_UMASK) -> None:
    """Creates `target` as a hard link to the open file `source`, called `name` in errors.

    It becomes a copy where the file system cannot link, or a link would be open to more than `access`.
    """
    remove_file(target)
    if not access.admits(os.fstat(source), target.parent):
        copy_file(source, name, target, access)
        return
    with disk_errors(target, 0):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The descriptor's name in /proc, since a path might mean another file by now.
        os.link(f"/proc/self/fd/{source}", target.name, dst_dir_fd=folder, follow_symlinks=True)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise Unavailable(
                f"cannot link {name} to {target}: {error.strerror or error}.", hint="Check the output folder."
            ) from error
        copy_file(source, name, target, access)
    else:
        with disk_errors(target, 0):
            os.fsync(folder)
    finally:
        os.close(folder)

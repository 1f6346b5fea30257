"""Atomic file writes: temporary name, fsync, rename; system errors become `Unavailable`."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import Unavailable
from .access import BY_UMASK, Access
from .safe_reading import CHUNK, read_exactly

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
            f"cannot write {path.name}, which needs {nbytes} bytes: {_FULL[error.errno]}.",
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


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file of `path`'s folder: readers see the old or the new contents. Raises OSError.

    The temporary name is unique, so that of several writers the last one to end counts.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=PARTIAL)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class NewFile:
    """A file of known size, written under a temporary name, then either committed or discarded.

    What has one of the two names, such as a link, is replaced and never written to. Raises Unavailable when
    the system refuses to create, write or rename it.
    """

    def __init__(self, path: Path, size: int, access: Access = BY_UMASK) -> None:
        self.path, self.size = path, size
        self._partial = path.with_name(path.name + PARTIAL)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with disk_errors(path, size):
            self._partial.unlink(missing_ok=True)
            self.fd = os.open(self._partial, flags, access.of_file(path.parent))
        self._open = True

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
        """Syncs the file and renames it to its final name."""
        try:
            with disk_errors(self.path, self.size):
                os.fsync(self.fd)
                self._close()
                self._partial.replace(self.path)
                sync_folder(self.path.parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes the temporary file, unless it was committed."""
        if self._open:
            self._close()
        self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        self._open = False
        os.close(self.fd)


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
    target.unlink(missing_ok=True)
    if not access.admits(os.fstat(source), target.parent):
        copy_file(source, name, target, access)
        return
    with disk_errors(target, 0):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The descriptor's name in /proc, since a path might mean another file by now.
        os.link(f"/proc/self/fd/{source}", target.name, dst_dir_fd=folder, follow_symlinks=True)
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise Unavailable(
                f"cannot link {name} to {target}: {error.strerror or error}.", hint="Check the output folder."
            ) from error
        copy_file(source, name, target, access)
    finally:
        os.close(folder)

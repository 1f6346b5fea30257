"""Files written whole or not at all: temporary names, fsync, rename, and disk errors in words."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..checkpoint.shards import open_regular
from ..errors import CheckpointError, Unavailable, UsageError

PARTIAL = ".partial"
"""Suffix of a file that is still being written."""

CHUNK = 4 << 20
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_FULL[errno.EFBIG] = "the file would be larger than the allowed file size"

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def disk_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Turns the operating system's refusal to write `nbytes` to `path` into `Unavailable`."""
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
    """The operating system's refusal to write to the open file `fd`."""

    def __init__(self, fd: int, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.fd = fd


def read_exactly(fd: int, view: memoryview, offset: int, name: str) -> None:
    """Fills `view` with the bytes of file `fd` from `offset`.

    Raises CheckpointError when the file ends too soon or the disk cannot read it.
    """
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot read {name}: {error.strerror or error}.") from error
        if got == 0:
            raise CheckpointError(
                f"{name} is truncated: {len(view)} bytes expected at offset {offset}, got {done}.",
                hint="Fetch the file again.",
            )
        done += got


def write_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Writes all of `view` at `offset`; WriteRefused when the disk cannot take it."""
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            raise WriteRefused(fd, error) from error


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class NewFile:
    """A file of known size that is written under a temporary name, then synced and renamed, or removed.

    Raises Unavailable where the system refuses to create, write or rename it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._partial = path.with_name(path.name + PARTIAL)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with disk_errors(path, size):
            self.fd = os.open(self._partial, flags, 0o644)
        self._open = True

    def reserve(self) -> None:
        """Asks for the space now, so that a full disk is met before the work and not after it."""
        with disk_errors(self.path, self.size):
            _reserve(self.fd, self.size)

    def write(self, view: memoryview, offset: int) -> None:
        """Writes all of `view` at `offset`."""
        try:
            write_exactly(self.fd, view, offset)
        except WriteRefused as error:
            raise self.refused(error) from error

    def refused(self, error: OSError) -> Unavailable:
        """The error for what the system said about writing the file."""
        return _cannot_write(self.path, self.size, error)

    def commit(self) -> None:
        """Syncs the bytes and gives the file its name."""
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
        """Removes the temporary file, if it was not renamed."""
        if self._open:
            self._close()
        self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        self._open = False
        os.close(self.fd)


@contextmanager
def replacing(path: Path, size: int) -> Iterator[int]:
    """A file descriptor of `size` preallocated bytes that becomes `path` when the block succeeds.

    The bytes live under a temporary name until they are synced; on any error, an interrupt
    included, the temporary file is removed and `path` stays as it was. Unavailable when the file
    cannot be written; whatever else the block raises stays what it is.
    """
    file = NewFile(path, size)
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


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path` at once: readers see the old file or the whole new one."""
    with replacing(path, len(data)) as fd:
        write_exactly(fd, memoryview(data), 0)


def range_sha256(fd: int, start: int, end: int, name: str) -> str:
    """SHA-256 of a run of bytes of an open file, read in small pieces."""
    digest = hashlib.sha256()
    hash_range(digest, fd, start, end, name)
    return digest.hexdigest()


def hash_range(digest: Any, fd: int, start: int, end: int, name: str) -> None:
    """Puts a run of bytes of an open file through `digest`, in small pieces."""
    buffer = memoryview(bytearray(max(1, min(CHUNK, end - start))))
    while start < end:
        piece = buffer[: min(len(buffer), end - start)]
        read_exactly(fd, piece, start, name)
        digest.update(piece)
        start += len(piece)


def file_sha256(path: Path, advance: Callable[[int], None] = lambda done: None) -> str:
    """SHA-256 of a file in hexadecimal, read in small pieces; `advance` gets the bytes of each."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    with open_regular(path, str(path)) as file:
        while got := os.readv(file.fileno(), [buffer]):
            digest.update(buffer[:got])
            advance(got)
    return digest.hexdigest()


def copy_bytes(source: int, target: int, read_at: int, write_at: int, nbytes: int, name: str) -> None:
    """Copies `nbytes` between open files in small pieces."""
    buffer = memoryview(bytearray(min(CHUNK, nbytes)))
    done = 0
    while done < nbytes:
        piece = buffer[: min(len(buffer), nbytes - done)]
        read_exactly(source, piece, read_at + done, name)
        write_exactly(target, piece, write_at + done)
        done += len(piece)


def copy_file(source: Path, target: Path) -> None:
    """Copies a file under a temporary name, then renames it."""
    with open_regular(source, str(source)) as file:
        size = os.fstat(file.fileno()).st_size
        with replacing(target, size) as out:
            copy_bytes(file.fileno(), out, 0, 0, size, source.name)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for `source`'s data, or a copy where the file system cannot give one."""
    resolved = source.resolve()
    target.unlink(missing_ok=True)
    try:
        os.link(resolved, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise Unavailable(f"cannot link {source} to {target}: {error.strerror or error}.") from error
        copy_file(resolved, target)
    else:
        sync_folder(target.parent)


def file_findings(path: Path, size: int, sha256: str) -> list[str]:
    """How a file differs from its recorded size and SHA-256, in words; empty when it does not."""
    if not path.is_file():
        return [f"{path.name} is missing"]
    got = path.stat().st_size
    if got != size:
        return [f"{path.name} must have {size} bytes, got {got}"]
    return [] if file_sha256(path) == sha256 else [f"{path.name} does not have the SHA-256 that was written"]


def refuse_inside(source: Path, out: Path) -> None:
    """UsageError when `out` is `source` or lies in it, or is a file."""
    home, target = source.resolve(), out.resolve()
    if target == home or home in target.parents:
        raise UsageError(
            f"the output {out} lies in {source}, which is never written to.",
            hint="Choose a folder outside of it.",
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file.", hint="Choose a folder.")


def create_folder(folder: Path) -> None:
    """Creates `folder` and its parents; Unavailable when the system refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot create {folder}: {error.strerror or error}.") from error


def refuse_filled(out: Path) -> None:
    """UsageError when `out` is anything but an empty folder or nothing at all."""
    with disk_errors(out, 0):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is not an empty folder.", hint="Give a new folder, or remove this one.")


@contextmanager
def all_or_none(out: Path, names: Iterable[str]) -> Iterator[None]:
    """Creates the folder `out` for the block to write `names` in; on any error all of it goes again."""
    with disk_errors(out, 0):
        made = [place for place in (out, *out.parents) if not place.exists()]
    try:
        create_folder(out)
        yield
    except BaseException:
        for name in names:
            with suppress(OSError):
                (out / name).unlink()
        for place in made:
            with suppress(OSError):
                place.rmdir()
        raise


def refuse_small_disk(out: Path, needed: int, hint: str) -> None:
    """Unavailable when `out`'s file system cannot take `needed` bytes, what `out` holds already included."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    held = sum(path.lstat().st_size for path in out.iterdir()) if out.is_dir() else 0
    room = shutil.disk_usage(place).free + held
    if room < needed:
        raise Unavailable(f"{needed} bytes of disk are needed, {out} has room for {room}.", hint=hint)

"""Safe reads: regular files only, exact lengths, and hashes in bounded memory."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError, UsageError

CHUNK = 4 << 20
"""Bytes read at a time when a file is hashed or copied."""


@contextmanager
def open_regular(path: Path, where: str) -> Iterator[BinaryIO]:
    """Opens the regular file `path` for reading; does not block on a pipe or device.

    Raises CheckpointError for anything but a regular file, and for system errors inside the block.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise not_regular(where)
            with read_open(fd, where) as file:
                yield file
        finally:
            os.close(fd)
    except OSError as error:
        raise _cannot_read(where, error) from error


@contextmanager
def read_open(fd: int, where: str) -> Iterator[BinaryIO]:
    """The open file `fd`, which stays open; CheckpointError for system errors inside the block."""
    try:
        with open(fd, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise _cannot_read(where, error) from error


def _cannot_read(where: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{where} cannot be read: {error.strerror or error}.", hint="Check the file and its permissions."
    )


def read_bounded(path: Path, limit: int, where: str) -> bytes:
    """The bytes of the regular file `path`, which has at most `limit`.

    Raises CheckpointError for anything else, before it is read; `where` names the file.
    """
    with open_regular(path, where) as file:
        return bounded(file, limit, where)


def bounded(file: BinaryIO, limit: int, where: str) -> bytes:
    """The bytes of an open file; CheckpointError, before it is read, if it has more than `limit`."""
    size, data = os.fstat(file.fileno()).st_size, b""
    if size <= limit:
        data = file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise CheckpointError(
            f"{where} has {max(size, len(data))} bytes, expected at most {limit}.",
            hint="Check that it is the right file.",
        )
    return data


@contextmanager
def open_given(path: Path, what: str, kind: str) -> Iterator[BinaryIO]:
    """Opens the regular file `path`, which the user gives, for reading; does not block on a pipe or device.

    Raises the UsageError of `unreadable` for anything else, and for system errors inside the block.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            with open(fd, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(fd)
    except OSError as error:
        raise unreadable(what, path, error, kind) from error


GIVEN_LIMIT = 64 << 20
"""Most bytes of a document or table that the user gives."""


def read_given(path: Path, kind: str, what: str = "", limit: int = GIVEN_LIMIT) -> bytes:
    """The bytes of the regular file `path`, which the user gives.

    Raises UsageError, about `what` (by default the path), for a file that cannot be read or has more than
    `limit` bytes. `kind` is as for `unreadable`.
    """
    what = what or str(path)
    with open_given(path, what, kind) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise UsageError(
            f"cannot read {what}: it has {max(size, len(data))} bytes, expected at most {limit}",
            hint=f"give the path of {kind}",
        )
    return data


def not_regular(where: str) -> CheckpointError:
    """The error for a path, named `where`, that is not a regular file."""
    return CheckpointError(
        f"{where} is not a file, but a folder, pipe or device.",
        hint="Put the checkpoint's file in its place.",
    )


SYSTEM_LIMIT = 16 << 20
"""Most bytes that are read of a file of the system's or of an installed package's."""


def text_or_empty(file: Path) -> str:
    """The text of a file of the system's or a package's; empty if it cannot be read, or is no regular file.

    Of a longer file, the first `SYSTEM_LIMIT` bytes.
    """
    try:
        with open_regular(file, str(file)) as content:
            return content.read(SYSTEM_LIMIT).decode("utf-8", "replace")
    except CheckpointError:
        return ""


LAST_BYTES = 1 << 16
"""Bytes of the end of what another process printed, in which its last line is looked for."""


def last_text(file: Path) -> str:
    """The last `LAST_BYTES` of a file as text; CheckpointError if it cannot be read."""
    with open_regular(file, str(file)) as content:
        content.seek(max(0, os.fstat(content.fileno()).st_size - LAST_BYTES))
        return content.read(LAST_BYTES).decode("utf-8", "replace")


def read_exactly(fd: int, view: memoryview, offset: int, name: str) -> None:
    """Fills `view` with the bytes of file `fd` from `offset`.

    Raises CheckpointError when the file ends too soon or the disk cannot read it.
    """
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {name}: {error.strerror or error}.",
                hint="Check the disk, or fetch the file again.",
            ) from error
        if got == 0:
            raise CheckpointError(
                f"{name} is truncated: {len(view)} bytes expected at offset {offset}, got {done}.",
                hint="Fetch the file again.",
            )
        done += got


def range_sha256(fd: int, start: int, end: int, name: str) -> str:
    """SHA-256 of bytes `start` to `end` of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    hash_range(digest, fd, start, end, name)
    return digest.hexdigest()


def hash_range(digest: Any, fd: int, start: int, end: int, name: str) -> None:
    """Updates `digest` with bytes `start` to `end` of an open file, read in chunks."""
    buffer = memoryview(bytearray(max(1, min(CHUNK, end - start))))
    while start < end:
        piece = buffer[: min(len(buffer), end - start)]
        read_exactly(fd, piece, start, name)
        digest.update(piece)
        start += len(piece)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file that the user gives, in hexadecimal; CheckpointError if it cannot be read."""
    with open_regular(path, str(path)) as file:
        return descriptor_sha256(file.fileno())


def descriptor_sha256(fd: int) -> str:
    """SHA-256 of an open file from where it is to its end, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    while got := os.readv(fd, [buffer]):
        digest.update(buffer[:got])
    return digest.hexdigest()


def unreadable(what: str, path: Path, error: Exception, kind: str) -> UsageError:
    """The error for the file `path`, named `what`, when reading it failed with `error`.

    `kind` is the expected kind of file, such as ``a safetensors file``.
    """
    return UsageError(f"cannot read {what}: {_why(path, error, kind)}", hint=f"give the path of {kind}")


def _why(path: Path, error: Exception, kind: str) -> str:
    if path.is_dir():
        return "it is a folder"
    if not os.access(path, os.F_OK):
        return "there is no such file"
    if not path.is_file():
        return "it is a pipe or device"
    if not os.access(path, os.R_OK):
        return "it may not be read by this user"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"it is not {kind}, or is damaged"

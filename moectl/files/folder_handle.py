"""Files of a folder, opened by names that documents give, without leaving the folder.

A checked path says nothing about the file that a later `open` finds under it: a link may have been put there
since. So names are not checked but walked: from the folder's descriptor, one component after the other, each
without following a link. A name that is a link is resolved to the path it stands for, which has to be in the
folder, and that path is walked in the same way, so that nothing outside is ever opened.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ..errors import CheckpointError
from .safe_reading import bounded, descriptor_sha256, not_regular, read_open

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC

_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
"""Errors of opening a link, or something below one, without following it."""

TRIES = 100
"""How often a name is resolved again when what it stands for was replaced by a link in between."""


class FolderHandle(AbstractContextManager["FolderHandle"]):
    """An open folder, whose files are opened by name.

    The path of the folder itself is the user's, and may lead through links. Files may be links to other files
    of the folder; in a Hub cache, those of ``models--ORG--NAME/snapshots/REVISION`` are links to the
    repository's ``blobs``, which are allowed.

    Raises CheckpointError if there is no such folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     _ = Path(name, "config.json").write_bytes(b"{}")
        ...     with FolderHandle(Path(name)) as folder, folder.file("config.json") as file:
        ...         file.read()
        b'{}'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._roots: list[tuple[Path, int]] = []
        try:
            home = Path(os.path.realpath(path, strict=True))
            self._roots.append((home, os.open(home, _FOLDER)))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CheckpointError(
                f"{path} cannot be opened: {why}.", hint="Check the path and its permissions."
            ) from error
        repository = home.parent.parent
        if home.parent.name == "snapshots" and repository.name.startswith("models--"):
            try:
                blobs = repository / "blobs"
                self._roots.append((blobs, os.open(blobs, _FOLDER | os.O_NOFOLLOW)))
            except OSError:
                pass  # A snapshot without blobs is a folder like any other.

    def open(self, name: str, where: str = "") -> int:
        """A read-only descriptor of the regular file `name`, which may have folders; the caller closes it.

        Does not block on a pipe or device. Raises CheckpointError, in which `where` (by default `name`) names
        the file, if it is missing, is no regular file, or leads out of the folder.
        """
        where = where or name
        parts = name.split("/")
        if {"", ".", ".."} & set(parts) or "\0" in name:
            raise CheckpointError(
                f"{where} is not the name of a file inside its folder.", hint="Fetch or write it again."
            )
        try:
            fd = self._opened(parts, where)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise CheckpointError(
                    f"{where}: the file cannot be found ({error.strerror}).", hint="Fetch or write it again."
                ) from error
            raise CheckpointError(
                f"{where} cannot be read: {error.strerror or error}.",
                hint="Check the file and its permissions.",
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise not_regular(where)
        return fd

    def _opened(self, parts: list[str], where: str) -> int:
        for _ in range(TRIES):
            try:
                return _walked(self._roots[0][1], parts)
            except OSError as error:
                if error.errno not in _LINK:
                    raise
            root, below = self._resolved(parts, where)
            try:
                return _walked(root, below)
            except OSError as error:
                if error.errno not in _LINK:
                    raise
        raise CheckpointError(
            f"{where} is being replaced all the time.",
            hint="Let nothing write to its folder.",
        )

    def _resolved(self, parts: list[str], where: str) -> tuple[int, list[str]]:
        """What a name with links means: the descriptor of the folder or of blobs, and components below it."""
        real = Path(os.path.realpath(self._roots[0][0].joinpath(*parts), strict=True))
        for root, fd in self._roots:
            if real != root and real.is_relative_to(root):
                return fd, list(real.relative_to(root).parts)
        if real == self._roots[0][0]:
            raise not_regular(where)
        raise CheckpointError(
            f"{where} is a link to {real}, outside of its folder.",
            hint="Replace the link by the file, or give the folder that it points to.",
        )

    @contextmanager
    def file(self, name: str, where: str = "") -> Iterator[BinaryIO]:
        """`open` as a file that is closed at the end; system errors of the block become CheckpointError."""
        fd = self.open(name, where)
        try:
            with read_open(fd, where or name) as file:
                yield file
        finally:
            os.close(fd)

    def status(self, name: str, where: str = "") -> os.stat_result:
        """What the system says of the file that `open` opens."""
        with self.file(name, where) as file:
            return os.fstat(file.fileno())

    def close(self) -> None:
        """Closes the folder; files that were opened stay open."""
        for _, fd in self._roots:
            os.close(fd)
        self._roots.clear()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _walked(folder: int, parts: list[str]) -> int:
    """A descriptor of the file at `parts` below the descriptor `folder`; OSError of `_LINK` at any link."""
    above = folder
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
            if above != folder:
                os.close(above)
            above = below
        return os.open(parts[-1], _FILE, dir_fd=above)
    finally:
        if above != folder:
            os.close(above)


@contextmanager
def open_inside(folder: Path, name: str, where: str = "") -> Iterator[BinaryIO]:
    """`FolderHandle.file` of a folder of which one file is read; raises CheckpointError as it does."""
    with FolderHandle(folder) as handle, handle.file(name, where) as file:
        yield file


def read_inside(folder: Path, name: str, limit: int, where: str = "") -> bytes:
    """The bytes of the file `name` of `folder`, which has at most `limit`; CheckpointError otherwise."""
    with open_inside(folder, name, where) as file:
        return bounded(file, limit, where or name)


def sha256_inside(folder: Path, name: str) -> str:
    """SHA-256 of the regular file `name` of `folder` in hexadecimal; CheckpointError if it cannot be read."""
    with open_inside(folder, name, str(folder / name)) as file:
        return descriptor_sha256(file.fileno())


def file_findings(folder: Path, name: str, size: int, sha256: str = "") -> list[str]:
    """Sentences on how a file differs from its recorded size and SHA-256; empty if it does not.

    Without a `sha256` its size alone is compared, and nothing is read.
    """
    if not os.path.lexists(folder / name):
        return [f"{name} is missing"]
    try:
        with open_inside(folder, name) as file:
            if (got := os.fstat(file.fileno()).st_size) != size:
                return [f"{name} must have {size} bytes, got {got}"]
            found = descriptor_sha256(file.fileno()) if sha256 else ""
    except CheckpointError as error:
        return [error.what]
    return [] if found == sha256 else [f"{name} fails its SHA-256 check"]

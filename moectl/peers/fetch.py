"""Fetches pinned files into a directory, where a library appears whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from ..capabilities.kernel_packages import KERNEL_PACKAGES
from ..capabilities.unpacked_libraries import LOCATIONS, find_peer, installed_part
from ..environment.cache_folder import VARIABLE as CACHE_VARIABLE
from ..environment.installed_packages import find_package
from ..errors import CheckpointError, Unavailable
from ..files.atomic import disk_errors, exchange, sync_folder, write_exactly
from ..files.lock import Lock
from ..files.output_folder import create_folder
from ..files.safe_reading import file_sha256
from .pinned import PinnedFile, PinnedPeer, target
from .wheel_stream import RETRY, WheelStream, find_wheel

UNFINISHED = ".unfinished-"
"""Prefix of directories for files that are being fetched; the next run removes what is left of them."""

LOCK_FILE = ".lock"
SPARE = 16 << 20
"""Bytes that stay free on the disk."""

DONE, OTHER, MISSING = "complete", "other", "missing"
"""States of a library in the directory: as pinned; not fetched here, or another version; not there."""

FetchProgress = Callable[[int, int, str], None]


def state_of(peer: PinnedPeer, folder: Path) -> str:
    """`DONE`, `OTHER` or `MISSING`. Every file is read and its hash computed."""
    if all(_matches(file, folder) for file in peer.files):
        return DONE
    return MISSING if find_peer(peer.library, folder) is None else OTHER


def _matches(file: PinnedFile, folder: Path) -> bool:
    path = target(folder, file)
    try:
        if path.stat().st_size != file.size:
            return False
        return file_sha256(path) == file.sha256
    except (OSError, CheckpointError):
        return False


def usable_already(peer: PinnedPeer, folder: Path | None) -> str:
    """Path of the library in `folder`, else of the installed package; empty if neither can be used."""
    if folder is not None and (path := find_peer(peer.library, folder)) is not None:
        return str(path)
    if LOCATIONS[peer.library].package:
        return str(installed_part(peer.library) or "")
    package = find_package(peer.library, KERNEL_PACKAGES[peer.library])
    return package.path if package.present and not package.lacks else ""


def fetch(
    peers: Sequence[PinnedPeer],
    folder: Path,
    *,
    index: str = "",
    allow_whole: bool = False,
    progress: FetchProgress = lambda done, total, text: None,
) -> int:
    """Puts the files of `peers` into `folder`, and returns the bytes transferred.

    Files are checked against their pinned sizes and SHA-256 before they get their names. What was there of
    the same library is replaced. An error or interrupt leaves complete libraries, and nothing of the others.

    Args:
        index: address of a simple package index to use instead of PyPI.
        allow_whole: as in `WheelStream`.
        progress: called with bytes transferred, bytes in all, and what is being fetched.

    Raises Unavailable without network, disk space, or the pinned files; UsageError for a bad `index`.
    """
    create_folder(folder)
    with _locked(folder):
        for leftover in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        _check_space(folder, peers)
        before, total = 0, sum(peer.download for peer in peers)
        for peer in peers:
            url = find_wheel(index, peer.project, peer.wheel) if index else peer.url
            report = functools.partial(_report, progress, peer.backend, before, total)
            stream = WheelStream(
                url, peer.wheel, peer.size, peer.spans, allow_whole=allow_whole, progress=report
            )
            with disk_errors(folder, peer.unpacked):
                temporary = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{peer.backend}-", dir=folder))
            try:
                with stream:
                    for file in peer.files:
                        _write(file, temporary, stream, peer.wheel)
                _move(_tops(peer), temporary, folder)
                before, total = before + stream.received, total - peer.download + stream.received
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return before


def _report(progress: FetchProgress, backend: str, before: int, total: int, received: int) -> None:
    progress(before + received, max(before + received, total), backend)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / LOCK_FILE
    with disk_errors(path, 0):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    lock = Lock(path, fd, work="download", target=folder)
    try:
        lock.take()
        yield
    finally:
        lock.release()
        os.close(fd)


def _check_space(folder: Path, peers: Iterable[PinnedPeer]) -> None:
    needed, free = sum(peer.unpacked for peer in peers) + SPARE, shutil.disk_usage(folder).free
    if free < needed:
        raise Unavailable(
            f"{folder} has {free / 1e6:.0f} MB free, and {needed / 1e6:.0f} MB are needed",
            hint=f"make room, or name another directory with --peers (or {CACHE_VARIABLE})",
        )


def _write(file: PinnedFile, temporary: Path, stream: WheelStream, wheel: str) -> None:
    """Writes one file below `temporary`; Unavailable if it is not the pinned one."""
    path = target(temporary, file)
    with disk_errors(path, file.size):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o755 if file.executable else 0o644)
    digest, size = hashlib.sha256(), 0
    try:
        for data in _content(file, stream):
            digest.update(data)
            if size + len(data) > file.size:
                size += len(data)
                break
            with disk_errors(path, file.size):
                write_exactly(fd, memoryview(data), size)
            size += len(data)
        with disk_errors(path, file.size):
            os.fsync(fd)
    finally:
        os.close(fd)
    if size != file.size or digest.hexdigest() != file.sha256:
        raise Unavailable(
            f"{file.path} in {wheel} is not the pinned file: its SHA-256 is {digest.hexdigest()[:12]}..., "
            f"expected {file.sha256[:12]}...; nothing of it was kept",
            hint=f"{RETRY}; a proxy may have changed it",
        )


def _content(file: PinnedFile, stream: WheelStream) -> Iterator[bytes]:
    """The file's bytes, never many more than its pinned size; what cannot be decompressed ends early."""
    chunks = stream.read(file.offset, file.stored)
    if not file.deflated:
        yield from chunks
        return
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    for chunk in chunks:
        pending = chunk
        while pending:
            try:
                yield inflate.decompress(pending, 1 << 20)
            except zlib.error:
                return
            pending = inflate.unconsumed_tail
    with contextlib.suppress(zlib.error):
        yield inflate.flush()


def _tops(peer: PinnedPeer) -> list[str]:
    """Names below the directory, the library itself last: what is found there is complete."""
    tops = dict.fromkeys(PurePosixPath(file.path).parts[0] for file in peer.files)
    return sorted(tops, key=lambda name: not name.endswith(".dist-info"))


def _move(tops: Sequence[str], temporary: Path, folder: Path) -> None:
    """Renames files and directories into `folder`; earlier ones of these names go with `temporary`."""
    with disk_errors(folder, 0):
        for path in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
            sync_folder(path)
        for name in tops:
            if os.path.lexists(folder / name):
                exchange(temporary / name, folder / name)
            else:
                (temporary / name).rename(folder / name)
        sync_folder(folder)

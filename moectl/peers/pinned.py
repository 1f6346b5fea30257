"""The pinned files of other libraries: which wheel has them, where in it, and their SHA-256."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from ..capabilities.unpacked_libraries import LIBRARIES
from ..errors import Unavailable

FORMAT = {"format": "moectl-peers", "version": 1}
"""Header of the data file."""


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One file inside a wheel.

    Attributes:
        path: where it goes, relative to the directory of unpacked libraries.
        offset, stored: position and size of its data in the wheel, bytes.
        size, sha256: of the file itself.
        deflated: whether the data are compressed.
        executable: whether the file is made executable.
    """

    path: str
    offset: int
    stored: int
    size: int
    sha256: str
    deflated: bool = True
    executable: bool = False


@dataclass(frozen=True, slots=True)
class PinnedPeer:
    """The files of one backend for one kind of machine.

    Attributes:
        backend: the backend whose kernels they are.
        project, version: the release on the package index.
        wheel, url, size, sha256: the wheel's file name, address, size in bytes, and hash.
        machine: the processor, as ``platform.machine()`` names it.
        cuda: major version of CUDA that torch must be built for; empty if any.
        files: in the order of the wheel.
    """

    backend: str
    project: str
    version: str
    wheel: str
    url: str
    size: int
    sha256: str
    machine: str
    cuda: str
    files: tuple[PinnedFile, ...]

    @property
    def library(self) -> str:
        """Its package, a key of `LOCATIONS`."""
        return LIBRARIES[self.backend]

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest glibc that the wheel's name allows; (0, 0) if it names none."""
        _, found, version = self.wheel.rpartition("manylinux_")
        major, minor, *_ = version.split("_") if found else ("0", "0")
        return int(major), int(minor)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the wheel with all `files`, first byte and end; files close to each other share one."""
        spans: list[tuple[int, int]] = []
        for file in self.files:
            end = file.offset + file.stored
            if spans and file.offset - spans[-1][1] <= GAP:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((file.offset, end))
        return tuple(spans)

    @property
    def download(self) -> int:
        """Bytes to transfer."""
        return sum(end - first for first, end in self.spans)

    @property
    def unpacked(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)


GAP = 64 << 10
"""Bytes between two files that are transferred rather than requested separately."""


def pinned_peers() -> tuple[PinnedPeer, ...]:
    """Every pinned release, for all kinds of machines."""
    return _parse(files("moectl").joinpath("data/peers.json").read_bytes())


def pinned_peer(backend: str) -> PinnedPeer:
    """The release of `backend` for this machine; Unavailable if there is none."""
    machine = platform.machine()
    peers = [peer for peer in pinned_peers() if peer.backend == backend]
    peer = next((peer for peer in peers if peer.machine == machine), None)
    name, version = platform.libc_ver()
    if peer is None or sys.platform != "linux" or name != "glibc":
        known = " and ".join(dict.fromkeys(peer.machine for peer in peers))
        here = f"{sys.platform} {machine}"
        raise Unavailable(f"{backend} can be fetched for Linux with glibc on {known}, this is {here}")
    if tuple(map(int, version.split(".")[:2])) < peer.glibc:
        needed = ".".join(map(str, peer.glibc))
        raise Unavailable(f"{peer.wheel} needs glibc {needed} or newer, this machine has {version}")
    return peer


@cache
def _parse(data: bytes) -> tuple[PinnedPeer, ...]:
    document: dict[str, Any] = json.loads(data)
    if any(document.get(key) != value for key, value in FORMAT.items()):
        raise ValueError(f"peers.json must have {FORMAT}")
    return tuple(
        PinnedPeer(**{**peer, "files": tuple(_file(item) for item in peer["files"])})
        for peer in document["peers"]
    )


def _file(item: dict[str, Any]) -> PinnedFile:
    file = PinnedFile(**item)
    check_path(file.path)
    return file


def check_path(path: str) -> None:
    """Raises ValueError for a path that could lead out of a directory."""
    parts = PurePosixPath(path).parts
    unsafe = not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path or ":" in path
    if unsafe or str(PurePosixPath(path)) != path:
        raise ValueError(f"a wheel's file must have a relative path below its directory, got {path!r}")


def target(folder: Path, file: PinnedFile) -> Path:
    """Where `file` is below `folder`."""
    return folder.joinpath(*PurePosixPath(file.path).parts)

"""The Python files of a wheel on PyPI, read by range requests: the compiled libraries are never fetched."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moectl.errors import Unavailable, UsageError

INDEX = "https://pypi.org/simple"
BLOCK = 1 << 20
"""Bytes of one range request."""
KEPT_BLOCKS = 32
TIMEOUT_S = 120
SUFFIXES = (".py", "METADATA")


class RemoteFile(io.RawIOBase):
    """A file behind an address, for reading; blocks are requested when they are needed."""

    def __init__(self, url: str) -> None:
        self.url, self.at, self.blocks = url, 0, dict[int, bytes]()
        with self._open("bytes=0-0") as answer:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if not total.isdigit():
            raise Unavailable(f"{url} does not answer range requests")
        self.total = int(total)

    def _open(self, wanted: str) -> Any:
        request = urllib.request.Request(self.url, headers={"Range": wanted})
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    def seekable(self) -> bool:
        """True."""
        return True

    def readable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position, in bytes."""
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, and return the new position."""
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.total}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes from the position on; all of them for -1."""
        left = self.total - self.at
        size = left if size < 0 else min(size, left)
        found = bytearray()
        while len(found) < size:
            number, start = divmod(self.at + len(found), BLOCK)
            found += self._block(number)[start : start + size - len(found)]
        self.at += size
        return bytes(found)

    def _block(self, number: int) -> bytes:
        if number not in self.blocks:
            if len(self.blocks) >= KEPT_BLOCKS:
                self.blocks.pop(next(iter(self.blocks)))
            first = number * BLOCK
            with self._open(f"bytes={first}-{min(self.total, first + BLOCK) - 1}") as answer:
                self.blocks[number] = answer.read()
        return self.blocks[number]


def wheel_files(package: str, version: str, cache: Path) -> Path:
    """The folder with the Python files of a release's wheel for x86-64, fetched if they are not there.

    Raises UsageError if PyPI has no such wheel, Unavailable if it cannot be reached.
    """
    folder = cache / f"{package}-{version}"
    if folder.is_dir():
        return folder
    try:
        address = _address(package, version)
        partial = folder.with_suffix(".part")
        # A buffer would read ahead of the central directory's small reads, which blocks already do.
        with zipfile.ZipFile(RemoteFile(address)) as wheel:
            members = [row for row in wheel.infolist() if row.filename.endswith(SUFFIXES)]
            for member in sorted(members, key=lambda row: row.header_offset):
                wheel.extract(member, partial)
    except urllib.error.URLError as error:
        raise Unavailable(f"the wheel of {package} {version} cannot be read: {error}") from error
    partial.rename(folder)
    return folder


def wheel_texts(package: str, version: str, names: Iterable[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of all files of a release's wheel, and the text of those in `names` that it has.

    Raises as `wheel_files`.
    """
    try:
        with zipfile.ZipFile(RemoteFile(_address(package, version))) as wheel:
            known = tuple(wheel.namelist())
            return known, {name: wheel.read(name).decode() for name in names if name in known}
    except urllib.error.URLError as error:
        raise Unavailable(f"the wheel of {package} {version} cannot be read: {error}") from error


def releases(package: str) -> tuple[str, ...]:
    """Every release with a wheel for x86-64, as PyPI orders them. Raises Unavailable without a network."""
    try:
        return tuple(dict.fromkeys(name.split("-")[1] for name, _ in _wheels(package) if _fits(name)))
    except urllib.error.URLError as error:
        raise Unavailable(f"PyPI's list of {package} cannot be read: {error}") from error


def _fits(filename: str) -> bool:
    return "x86_64" in filename or "none-any" in filename


def _wheels(package: str) -> list[tuple[str, str]]:
    """The file names and addresses of all wheels."""
    request = urllib.request.Request(
        f"{INDEX}/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        files = json.load(answer)["files"]
    return [(row["filename"], row["url"]) for row in files if row["filename"].endswith(".whl")]


def _address(package: str, version: str) -> str:
    """The address of a release's wheel."""
    wheels = _wheels(package)
    found = [url for name, url in wheels if name.split("-")[1] == version and _fits(name)]
    if not found:
        near = sorted({name.split("-")[1] for name, _ in wheels})[-8:]
        raise UsageError(
            f"PyPI has no wheel of {package} {version}", hint=f"The last releases are {', '.join(near)}."
        )
    return str(found[0])

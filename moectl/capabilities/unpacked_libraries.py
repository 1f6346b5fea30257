"""The folder of unpacked libraries that ``MOECTL_PEERS`` names, for those that are not installed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..environment.installed_packages import InstalledPackage, lacking, package_folder, source_version
from ..errors import UsageError
from .kernel_packages import KERNEL_PACKAGES, MARLIN_LIBRARY

VARIABLE = "MOECTL_PEERS"
"""Names the folder: packages as they lie in their wheels, an unpacked vLLM wheel, or parts of one."""

PREFIX = f"{VARIABLE}/"
"""Before the name of a package that is in the folder, so that nobody takes it for an installed one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a library lies in the folder.

    Attributes:
        folders: of its package, relative to the folder; the first that is there and has a mark counts.
        marks: files of which the real package has at least one.
        files: patterns of its files, where it is not a package that Python imports.
    """

    folders: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


MARLIN_FILES = (MARLIN_LIBRARY, f"vllm/{MARLIN_LIBRARY}", "moe_C.so.xz")
"""vLLM's library of MoE kernels: by itself, in an unpacked wheel, or compressed."""

PLACES: Mapping[str, Place] = {
    "vllm": Place(files=MARLIN_FILES),
    "humming": Place(("humming",), KERNEL_PACKAGES["humming"].marks),
    "triton_kernels": Place(
        ("triton_kernels", "vllm/third_party/triton_kernels"), KERNEL_PACKAGES["triton_kernels"].marks
    ),
}
"""Libraries that may lie in the folder, by the name of their package."""


def peers_folder(env: Mapping[str, str] | None = None) -> Path | None:
    """The folder that ``MOECTL_PEERS`` names; None when it is not set, UsageError when it is no folder."""
    named = (os.environ if env is None else env).get(VARIABLE, "")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise UsageError(
            f"{VARIABLE} must name a folder with unpacked libraries, got {named!r}",
            hint="Unset it, or name one; docs/environment.md says what it may hold.",
        )
    return folder.resolve()


def find_peer(name: str, folder: Path | None) -> Path | None:
    """The package folder or the library file of `name` in `folder`; None when it is not there."""
    if folder is None:
        return None
    place = PLACES[name]
    for inside in place.folders:
        found = folder / inside
        if any((found / mark).exists() for mark in place.marks):
            return found
    return next((file for pattern in place.files for file in sorted(folder.glob(pattern))), None)


def find_peers(folder: Path | None) -> tuple[InstalledPackage, ...]:
    """What the folder has, called `PREFIX` and the name of the package; nothing of it is imported."""
    found = []
    for name in PLACES:
        place = find_peer(name, folder)
        if place is not None:
            lacks = lacking(KERNEL_PACKAGES[name], place) if place.is_dir() else ()
            found.append(InstalledPackage(PREFIX + name, name, _version(name, place), str(place), lacks))
    return tuple(found)


def _version(name: str, place: Path) -> str:
    """What the package says of itself, or the metadata beside it; else a hash of what is there.

    A library file has no version of its own and is always told by its hash: times that were taken with one
    build must not pass for another's. Empty where files cannot be read.
    """
    if place.is_file():
        return _hash((place,), place.parent)
    stem = KERNEL_PACKAGES[name].distribution.replace("-", "_")
    beside = sorted(place.parent.glob(f"{stem}-*.dist-info")) if stem else []
    said = beside[-1].name.removesuffix(".dist-info").rpartition("-")[2] if beside else ""
    return source_version(place) or said or _hash(tuple(sorted(place.rglob("*.py"))), place)


HASHED = "sha256:"
"""Before the first digits of a hash that stands for a version."""


def _hash(files: tuple[Path, ...], folder: Path) -> str:
    """`HASHED` and 12 digits of `files`, by their names in `folder`; empty where one cannot be read."""
    try:
        stats = [file.stat() for file in files]
        stamps = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
        return HASHED + _digest(files, folder, stamps)
    except OSError:
        return ""


@lru_cache(maxsize=16)
def _digest(files: tuple[Path, ...], folder: Path, stamps: tuple[tuple[int, int], ...]) -> str:
    """12 digits that change with any of `files`, which are read once as long as their `stamps` stay."""
    found = hashlib.sha256()
    for file, (size, _) in zip(files, stamps, strict=True):
        found.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                found.update(block)
    return found.hexdigest()[:12]


def library_file(folder: Path | None) -> Path | None:
    """vLLM's library of MoE kernels: of `folder`, else of the vLLM that is installed; None without one."""
    installed = package_folder("vllm")
    files = sorted(installed.glob(MARLIN_LIBRARY)) if installed else []
    return find_peer("vllm", folder) or next(iter(files), None)

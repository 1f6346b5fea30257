"""Libraries unpacked in a directory instead of installed: ``MOECTL_PEERS``, or that of `moectl peers`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..environment.cache_folder import cache_folder
from ..environment.installed_packages import InstalledPackage, lacking, package_folder, source_version
from ..errors import CheckpointError, UsageError
from ..files.safe_reading import open_regular
from ..files.user_paths import user_path
from .kernel_packages import CUTLASS_LIBRARY, KERNEL_PACKAGES, MARLIN_LIBRARY, TRITON_EXPERTS

VARIABLE = "MOECTL_PEERS"
"""Environment variable with the directory: packages from wheels, an unpacked vLLM wheel, or parts of one."""

PREFIX = f"{VARIABLE}/"
"""Prefix of the names of unpacked packages, which distinguishes them from installed ones."""


@dataclass(frozen=True, slots=True)
class LibraryLocation:
    """Where to find a library in the directory.

    Attributes:
        folders: candidate directories of its package; the first with one of the marks is used.
        marks: files of which the real package has at least one.
        files: patterns of its files, for libraries that are not Python packages.
        package: of what installed package it is a part, if it is not a whole one.
        part: pattern of the file or directory in that package.
    """

    folders: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    package: str = ""
    part: str = ""


TRITON_EXPERTS_PEER, CUTLASS_PEER = "vllm_triton", "vllm_cutlass"
"""Names of two parts of vLLM: its Triton experts, and the library with its CUTLASS GEMMs."""

LOCATIONS: Mapping[str, LibraryLocation] = {
    "vllm": LibraryLocation(
        files=(MARLIN_LIBRARY, f"vllm/{MARLIN_LIBRARY}", "moe_C.so.xz"), package="vllm", part=MARLIN_LIBRARY
    ),
    CUTLASS_PEER: LibraryLocation(
        files=(CUTLASS_LIBRARY, f"vllm/{CUTLASS_LIBRARY}", "C.so.xz"), package="vllm", part=CUTLASS_LIBRARY
    ),
    TRITON_EXPERTS_PEER: LibraryLocation(
        (TRITON_EXPERTS_PEER, f"vllm/{TRITON_EXPERTS}"),
        ("fused_moe.py",),
        package="vllm",
        part=TRITON_EXPERTS,
    ),
    "humming": LibraryLocation(("humming",), KERNEL_PACKAGES["humming"].marks),
    "deep_gemm": LibraryLocation(("deep_gemm", "vllm/third_party/deep_gemm"), ("include/deep_gemm",)),
    "triton_kernels": LibraryLocation(
        ("triton_kernels", "vllm/third_party/triton_kernels"), KERNEL_PACKAGES["triton_kernels"].marks
    ),
}
"""Supported libraries by package name."""

LIBRARIES: Mapping[str, str] = {
    "marlin": "vllm",
    "humming": "humming",
    "triton_kernels": "triton_kernels",
    "triton": TRITON_EXPERTS_PEER,
    "cutlass": CUTLASS_PEER,
    "deep_gemm": "deep_gemm",
}
"""Backends whose kernels `moectl peers` fetches, and their packages as `LOCATIONS` names them."""


def default_folder(env: Mapping[str, str] | None = None) -> Path:
    """The directory that is used without ``MOECTL_PEERS``; it may not exist."""
    return cache_folder(env) / "peers"


def peers_folder(env: Mapping[str, str] | None = None) -> Path | None:
    """The directory ``MOECTL_PEERS``, else the default one if it exists, else None.

    Raises UsageError if ``MOECTL_PEERS`` is not a directory.
    """
    named = (os.environ if env is None else env).get(VARIABLE, "")
    if not named:
        default = default_folder(env)
        return default.resolve() if default.is_dir() else None
    folder = user_path(named)
    if not folder.is_dir():
        raise UsageError(
            f"{VARIABLE} must name a folder with unpacked libraries, got {named!r}",
            hint="Unset it, or name one; docs/environment.md says what it may hold.",
        )
    return folder.resolve()


def find_peer(name: str, folder: Path | None) -> Path | None:
    """The package directory or library file of `name` in `folder`, or None."""
    if folder is None:
        return None
    location = LOCATIONS[name]
    for relative in location.folders:
        package = folder / relative
        if any((package / mark).exists() for mark in location.marks):
            return package
    return next((file for pattern in location.files for file in sorted(folder.glob(pattern))), None)


def find_peers(folder: Path | None) -> tuple[InstalledPackage, ...]:
    """The libraries in the directory, named with `PREFIX`; nothing is imported."""
    packages = []
    for name in LOCATIONS:
        path = find_peer(name, folder)
        if path is not None:
            whole = path.is_dir() and not LOCATIONS[name].package
            lacks = lacking(KERNEL_PACKAGES[name], path) if whole else ()
            packages.append(InstalledPackage(PREFIX + name, name, _version(name, path), str(path), lacks))
    return tuple(packages)


def _version(name: str, path: Path) -> str:
    """The version in the package's source or in the metadata next to it, else a hash of its files.

    A library file is always identified by its hash, so that times measured with one build are not used for
    another. Empty if the files cannot be read.
    """
    if path.is_file():
        return _hash((path,), path.parent)
    stem = KERNEL_PACKAGES[LOCATIONS[name].package or name].distribution.replace("-", "_")
    folder = path
    while folder.name in Path(TRITON_EXPERTS).parts:
        folder = folder.parent
    metadata = sorted(folder.parent.glob(f"{stem}-*.dist-info")) if stem else []
    version = metadata[-1].name.removesuffix(".dist-info").rpartition("-")[2] if metadata else ""
    return source_version(path) or version or _hash(tuple(sorted(path.rglob("*.py"))), path)


HASHED = "sha256:"
"""Prefix of a hash that replaces a version."""


def _hash(files: tuple[Path, ...], folder: Path) -> str:
    """`HASHED` and 12 digits of a hash of names and contents of `files`; empty if one cannot be read."""
    try:
        stats = [file.stat() for file in files]
        stamps = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
        return HASHED + _digest(files, folder, stamps)
    except (OSError, CheckpointError):
        return ""


@lru_cache(maxsize=16)
def _digest(files: tuple[Path, ...], folder: Path, stamps: tuple[tuple[int, int], ...]) -> str:
    """12 digits of a hash of `files`, cached until one of their `stamps` (size, time) changes."""
    digest = hashlib.sha256()
    for file, (size, _) in zip(files, stamps, strict=True):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        with open_regular(file, str(file)) as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:12]


def library_file(folder: Path | None, name: str = "vllm") -> Path | None:
    """The library file or directory `name` in `folder`, else in an installed package; None if in neither."""
    return find_peer(name, folder) or installed_part(name)


def installed_part(name: str) -> Path | None:
    """The file or directory of an installed package that `LOCATIONS` names; None if there is none."""
    location = LOCATIONS[name]
    installed = package_folder(location.package) if location.package else None
    return next(iter(sorted(installed.glob(location.part))), None) if installed else None

"""The folder of unpacked libraries that ``MOECTL_PEERS`` names, for those that are not installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .installed import Installed, lacking, package_folder, source_version
from .probes import MARLIN_LIBRARY, PROBES

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
    "humming": Place(("humming",), PROBES["humming"].marks),
    "triton_kernels": Place(
        ("triton_kernels", "vllm/third_party/triton_kernels"), PROBES["triton_kernels"].marks
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


def find_peers(folder: Path | None) -> tuple[Installed, ...]:
    """What the folder has, called `PREFIX` and the name of the package; nothing of it is imported."""
    found = []
    for name in PLACES:
        place = find_peer(name, folder)
        if place is not None:
            lacks = lacking(PROBES[name], place) if place.is_dir() else ()
            found.append(Installed(PREFIX + name, name, _version(name, place), str(place), lacks))
    return tuple(found)


def _version(name: str, place: Path) -> str:
    """What the package says of itself, or the metadata beside it; empty where neither does."""
    stem = PROBES[name].distribution.replace("-", "_")
    beside = sorted(place.parent.glob(f"{stem}-*.dist-info")) if stem else []
    said = source_version(place) if place.is_dir() else ""
    return said or (beside[-1].name.removesuffix(".dist-info").rpartition("-")[2] if beside else "")


def library_file(folder: Path | None) -> Path | None:
    """vLLM's library of MoE kernels: of `folder`, else of the vLLM that is installed; None without one."""
    installed = package_folder("vllm")
    files = sorted(installed.glob(MARLIN_LIBRARY)) if installed else []
    return find_peer("vllm", folder) or next(iter(files), None)

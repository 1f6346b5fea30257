"""What is installed here, found without importing it: where, in which version, and what it lacks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .package_probes import TOOLS, Probe

_DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
_VERSION = re.compile(r"^(?:__version__|version)\s*(?::\s*str\s*)?=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """One optional package or tool as it is found here.

    Attributes:
        name: as `Packages` lists it.
        module: importable name under which it stands; empty when it is not there.
        version: empty when it does not say.
        path: its folder, or the tool's file.
        lacks: symbols that are needed and that its source does not name.
        wrong: folder of an unrelated package of the same name, which an engine would import;
            `wrong_version` is that package's, `other` says who publishes it.
    """

    name: str
    module: str = ""
    version: str = ""
    path: str = ""
    lacks: tuple[str, ...] = ()
    wrong: str = ""
    wrong_version: str = ""
    other: str = ""

    @property
    def present(self) -> bool:
        """True when the package counts as installed."""
        return bool(self.module)


def find_all(probes: Mapping[str, Probe]) -> tuple[InstalledPackage, ...]:
    """Every package of `probes`, then every tool, present or not."""
    packages = (find_package(name, probe) for name, probe in probes.items())
    return (*packages, *(find_tool(name) for name in TOOLS))


def find_package(name: str, probe: Probe) -> InstalledPackage:
    """The package called `name`, as it is found here by `probe`."""
    for module in probe.modules:
        folder = package_folder(module)
        if folder is None:
            continue
        if probe.marks and not any((folder / mark).exists() for mark in probe.marks):
            # The engine takes the first one that can be imported, so a copy behind it is out of reach.
            version = _metadata_version(module.partition(".")[0]) or source_version(folder)
            return InstalledPackage(name, wrong=str(folder), wrong_version=version, other=probe.other)
        return InstalledPackage(
            name, module, _version(probe, module, folder), str(folder), lacking(probe, folder)
        )
    return InstalledPackage(name)


def lacking(probe: Probe, folder: Path) -> tuple[str, ...]:
    """What a package in `folder` should hold and does not, of the symbols and files that `probe` lists."""
    return tuple(item for item in (*probe.symbols, *probe.own) if not _holds(folder, item))


def _holds(folder: Path, item: str) -> bool:
    """True when the package has the file of that pattern, or names that symbol."""
    return any(folder.glob(item)) if item.endswith(".so") else _defines(folder, item)


def another_of_the_name(found: InstalledPackage) -> str:
    """The sentence for a package that is not the one whose name it has."""
    version = f" {found.wrong_version}" if found.wrong_version else ""
    other = f", but {found.other}" if found.other else ""
    return (
        f"{found.name}{version} in {found.wrong} is not the package that kernels need{other}; it hides the "
        "real one, and an engine takes it for that and fails later"
    )


def find_tool(name: str) -> InstalledPackage:
    """A compiler or build tool; nvcc also in ``CUDA_HOME``, ``CUDA_PATH`` or /usr/local/cuda."""
    path = shutil.which(name)
    if name == "nvcc":
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        if home or not path:
            path = shutil.which(str(Path(home or _DEFAULT_CUDA_HOME) / "bin" / "nvcc"))
    return InstalledPackage(name, name, "", path) if path else InstalledPackage(name)


def package_folder(module: str) -> Path | None:
    """Folder of a package's source files, found without importing anything."""
    top, *inner = module.split(".")
    for place in _places(top):
        folder = Path(place).joinpath(*inner)
        if folder.is_dir():
            return folder
    return None


def _places(package: str) -> list[str]:
    """Folders that an import of `package` would read, whether or not it was imported before."""
    # importlib.util.find_spec would answer from sys.modules for what this process has imported.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(package, None) if find else None
        except (ImportError, ValueError):
            continue
        if spec is not None:
            return list(spec.submodule_search_locations or ())
    return []


def distribution_version(distribution: str, module: str = "") -> str:
    """Version of a distribution by its metadata, else of `module` by its source; empty when neither says."""
    folder = package_folder(module) if module else None
    return _metadata_version(distribution) or (source_version(folder) if folder else "")


def _version(probe: Probe, module: str, folder: Path) -> str:
    if "." in module:
        # A copy inside an engine has no metadata of its own: the distribution's speaks of another copy.
        return source_version(folder)
    return (_metadata_version(probe.distribution) if probe.distribution else "") or source_version(folder)


def _metadata_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def source_version(folder: Path) -> str:
    """The version that a package's own files state; empty when they do not."""
    for name in ("version.py", "_version.py", "__init__.py"):
        if found := _VERSION.search(_text(folder / name)):
            return found[1]
    return ""


def _defines(folder: Path, symbol: str) -> bool:
    """True when the package's source names `symbol` in the module where callers look for it."""
    *inner, name = symbol.split(".")
    module = folder.joinpath(*inner)
    files = (module / "__init__.py", module.with_suffix(".py"))
    text = next((_text(file) for file in files if file.is_file()), "")
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def _text(file: Path) -> str:
    """A source file's text; empty when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

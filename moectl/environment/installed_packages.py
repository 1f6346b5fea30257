"""Installed packages and tools, found without importing them: path, version, and missing symbols."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from ..files.safe_reading import text_or_empty
from .package_probes import TOOLS, Probe
from .python_environments import PythonEnvironment

_DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
_NVCC_WHEELS = ("nvidia.cu13", "nvidia.cuda_nvcc")
_VERSION = re.compile(r"^(?:__version__|version)\s*(?::\s*str\s*)?=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """One optional package or tool.

    Attributes:
        name: the name in `Packages`.
        module: the name it is imported by; empty if it is not installed.
        version: empty if unknown.
        path: its directory, or the tool's executable.
        lacks: required symbols and files that it does not have.
        wrong: directory of an unrelated package with the same name, which an engine would import;
            `wrong_version` is that package's version, `other` its publisher.
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
        """True when the package is installed."""
        return bool(self.module)


def find_all(
    probes: Mapping[str, Probe], where: PythonEnvironment | None = None
) -> tuple[InstalledPackage, ...]:
    """Every package of `probes`, then every tool, whether installed or not.

    `where` is the environment; None is that of this process, here and below.
    """
    packages = (find_package(name, probe, where) for name, probe in probes.items())
    return (*packages, *(find_tool(name, where) for name in TOOLS))


def find_package(name: str, probe: Probe, where: PythonEnvironment | None = None) -> InstalledPackage:
    """The package `name`, located by `probe`."""
    for module in probe.modules:
        folder = package_folder(module, where)
        if folder is None:
            continue
        if probe.marks and not any((folder / mark).exists() for mark in probe.marks):
            # The engine imports the first match, so a copy later on the path is never used.
            version = _metadata_version(module.partition(".")[0], where) or source_version(folder)
            return InstalledPackage(name, wrong=str(folder), wrong_version=version, other=probe.other)
        return InstalledPackage(
            name, module, _version(probe, module, folder, where), str(folder), lacking(probe, folder)
        )
    return InstalledPackage(name)


def lacking(probe: Probe, folder: Path) -> tuple[str, ...]:
    """The symbols and files listed by `probe` that a package in `folder` does not have."""
    return tuple(item for item in (*probe.symbols, *probe.own) if not _holds(folder, item))


def _holds(folder: Path, item: str) -> bool:
    """True when the package has a file that matches a ``*.so`` pattern, or defines a symbol."""
    return any(folder.glob(item)) if item.endswith(".so") else _defines(folder, item)


def unrelated_package(package: InstalledPackage) -> str:
    """The sentence about an unrelated package with the name of a required one."""
    version = f" {package.wrong_version}" if package.wrong_version else ""
    other = f", but {package.other}" if package.other else ""
    return (
        f"{package.name}{version} in {package.wrong} is not the package that kernels need{other}; it hides "
        "the real one, and an engine takes it for that and fails later"
    )


def find_tool(name: str, where: PythonEnvironment | None = None) -> InstalledPackage:
    """A compiler or build tool; nvcc also in ``CUDA_HOME``, ``CUDA_PATH``, /usr/local/cuda or a wheel."""
    path = (where and shutil.which(name, path=where.programs)) or shutil.which(name)
    if name == "nvcc":
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        if home or not path:
            path = shutil.which(str(Path(home or _DEFAULT_CUDA_HOME) / "bin" / "nvcc"))
        path = path or next((str(compiler) for compiler in nvcc_of_wheels(where)), None)
    return InstalledPackage(name, name, "", path) if path else InstalledPackage(name)


def nvcc_of_wheels(where: PythonEnvironment | None = None) -> tuple[Path, ...]:
    """Every nvcc in NVIDIA's wheels."""
    folders = (package_folder(package, where) for package in _NVCC_WHEELS)
    programs = (shutil.which(str(folder / "bin" / "nvcc")) for folder in folders if folder)
    return tuple(Path(program) for program in programs if program)


def package_folder(module: str, where: PythonEnvironment | None = None) -> Path | None:
    """Directory of a package's source files, found without importing anything."""
    top, *inner = module.split(".")
    for location in _search_locations(top) if where is None else _locations_in(top, where):
        folder = Path(location).joinpath(*inner)
        if folder.is_dir():
            return folder
    return None


def _search_locations(package: str) -> list[str]:
    """Directories that an import of `package` would read, even if it is already imported."""
    # importlib.util.find_spec would answer from sys.modules for packages that are already imported.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(package, None) if find else None
        except (ImportError, ValueError):
            continue
        if spec is not None:
            return list(spec.submodule_search_locations or ())
    return []


def _locations_in(package: str, where: PythonEnvironment) -> list[str]:
    """Directories that an import of `package` would read in another environment."""
    try:
        spec = PathFinder.find_spec(package, list(where.folders))
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def distribution_version(distribution: str, module: str = "", where: PythonEnvironment | None = None) -> str:
    """Version from a distribution's metadata, else from the source of `module`; empty if unknown."""
    folder = package_folder(module, where) if module else None
    return _metadata_version(distribution, where) or (source_version(folder) if folder else "")


def distribution_requirements(distribution: str, where: PythonEnvironment | None = None) -> tuple[str, ...]:
    """The requirements in a distribution's metadata; empty without it."""
    found = _distribution(distribution, where)
    try:
        return tuple(found.requires or ()) if found else ()
    except (KeyError, ValueError):
        return ()


def _version(probe: Probe, module: str, folder: Path, where: PythonEnvironment | None) -> str:
    if "." in module:
        # A copy bundled with an engine has no metadata; the distribution's describes another copy.
        return source_version(folder)
    stated = _metadata_version(probe.distribution, where) if probe.distribution else ""
    return stated or source_version(folder)


def _metadata_version(distribution: str, where: PythonEnvironment | None) -> str:
    found = _distribution(distribution, where)
    try:
        return (found.version if found else "") or ""
    except (KeyError, ValueError):
        return ""


def _distribution(name: str, where: PythonEnvironment | None) -> importlib.metadata.Distribution | None:
    path = sys.path if where is None else list(where.folders)
    try:
        return next(iter(importlib.metadata.distributions(name=name, path=path)), None)
    except (KeyError, ValueError):
        return None


def source_version(folder: Path) -> str:
    """The version stated in a package's source files; empty if there is none."""
    for name in ("version.py", "_version.py", "__init__.py"):
        if match := _VERSION.search(text_or_empty(folder / name)):
            return match[1]
    return ""


def _defines(folder: Path, symbol: str) -> bool:
    """True when the module that callers import `symbol` from mentions it in its source."""
    *inner, name = symbol.split(".")
    module = folder.joinpath(*inner)
    files = (module / "__init__.py", module.with_suffix(".py"))
    text = next((text_or_empty(file) for file in files if file.is_file()), "")
    return re.search(rf"\b{re.escape(name)}\b", text) is not None

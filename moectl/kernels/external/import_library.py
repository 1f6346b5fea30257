"""Bringing a library of others into this process: the one asked for, from where it was found, and once.

A package in the folder of unpacked libraries is loaded by its path: the folder itself never comes onto
``sys.path``, so nothing else that lies there is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import lzma
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...capabilities.kernel_packages import KERNEL_PACKAGES
from ...capabilities.unpacked_libraries import VARIABLE, find_peer, library_file, peers_folder
from ...environment.installed_packages import find_package, unrelated_package
from ...errors import BackendFailed, MoectlError, Unavailable

MARLIN_OPERATOR = "moe_wna16_marlin_gemm"
"""vLLM's operator in ``torch.ops._moe_C``."""


def package(name: str) -> ModuleType:
    """The package `name`: of the folder that ``MOECTL_PEERS`` names, else the one that is installed.

    Raises Unavailable when it is in neither, is another package of the name, or cannot be imported.
    """
    folder = find_peer(name, peers_folder())
    if folder is None:
        found = find_package(name, KERNEL_PACKAGES[name])
        if found.wrong:
            raise Unavailable(unrelated_package(found))
        if not found.present:
            raise Unavailable(f"there is no {name} in a folder that {VARIABLE} names, and none is installed")
        if found.module == name and name not in sys.modules:
            return _imported(name)
        folder = Path(found.path)
    known = sys.modules.get(name)
    if known is None:
        return _loaded(name, folder)
    there = Path(known.__file__ or "").parent
    if there.resolve() != folder.resolve():
        raise Unavailable(
            f"{name} of {there} is in this process already, wanted is that of {folder}",
            hint="Start a process anew.",
        )
    return known


def module(name: str) -> ModuleType:
    """The module `name` inside a package that `package` has found, such as ``humming.forward``."""
    package(name.partition(".")[0])
    return _imported(name)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package may stop on anything while it is imported
        raise Unavailable(f"{name} cannot be imported: {first_line(error)}") from error


def _loaded(name: str, folder: Path) -> ModuleType:
    """The package in `folder`, imported as `name`."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    try:
        spec.loader.exec_module(made)
    except Exception as error:
        del sys.modules[name]
        raise Unavailable(f"{name} in {folder} cannot be imported: {first_line(error)}") from error
    return made


def marlin_operator() -> Any:
    """vLLM's Marlin GEMM for experts, loaded into torch if it is not there yet.

    Raises Unavailable when there is no library, or it does not load into this torch.
    """
    if not hasattr(torch.ops._moe_C, MARLIN_OPERATOR):
        found = library_file(peers_folder())
        if found is None:
            raise Unavailable(
                f"no folder that {VARIABLE} names has a _moe_C library, and no installed vLLM has one"
            )
        library = _unpacked(found) if found.suffix == ".xz" else found
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            raise Unavailable(
                f"{found} does not load into torch {torch.__version__}: {first_line(error)}"
            ) from error
    found_operator = getattr(torch.ops._moe_C, MARLIN_OPERATOR, None)
    if found_operator is None:
        raise Unavailable(f"the _moe_C library has no operator {MARLIN_OPERATOR}")
    return found_operator.default


def _unpacked(packed: Path) -> Path:
    """The library in `packed`, in a folder of temporary files that belongs to this user alone."""
    place = Path(tempfile.gettempdir()) / f"moectl-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    state = place.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise Unavailable(
            f"{place} must be a folder that you alone can write to",
            hint="Remove it, or set TMPDIR to a folder of your own.",
        )
    about = packed.stat()
    library = place / f"moe_C-{about.st_size}-{about.st_mtime_ns}.so"
    if not library.exists():
        try:
            content = lzma.decompress(packed.read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise Unavailable(f"{packed} cannot be unpacked: {error}") from error
        with tempfile.NamedTemporaryFile(dir=place, delete=False) as file:
            file.write(content)
        Path(file.name).rename(library)
    return library


def why_not(load: Any) -> str:
    """Why `load` finds no library, a clause; empty when it does."""
    try:
        load()
    except MoectlError as error:
        return str(error)
    return ""


@contextmanager
def failing_as(backend: str, device: torch.device | None = None) -> Iterator[None]:
    """Whatever a library of others raises inside is an error of `backend` and its reason.

    Kernels inside are launched on `device`, where that is a GPU.
    """
    try:
        with torch.cuda.device(device) if device and device.type == "cuda" else nullcontext():
            yield
    except MoectlError:
        raise
    except Exception as error:
        raise BackendFailed(backend, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]

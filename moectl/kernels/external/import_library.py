"""Imports external kernel libraries: unpacked in ``MOECTL_PEERS``, or installed.

An unpacked package is imported by its path. The directory itself is never added to ``sys.path``, so nothing
else in it can be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import lzma
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...capabilities.kernel_packages import KERNEL_PACKAGES
from ...capabilities.unpacked_libraries import VARIABLE, find_peer, library_file, peers_folder
from ...environment.installed_packages import find_package, unrelated_package
from ...errors import BackendFailed, CheckpointError, MoectlError, Unavailable
from ...files.safe_reading import read_bounded

LARGEST_LIBRARY = 4 << 30
"""Most bytes of a compressed library, and of what it is unpacked to."""

MARLIN_OPERATOR = "moe_wna16_marlin_gemm"
"""Name of vLLM's operator in ``torch.ops._moe_C``."""


def package(name: str) -> ModuleType:
    """The package `name` in the directory ``MOECTL_PEERS``, else the installed one.

    Raises Unavailable if it is in neither, is an unrelated package of that name, or cannot be imported.
    """
    folder = find_peer(name, peers_folder())
    if folder is None:
        installed = find_package(name, KERNEL_PACKAGES[name])
        if installed.wrong:
            raise Unavailable(unrelated_package(installed))
        if not installed.present:
            raise Unavailable(
                f"{name} is neither in the directory {VARIABLE} nor installed", hint=f"moectl peers {name}"
            )
        if installed.module == name and name not in sys.modules:
            return _import_by_name(name)
        folder = Path(installed.path)
    loaded = sys.modules.get(name)
    if loaded is None:
        return _import_from(folder, name)
    loaded_from = Path(loaded.__file__ or "").parent
    if loaded_from.resolve() != folder.resolve():
        raise Unavailable(
            f"{name} from {folder} cannot be imported: this process has already imported it from "
            f"{loaded_from}",
            hint="Start a new process.",
        )
    return loaded


def module(name: str) -> ModuleType:
    """The module `name` of a package found by `package`, such as ``humming.forward``."""
    package(name.partition(".")[0])
    return _import_by_name(name)


def _import_by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import can raise anything
        raise Unavailable(f"{name} cannot be imported: {first_line(error)}") from error


def _import_from(folder: Path, name: str) -> ModuleType:
    """The package in `folder`, imported as `name`."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        del sys.modules[name]
        raise Unavailable(f"{name} in {folder} cannot be imported: {first_line(error)}") from error
    return loaded


def marlin_operator() -> Any:
    """vLLM's Marlin GEMM for experts; its library is loaded into torch first if necessary.

    Raises Unavailable if there is no such library, or this torch cannot load it.
    """
    return library_operator("_moe_C", MARLIN_OPERATOR, "vllm", "marlin")


def library_operator(namespace: str, name: str, library: str, backend: str) -> Any:
    """The operator `name` in ``torch.ops.NAMESPACE``; its library is loaded into torch first if necessary.

    Args:
        library: the file's name in `unpacked_libraries.LOCATIONS`.
        backend: what `moectl peers` fetches it for.

    Raises Unavailable if there is no such library, or this torch cannot load it.
    """
    operators = getattr(torch.ops, namespace)
    if not hasattr(operators, name):
        file = library_file(peers_folder(), library)
        if file is None:
            raise Unavailable(
                f"the {namespace} library is neither in the directory {VARIABLE} nor part of an installed "
                "vLLM",
                hint=f"moectl peers {backend}",
            )
        loadable = _decompress(file) if file.suffix == ".xz" else file
        try:
            torch.ops.load_library(str(loadable))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"torch {torch.__version__} cannot load {file}: {first_line(error)}") from error
    operator = getattr(operators, name, None)
    if operator is None:
        raise Unavailable(f"the {namespace} library has no operator {name}")
    return operator.default


def _decompress(compressed: Path) -> Path:
    """The library in an xz file, decompressed into a temporary directory that only this user can write to."""
    folder = Path(tempfile.gettempdir()) / f"moectl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    folder_stat = folder.lstat()
    mode = folder_stat.st_mode
    if not stat.S_ISDIR(mode) or folder_stat.st_uid != os.getuid() or mode & 0o022:
        raise Unavailable(
            f"{folder} must be a directory that only you can write to",
            hint="Remove it, or set TMPDIR to a directory of your own.",
        )
    file_stat = compressed.stat()
    library = folder / f"{compressed.name.partition('.')[0]}-{file_stat.st_size}-{file_stat.st_mtime_ns}.so"
    if not library.exists():
        try:
            stored = lzma.LZMADecompressor()
            content = stored.decompress(
                read_bounded(compressed, LARGEST_LIBRARY, str(compressed)), LARGEST_LIBRARY
            )
        except CheckpointError as error:
            raise Unavailable(error.what) from error
        except lzma.LZMAError as error:
            raise Unavailable(f"{compressed} cannot be decompressed: {error}") from error
        if not stored.eof:
            raise Unavailable(f"{compressed} is truncated, or has more than {LARGEST_LIBRARY} bytes unpacked")
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        Path(file.name).rename(library)
    return library


def unavailable_reason(load: Callable[[], object]) -> str:
    """Why `load` cannot load a library, as a clause; empty if it can."""
    try:
        load()
    except MoectlError as error:
        return str(error)
    return ""


@contextmanager
def failing_as(backend: str, device: torch.device | None = None) -> Iterator[None]:
    """Context in which an exception of an external library becomes a BackendFailed of `backend`.

    If `device` is a GPU, it is the current device inside.
    """
    try:
        with torch.cuda.device(device) if device and device.type == "cuda" else nullcontext():
            yield
    except MoectlError:
        raise
    except Exception as error:
        raise BackendFailed(backend, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Type and first line of an error, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]

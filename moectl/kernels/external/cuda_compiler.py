"""The CUDA compiler that libraries start to compile kernels at the first call: found, or refused."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ...environment.installed_packages import find_tool, nvcc_of_wheels
from ...errors import Unavailable

SECONDS = 30
"""Time after which a compiler that does not answer counts as broken."""


def compilers() -> Iterator[Path]:
    """Every nvcc here: in ``CUDA_HOME`` or ``CUDA_PATH``, else in ``PATH``; then in NVIDIA's wheels."""
    found = find_tool("nvcc")
    if found.present:
        yield Path(found.path)
    yield from nvcc_of_wheels()


@cache
def cuda_toolkit(oldest: tuple[int, int]) -> Path:
    """The directory of the first toolkit whose nvcc is at least `oldest`; Unavailable if there is none."""
    seen = []
    for compiler in compilers():
        version = _version(compiler)
        if version >= oldest:
            return _toolkit(compiler)
        number = ".".join(map(str, version)) or "without a version"
        seen.append(f"{compiler} is {number}")
    needed = ".".join(map(str, oldest))
    raise Unavailable(
        f"its kernels are compiled at the first call by nvcc {needed} or newer, and "
        f"{'; '.join(seen) or 'there is no nvcc in CUDA_HOME, in PATH or in NVIDIA wheels'}",
        hint="install the CUDA toolkit and set CUDA_HOME, or pip install nvidia-cuda-nvcc",
    )


def _answer(*command: str) -> str:
    """What a program prints to both of its outputs; empty if it cannot be started or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return done.stdout + done.stderr


def _version(compiler: Path) -> tuple[int, ...]:
    match = re.search(r"release (\d+)\.(\d+)", _answer(str(compiler), "--version"))
    return tuple(map(int, match.groups())) if match else ()


def _toolkit(compiler: Path) -> Path:
    """The toolkit that `compiler` says it belongs to, as it may be a script elsewhere; else by its place."""
    said = re.search(r"^#\$ TOP=(.+)$", _answer(str(compiler), "--dryrun", "-x", "cu", os.devnull), re.M)
    top = Path(said[1].strip()).resolve() if said else None
    return top if top is not None and top.is_dir() else compiler.resolve().parents[1]

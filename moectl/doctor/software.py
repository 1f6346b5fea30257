"""Versions of the software that MoE layers run on, read from metadata and sources without importing it."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .. import __version__
from ..environment.installed_packages import distribution_version, package_folder
from ..oracle.registry import newest_engines

COMPILERS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton", "triton-rocm", "pytorch-triton-xpu"),
}
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "compressed-tensors": ("compressed-tensors",),
    "safetensors": ("safetensors",),
    "numpy": ("numpy",),
    "nvidia-cutlass-dsl": ("nvidia-cutlass-dsl",),
    "nvidia-nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "flashinfer-jit-cache": ("flashinfer-jit-cache",),
}
"""Libraries other than the optional packages of backends, and the distributions that provide them."""

SECONDS = 180
"""Timeout of `try_import`."""

_TORCH = re.compile(r"^(cuda|hip|xpu)\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Software:
    """Installed software.

    Attributes:
        moectl, python, system: versions; `system` is the kernel and the architecture.
        libraries: versions of the installed `COMPILERS`, engines and `LIBRARIES`.
        torch_built: the platform that torch was built for: ``cuda 13.0``, ``hip 7.2``, ``cpu``; empty
            without torch.
    """

    moectl: str
    python: str
    system: str
    libraries: Mapping[str, str]
    torch_built: str

    @property
    def torch_cuda(self) -> str:
        """CUDA version that torch was built with; empty for other builds."""
        kind, _, version = self.torch_built.partition(" ")
        return version if kind == "cuda" else ""


def installed_software() -> Software:
    """The software installed on this machine."""
    engines = {engine.package: (engine.package,) for engine in newest_engines() if engine.package}
    distributions = {**COMPILERS, **engines, **LIBRARIES}
    versions = {name: version for name, names in distributions.items() if (version := _first_version(names))}
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Software(__version__, sys.version.split()[0], system, versions, torch_build())


def torch_build() -> str:
    """The platform that the installed torch was built for, from its ``version.py``."""
    folder = package_folder("torch")
    if folder is None or not (folder / "version.py").is_file():
        return ""
    match = _TORCH.search((folder / "version.py").read_text(encoding="utf-8", errors="replace"))
    return f"{match[1]} {match[2]}" if match else "cpu"


def _first_version(distributions: Iterable[str]) -> str:
    return next((version for name in distributions if (version := distribution_version(name))), "")


@dataclass(frozen=True, slots=True)
class TorchView:
    """The number of devices that torch can use, or the `error` of the query."""

    devices: int = 0
    error: str = ""


_ASK_TORCH = (
    "import torch; a = torch.accelerator; print('devices', a.device_count() if a.is_available() else 0)"
)


def torch_view() -> TorchView:
    """How many accelerators torch can use, queried in a subprocess so that CUDA is not initialized here."""
    text, error = _python(_ASK_TORCH)
    match = re.search(r"^devices (\d+)$", text, re.MULTILINE)
    return (
        TorchView(int(match[1])) if match else TorchView(error=error or "torch reports no number of devices")
    )


def try_import(module: str) -> str:
    """Why `module` cannot be imported, tried in a subprocess; empty if it can."""
    return _python(f"import {module}")[1]


def _python(code: str) -> tuple[str, str]:
    """The output of `code` in a subprocess, and the last line of its error; empty if it succeeds."""
    command = [sys.executable, "-c", code]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"no result after {SECONDS} s"
    except OSError as error:
        return "", f"cannot start Python: {error.strerror}"
    if process.returncode == 0:
        return process.stdout, ""
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    return process.stdout, lines[-1].strip() if lines else f"exited with status {process.returncode}"

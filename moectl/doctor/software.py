"""Versions of what a MoE layer runs on, read from metadata and sources: nothing is imported here."""

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
"""Libraries that are not optional packages of a backend, and the distributions that hold them."""

SECONDS = 180
"""How long importing one package may take with `try_import`."""

_TORCH = re.compile(r"^(cuda|hip|xpu)\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Software:
    """What is installed.

    Attributes:
        moectl, python, system: versions; `system` names the kernel and the machine.
        libraries: version of each of `COMPILERS`, of the engines and of `LIBRARIES` that is there.
        torch_built: what torch was built for: ``cuda 13.0``, ``hip 7.2``, ``cpu``; empty without torch.
    """

    moectl: str
    python: str
    system: str
    libraries: Mapping[str, str]
    torch_built: str

    @property
    def torch_cuda(self) -> str:
        """CUDA version that torch was built with; empty for another torch."""
        kind, _, version = self.torch_built.partition(" ")
        return version if kind == "cuda" else ""


def installed_software() -> Software:
    """What is installed here."""
    engines = {engine.package: (engine.package,) for engine in newest_engines() if engine.package}
    known = {**COMPILERS, **engines, **LIBRARIES}
    found = {name: version for name, names in known.items() if (version := _first(names))}
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Software(__version__, sys.version.split()[0], system, found, torch_build())


def torch_build() -> str:
    """What the torch that is installed was built for, by its ``version.py``."""
    folder = package_folder("torch")
    if folder is None or not (folder / "version.py").is_file():
        return ""
    found = _TORCH.search((folder / "version.py").read_text(encoding="utf-8", errors="replace"))
    return f"{found[1]} {found[2]}" if found else "cpu"


def _first(distributions: Iterable[str]) -> str:
    return next((version for name in distributions if (version := distribution_version(name))), "")


@dataclass(frozen=True, slots=True)
class TorchView:
    """What torch itself says: how many devices it can use, or `error`, why it cannot say."""

    devices: int = 0
    error: str = ""


_ASK_TORCH = (
    "import torch; a = torch.accelerator; print('devices', a.device_count() if a.is_available() else 0)"
)


def torch_view() -> TorchView:
    """How many accelerators torch can use, asked in a process of its own: CUDA is not started in this one."""
    text, error = _python(_ASK_TORCH)
    found = re.search(r"^devices (\d+)$", text, re.MULTILINE)
    return TorchView(int(found[1])) if found else TorchView(error=error or "torch gives no number")


def try_import(module: str) -> str:
    """Why `module` cannot be imported, in a process of its own; empty when it can."""
    return _python(f"import {module}")[1]


def _python(code: str) -> tuple[str, str]:
    """What `code` prints in a Python of its own, and the last line of its error; empty when it ends well."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"it takes more than {SECONDS} s"
    except OSError as error:
        return "", f"it could not be tried: {error.strerror}"
    if done.returncode == 0:
        return done.stdout, ""
    last = [line for line in done.stderr.splitlines() if line.strip()]
    return done.stdout, last[-1].strip() if last else f"it ends with status {done.returncode}"

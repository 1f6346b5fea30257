"""Versions of the software that MoE layers run on, read from metadata and sources without importing it."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .. import __version__
from ..environment.installed_packages import (
    distribution_requirements,
    distribution_version,
    find_tool,
    package_folder,
)
from ..environment.python_environments import PythonEnvironment
from ..files.safe_reading import text_or_empty
from ..oracle.registry import answering_engines

COMPILERS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton", "triton-rocm", "pytorch-triton-xpu"),
}
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "sglang": ("sglang",),
    "tensorrt-llm": ("tensorrt-llm",),
    "transformers": ("transformers",),
    "compressed-tensors": ("compressed-tensors",),
    "llmcompressor": ("llmcompressor",),
    "nvidia-modelopt": ("nvidia-modelopt",),
    "safetensors": ("safetensors",),
    "numpy": ("numpy",),
    "nvidia-cutlass-dsl": ("nvidia-cutlass-dsl",),
    "flashinfer-jit-cache": ("flashinfer-jit-cache",),
}
"""Libraries other than the optional packages of backends, and the distributions that provide them."""

TORCH_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "CUDA runtime": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    "cuBLAS": ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""NVIDIA's libraries that torch loads, and the distributions that provide them."""

SECONDS = 180
"""Timeout of `try_import`."""

NVCC_SECONDS = 20

_TORCH = re.compile(r"^(cuda|hip|xpu)\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Software:
    """Installed software.

    Attributes:
        moectl, python, system: versions; `system` is the kernel and the architecture.
        libraries: versions of the installed `COMPILERS`, engines and `LIBRARIES`.
        torch_built: the platform that torch was built for: ``cuda 13.0``, ``hip 7.2``, ``cpu``; empty
            without torch.
        torch_libraries: versions of `TORCH_LIBRARIES` that are installed, with the one that torch was built
            with where it is another.
        cuda_toolkit: version of nvcc, such as ``13.0.88``; empty without it.
        environment: the Python environment that was looked into, as the user named it; empty: this one.
    """

    moectl: str
    python: str
    system: str
    libraries: Mapping[str, str]
    torch_built: str
    torch_libraries: Mapping[str, str] = field(default_factory=dict)
    cuda_toolkit: str = ""
    environment: str = ""

    @property
    def torch_cuda(self) -> str:
        """CUDA version that torch was built with; empty for other builds."""
        kind, _, version = self.torch_built.partition(" ")
        return version if kind == "cuda" else ""


def installed_software(where: PythonEnvironment | None = None) -> Software:
    """The software installed on this machine, in this environment or in `where`."""
    engines = {engine.package: (engine.package,) for engine in answering_engines() if engine.package}
    distributions = {**COMPILERS, **engines, **LIBRARIES}
    versions = {
        name: version for name, names in distributions.items() if (version := _first_version(names, where))
    }
    return Software(
        __version__,
        where.version if where else sys.version.split()[0],
        f"{platform.system()} {platform.release()} {platform.machine()}",
        versions,
        torch_build(where),
        torch_libraries(where),
        cuda_toolkit(where),
        where.name if where else "",
    )


def torch_build(where: PythonEnvironment | None = None) -> str:
    """The platform that the installed torch was built for, from its ``version.py``."""
    folder = package_folder("torch", where)
    if folder is None or not (folder / "version.py").is_file():
        return ""
    match = _TORCH.search(text_or_empty(folder / "version.py"))
    return f"{match[1]} {match[2]}" if match else "cpu"


def torch_libraries(where: PythonEnvironment | None = None) -> dict[str, str]:
    """Versions of `TORCH_LIBRARIES`: installed, and that of torch's requirements where it is another."""
    pinned = dict(filter(None, map(_pin, distribution_requirements("torch", where))))
    found = {}
    for title, names in TORCH_LIBRARIES.items():
        built = next((pinned[name] for name in names if name in pinned), "")
        installed = _first_version([name for name in names if name in pinned] or names, where)
        if installed:
            other = f" (torch was built with {built})" if built and built != installed else ""
            found[title] = f"{installed}{other}"
        elif built:
            found[title] = f"not installed (torch was built with {built})"
    return found


def _pin(requirement: str) -> tuple[str, str] | None:
    match = re.match(r"(nvidia-[a-z0-9-]+) *\(?==([0-9.]+)", requirement)
    return (match[1], match[2]) if match else None


def cuda_toolkit(where: PythonEnvironment | None = None) -> str:
    """The version that nvcc prints; empty without nvcc, or if it does not."""
    nvcc = find_tool("nvcc", where).path
    if not nvcc:
        return ""
    try:
        printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=NVCC_SECONDS)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    match = re.search(r"\bV(\d+\.\d+(?:\.\d+)?)", printed.stdout)
    return match[1] if match else ""


def _first_version(distributions: Iterable[str], where: PythonEnvironment | None = None) -> str:
    return next((v for name in distributions if (v := distribution_version(name, where=where))), "")


@dataclass(frozen=True, slots=True)
class TorchView:
    """The number of devices that torch can use, or the `error` of the query."""

    devices: int = 0
    error: str = ""


_ASK_TORCH = (
    "import torch; a = torch.accelerator; print('devices', a.device_count() if a.is_available() else 0)"
)


def torch_view(where: PythonEnvironment | None = None) -> TorchView:
    """How many accelerators torch can use, queried in a subprocess so that CUDA is not initialized here."""
    text, error = _python(_ASK_TORCH, where)
    match = re.search(r"^devices (\d+)$", text, re.MULTILINE)
    return (
        TorchView(int(match[1])) if match else TorchView(error=error or "torch reports no number of devices")
    )


def try_import(module: str, where: PythonEnvironment | None = None) -> str:
    """Why `module` cannot be imported, tried in a subprocess of this or another Python; empty if it can."""
    return _python(f"import {module}", where)[1]


def _python(code: str, where: PythonEnvironment | None = None) -> tuple[str, str]:
    """The output of `code` in a subprocess, and the last line of its error; empty if it succeeds."""
    command = [where.interpreter if where else sys.executable, "-c", code]
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

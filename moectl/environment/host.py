"""The machine around the GPUs: operating system, C library, CPU, memory, container."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..files.safe_reading import text_or_empty
from .detection import detect_cpu

ROOT = Path("/")
"""Directory with the files of the system; tests have another."""

_CONTAINER_FILES = {".dockerenv": "Docker", "run/.containerenv": "Podman", ".singularity.d": "Singularity"}
_CONTAINER_GROUPS = re.compile(r"docker|kubepods|containerd|lxc|libpod")


@dataclass(frozen=True, slots=True)
class Host:
    """The machine without its GPUs.

    Attributes:
        system: name and version of the operating system, such as ``Ubuntu 24.04.3 LTS``.
        kernel: the kernel's version; `machine`: the architecture, such as ``x86_64``.
        libc: the C library, such as ``glibc 2.39``; empty if unknown.
        cpu: the CPU's name; `cores`: those that this process may use.
        memory_bytes: installed memory; 0 if unknown.
        container: what this process runs in, such as ``Docker``; empty if nothing says so.
    """

    system: str
    kernel: str
    machine: str
    libc: str
    cpu: str
    cores: int
    memory_bytes: int
    container: str = ""


def find_host(env: Mapping[str, str]) -> Host:
    """The machine that this process runs on; `env` is the process's environment."""
    cpu = detect_cpu()
    return Host(
        _system(),
        platform.release(),
        platform.machine(),
        _libc(),
        cpu.name,
        cpu.sms,
        cpu.memory_bytes,
        _container(env),
    )


def _system() -> str:
    for name in ("etc/os-release", "usr/lib/os-release"):
        if match := re.search(r"""^PRETTY_NAME=["']?([^"'\n]+)""", text_or_empty(ROOT / name), re.MULTILINE):
            return match[1].strip()
    release = platform.mac_ver()[0]
    return f"macOS {release}" if release else platform.system()


def _libc() -> str:
    """The C library that this process runs with, by the system's own words."""
    with suppress(ValueError, OSError, AttributeError):
        if text := os.confstr("CS_GNU_LIBC_VERSION"):
            return text
    return " ".join(filter(None, platform.libc_ver()))


def _container(env: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" in env:
        return "Kubernetes"
    for name, title in _CONTAINER_FILES.items():
        if (ROOT / name).exists():
            return title
    if match := _CONTAINER_GROUPS.search(text_or_empty(ROOT / "proc/1/cgroup")):
        return f"a container ({match[0]})"
    return "WSL" if "microsoft" in platform.release().lower() else ""

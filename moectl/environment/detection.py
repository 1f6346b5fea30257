"""Detects the devices of this machine from its drivers and system files."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from ..files.safe_reading import text_or_empty
from .gpus import HIDDEN, Gpu, visible_gpus
from .named_devices import Device
from .nvidia import WITHOUT, DriverFailure, NvidiaAnswer, nvidia_answer
from .sysfs_gpus import amd_gpus, intel_gpus

_MACHINES = {"x86_64": "x86", "amd64": "x86", "arm64": "aarch64"}
_CPU_FLAGS = {"amx_tile": "amx", "amx_fp8": "amx-fp8", "avx512f": "avx512"}


def detect_gpus() -> tuple[Gpu, ...]:
    """Every GPU of this machine, including hidden ones: NVIDIA's, else AMD's, else Intel's.

    Raises DriverFailure if NVIDIA's driver is installed but fails, and there is no other GPU.
    """
    return find_gpus()[0]


def find_gpus() -> tuple[tuple[Gpu, ...], NvidiaAnswer]:
    """As `detect_gpus`, with NVIDIA's answer."""
    try:
        answer = nvidia_answer()
    except DriverFailure:
        if others := amd_gpus() or intel_gpus():
            return others, NvidiaAnswer()
        raise
    return answer.gpus or amd_gpus() or intel_gpus(), answer


def detect_device(env: Mapping[str, str] | None = None) -> Device:
    """The first usable GPU that is visible to this process; the CPU if there is or shall be none.

    `env` defaults to this process's environment; ``CUDA_VISIBLE_DEVICES`` and its equivalents are honoured.
    Raises Unavailable when one of them names a GPU that does not exist, and DriverFailure when there are
    GPUs that cannot be used.
    """
    return detect_device_and_driver(env)[0]


def detect_device_and_driver(env: Mapping[str, str] | None = None) -> tuple[Device, NvidiaAnswer]:
    """As `detect_device`, with NVIDIA's answer."""
    env = os.environ if env is None else env
    try:
        gpus, answer = find_gpus()
    except DriverFailure:
        if env.get("CUDA_VISIBLE_DEVICES", "unset").strip() in HIDDEN:
            return detect_cpu(), NvidiaAnswer()
        raise
    return first_usable(visible_gpus(gpus, env)) or detect_cpu(), answer


def first_usable(visible: tuple[Gpu, ...]) -> Device | None:
    """The first of the GPUs that can be used; None without GPUs. DriverFailure if none of them can be."""
    usable = [gpu.device for gpu in visible if not gpu.remark]
    if visible and not usable:
        raise DriverFailure(
            "; ".join(f"GPU {gpu.index}: {gpu.remark}" for gpu in visible), hint=f"Repair them; {WITHOUT}."
        )
    return usable[0] if usable else None


def detect_cpu() -> Device:
    """The CPU of this machine: usable cores, memory, and the instruction sets that backends depend on."""
    machine = platform.machine().lower()
    info = text_or_empty(Path("/proc/cpuinfo"))
    flags = re.search(r"^flags\s*:(.*)$", info, re.MULTILINE)
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flag_names = frozenset(flags[1].split()) if flags else frozenset[str]()
    features = {feature for flag, feature in _CPU_FLAGS.items() if flag in flag_names}
    if "AuthenticAMD" in info and "avx512" in features:
        features.add("zen")
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", text_or_empty(Path("/proc/meminfo")), re.MULTILINE)
    return Device(
        platform="cpu",
        arch=_MACHINES.get(machine, machine),
        name=model[1].strip() if model else "cpu",
        sms=usable_cores(),
        memory_bytes=int(memory[1]) << 10 if memory else 0,
        features=frozenset(features),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else (os.cpu_count() or 1)

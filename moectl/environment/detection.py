"""The devices of this machine, read from its drivers and system files."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from ..errors import Unavailable
from .devices import Device, device_of, known_names, squeeze

_MACHINES = {"x86_64": "x86", "amd64": "x86", "arm64": "aarch64"}
_CPU_FLAGS = {"amx_tile": "amx", "avx512f": "avx512"}


def detect_device() -> Device:
    """The first visible GPU of this machine, or its CPU.

    Asks `nvidia-smi` (five seconds) and honours ``CUDA_VISIBLE_DEVICES``. Unavailable when that
    variable names a GPU that is not there.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none", "NoDevFiles"):
        return detect_cpu()
    rows = _nvidia_rows()
    if not rows:
        return detect_cpu()
    row = rows[0] if visible is None else _visible_row(rows, visible.split(",")[0].strip())
    _, _, name, mebibytes, capability = row
    known = known_names().get(squeeze(name))
    arch = "sm" + capability.replace(".", "")
    device = device_of(known, arch) if known else Device("cuda", arch, name)
    return replace(device, name=name, memory_bytes=_mebibytes(mebibytes) or device.memory_bytes)


def _mebibytes(text: str) -> int:
    """Bytes of a MiB figure; 0 where the driver gives none, as on unified memory."""
    return int(text) << 20 if text.isdigit() else 0


def _visible_row(rows: list[tuple[str, ...]], wanted: str) -> tuple[str, ...]:
    for row in rows:
        if wanted == row[0] or (wanted.startswith("GPU-") and row[1].startswith(wanted)):
            return row
    raise Unavailable(
        f"CUDA_VISIBLE_DEVICES asks for GPU {wanted!r}, nvidia-smi lists {len(rows)} GPU(s) from 0",
        hint="Unset CUDA_VISIBLE_DEVICES, or name a device with --gpu.",
    )


def _nvidia_rows() -> list[tuple[str, ...]]:
    """(index, uuid, name, memory in MiB, compute capability) of each GPU; empty without a driver."""
    command = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.total,compute_cap",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [tuple(part.strip() for part in line.split(",")) for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 5 and re.fullmatch(r"\d+\.\d", row[4])]


def detect_cpu() -> Device:
    """The CPU of this machine: usable cores, memory, and the instruction sets that decide."""
    machine = platform.machine().lower()
    info = _read("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", info, re.MULTILINE)
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    words = frozenset(flags[1].split()) if flags else frozenset[str]()
    features = {feature for flag, feature in _CPU_FLAGS.items() if flag in words}
    if "AuthenticAMD" in info and "avx512" in features:
        features.add("zen")
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    affinity = getattr(os, "sched_getaffinity", None)
    return Device(
        platform="cpu",
        arch=_MACHINES.get(machine, machine),
        name=model[1].strip() if model else "cpu",
        sms=len(affinity(0)) if affinity else (os.cpu_count() or 1),
        memory_bytes=int(memory[1]) << 10 if memory else 0,
        features=frozenset(features),
    )


def _read(path: str) -> str:
    """The file's text; empty on systems that have no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""NVIDIA GPUs of this machine, listed by `nvidia-smi`; no driver library is loaded."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace

from .gpus import Gpu
from .named_devices import Device, device_of, known_names, squeeze

SECONDS = 5
"""Timeout of `nvidia-smi`."""

_FIELDS = ("index", "uuid", "name", "memory.total", "compute_cap", "driver_version", "mig.mode.current")
_SLICE = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+(?P<index>\d+): \(UUID: (?P<uuid>MIG-[^)]+)\)")
_BOARD = re.compile(r"^GPU (?P<index>\d+): .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_GIGABYTES = re.compile(r"\.(\d+)gb")


def nvidia_gpus() -> tuple[Gpu, ...]:
    """Every GPU that the driver lists, in its order; a GPU in MIG mode is replaced by its slices.

    Empty without a driver, or when it does not answer within `SECONDS`.
    """
    gpus = [_gpu(row) for row in _rows()]
    if not any(gpu.mig for gpu in gpus):
        return tuple(gpus)
    slices = _slices()
    return tuple(part for gpu in gpus for part in _parts(gpu, slices.get(gpu.uuid, [])))


def driver_cuda() -> str:
    """Highest CUDA version that the driver supports, such as ``13.0``; empty if unknown."""
    match = re.search(r"CUDA (?:UMD )?Version: *(\d+\.\d+)", _nvidia_smi())
    return match[1] if match else ""


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, mebibytes, capability, driver, mig = row
    known = known_names().get(squeeze(name))
    arch = "sm" + capability.replace(".", "")
    device = device_of(known, arch) if known else Device("cuda", arch, name)
    memory = int(mebibytes) << 20 if mebibytes.isdigit() else device.memory_bytes
    device = replace(device, name=name, memory_bytes=memory)
    return Gpu(device, index, uuid, driver, mig="on" if mig == "Enabled" else "")


def _parts(gpu: Gpu, slices: list[tuple[str, str]]) -> Iterator[Gpu]:
    """The MIG slices of a GPU, whose rates are unknown; a GPU that is not in MIG mode itself.

    A GPU in MIG mode without slices cannot run anything: it is listed with a remark.
    """
    if not gpu.mig:
        yield gpu
        return
    if not slices:
        yield replace(gpu, remark="MIG is on and no slice is made: nothing can run on it")
    for number, (profile, uuid) in enumerate(slices):
        gigabytes = _GIGABYTES.search(profile)
        device = replace(
            gpu.device,
            name=f"{gpu.device.name} MIG {profile}",
            sms=0,
            memory_bytes=int(gigabytes[1]) << 30 if gigabytes else 0,
            bandwidth=0.0,
            bf16_flops=0.0,
            fp8_flops=0.0,
            fp4_flops=0.0,
        )
        yield replace(gpu, device=device, index=f"{gpu.index}:{number}", uuid=uuid, mig=profile)


def _slices() -> dict[str, list[tuple[str, str]]]:
    """(profile, UUID) of every MIG slice, by the UUID of its GPU."""
    slices: dict[str, list[tuple[str, str]]] = {}
    board = ""
    for line in _nvidia_smi("-L").splitlines():
        if match := _BOARD.match(line):
            board = match["uuid"]
        elif match := _SLICE.match(line):
            slices.setdefault(board, []).append((match["profile"], match["uuid"]))
    return slices


def _rows() -> list[list[str]]:
    """One row of `_FIELDS` per GPU; malformed lines are skipped."""
    text = _nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == len(_FIELDS) and re.fullmatch(r"\d+\.\d", row[4])]


def _nvidia_smi(*arguments: str) -> str:
    """The output of `nvidia-smi`; empty if it is missing or fails."""
    try:
        process = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""
    return process.stdout

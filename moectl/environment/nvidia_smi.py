"""NVIDIA's GPUs as `nvidia-smi` prints them; used where NVML's Python bindings are not installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from . import nvidia_listing
from .nvidia_listing import DriverListing, ListedGpu, ListedSlice, NoAnswer, one_line

_FIELDS = ("index", "uuid", "name", "memory.total", "compute_cap", "driver_version", "mig.mode.current")
_SLICE = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+(?P<index>\d+): \(UUID: (?P<uuid>MIG-[^)]+)\)")
_BOARD = re.compile(r"^GPU (?P<index>\d+): .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_CUDA = re.compile(r"CUDA (?:UMD )?Version: *(\d+\.\d+)")


def listing() -> DriverListing | None:
    """What `nvidia-smi` lists; None if it is not installed. NoAnswer, with its words, if it lists no GPU."""
    answer = _nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    if answer is None:
        return None
    text, words = answer
    rows: list[list[str]] = []
    others: list[str] = []
    for line in text.splitlines():
        row = [part.strip() for part in line.split(",")]
        if len(row) == len(_FIELDS) and re.fullmatch(r"\d+\.\d", row[4]):
            rows.append(row)
        else:
            others.append(line)
    said = one_line("\n".join([*others, words]))
    if not rows:
        raise NoAnswer(f"nvidia-smi: {said}" if said else "nvidia-smi lists no GPU")
    slices = _slices() if any(row[-1] == "Enabled" for row in rows) else {}
    gpus = tuple(_gpu(row, slices) for row in rows)
    return DriverListing(gpus, rows[0][5], warning=f"nvidia-smi: {said}" if said else "")


def driver_cuda() -> str:
    """Highest CUDA version that the driver supports, such as ``13.0``; empty if unknown."""
    try:
        match = _CUDA.search((_nvidia_smi() or ("", ""))[0])
    except NoAnswer:
        return ""
    return match[1] if match else ""


def topology() -> str:
    """How GPUs are connected, as ``nvidia-smi topo -m`` prints it; empty if it is not installed.

    NoAnswer if it does not end in time.
    """
    return (_nvidia_smi("topo", "-m") or ("", ""))[0]


def _gpu(row: list[str], slices: Mapping[str, tuple[ListedSlice, ...]]) -> ListedGpu:
    index, uuid, name, mebibytes, capability, _, mig = row
    memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
    arch = "sm" + capability.replace(".", "")
    return ListedGpu(index, uuid, name, arch, memory, mig == "Enabled", slices.get(uuid, ()))


def _slices() -> dict[str, tuple[ListedSlice, ...]]:
    """The MIG slices by the UUID of their GPU."""
    slices: dict[str, tuple[ListedSlice, ...]] = {}
    board = ""
    for line in (_nvidia_smi("-L") or ("", ""))[0].splitlines():
        if match := _BOARD.match(line):
            board = match["uuid"]
        elif match := _SLICE.match(line):
            slices[board] = (*slices.get(board, ()), ListedSlice(match["profile"], match["uuid"]))
    return slices


def _nvidia_smi(*arguments: str) -> tuple[str, str] | None:
    """What `nvidia-smi` prints, and its errors; None if it is not installed.

    NoAnswer if it cannot be started or does not end within `nvidia_listing.SECONDS`. Its exit status says
    little: a warning about an infoROM ends it with 14 after a complete list.
    """
    try:
        process = subprocess.Popen(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoAnswer(f"nvidia-smi cannot be started: {error.strerror}") from error
    try:
        text, errors = process.communicate(timeout=nvidia_listing.SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        # Not waited for any longer: a process that hangs in the driver cannot even be killed.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        raise NoAnswer(f"nvidia-smi did not answer within {nvidia_listing.SECONDS:g} s", hung=True) from None
    status = f"exited with status {process.returncode}" if process.returncode and not text + errors else ""
    return text, errors or status

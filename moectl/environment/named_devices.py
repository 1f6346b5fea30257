"""Devices by name, from a table of published figures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files.records import From0, Size


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the CPU.

    Attributes:
        platform: ``cuda``, ``rocm``, ``xpu``, ``cpu``, ``tpu`` or ``out-of-tree``.
        arch: ``sm90``, ``gfx942``, ``x86``, ``aarch64``, ...
        name: the name that the driver reports.
        sms: streaming multiprocessors (CUDA), compute units (ROCm), cores (CPU).
        memory_bytes: device memory as the driver reports it; if that is not known, the nominal size.
        bandwidth: peak memory bandwidth, bytes/s; 0 if unknown.
        bf16_flops, fp8_flops, fp4_flops: peak dense matrix rates, FLOP/s; 0 if unknown or unsupported.
        features: instruction sets that backends depend on, such as ``amx``.
    """

    platform: str
    arch: str
    name: str
    sms: Size = 0
    memory_bytes: Size = 0
    bandwidth: From0 = 0.0
    bf16_flops: From0 = 0.0
    fp8_flops: From0 = 0.0
    fp4_flops: From0 = 0.0
    features: frozenset[str] = frozenset()

    @property
    def capability(self) -> int:
        """CUDA compute capability times ten (``sm90`` is 90, ``sm103`` 103); 0 on other platforms."""
        return int(self.arch[2:].rstrip("af")) if self.platform == "cuda" else 0


DATA = Path(__file__).parents[1] / "data"
_MIB = 1 << 20
_CPUS = {
    "cpu": ("x86", frozenset[str]()),
    "cpu-x86": ("x86", frozenset[str]()),
    "cpu-amx": ("x86", frozenset({"amx"})),
    "cpu-x86-amx": ("x86", frozenset({"amx"})),
    "cpu-amx-fp8": ("x86", frozenset({"amx", "amx-fp8"})),
    "cpu-zen": ("x86", frozenset({"zen"})),
    "cpu-arm": ("aarch64", frozenset[str]()),
    "cpu-power": ("ppc64le", frozenset[str]()),
}
"""Architectures and features of CPUs by name."""
_PLUG_INS = ("tpu", "out-of-tree")
"""Platforms that engines support only through plug-ins."""
_CUDA_ARCH = re.compile(r"sm_?(\d{2,3})[af]?")
_COUNTED = re.compile(r"(?P<before>\d+)\s*[x*×]\s*(?P<gpu>.+)|(?P<named>.+?)\s*[x*×:]\s*(?P<after>\d+)", re.I)
"""A number of GPUs and the name of one: ``8xh100``, ``h100:8``."""
_NOISE = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|[\s_()-]")


@cache
def _table() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "gpus.json").read_text(encoding="utf-8"))
    return document


def squeeze(name: str) -> str:
    """A GPU's name without vendor, brand and punctuation, for comparing spellings."""
    return _NOISE.sub("", name.lower())


@cache
def known_names() -> dict[str, str]:
    """The key of a GPU's row by each squeezed spelling of its name."""
    keys: dict[str, str] = {}
    for key, row in _table()["gpus"].items():
        for spelling in (key, *row["aliases"], *row["names"]):
            keys.setdefault(squeeze(spelling), key)
    return keys


def gpu_names() -> tuple[str, ...]:
    """Keys of all GPUs in the table, accepted by `find_device`, oldest architecture first."""
    return tuple(_table()["gpus"])


def spellings(key: str) -> tuple[str, ...]:
    """The aliases and driver names of GPU `key`."""
    row = _table()["gpus"][key]
    return (*row["aliases"], *row["names"])


def nominal_memory(name: str) -> int:
    """The gigabytes that a GPU is sold with, by any of its names; 0 if it is not in the table.

    Example:
        >>> nominal_memory("NVIDIA H200")
        141
    """
    key = known_names().get(squeeze(name))
    return int(_table()["gpus"][key]["memory_gib"]) if key else 0


@lru_cache(maxsize=64)
def published_bandwidth(name: str) -> float:
    """Bytes per second of a GPU's memory as published, by any of its names; 0 if it is not in the table.

    Example:
        >>> published_bandwidth("NVIDIA H200")
        4800000000000.0
    """
    key = known_names().get(squeeze(name))
    return _scaled(_table()["gpus"][key]["bandwidth_tb_s"]) if key else 0.0


def memory_bandwidth(megahertz: float, bits: int) -> float:
    """Bytes per second of a memory with a clock and a bus width, as drivers report them; 0 if one of them is.

    Example:
        >>> round(memory_bandwidth(2619, 5120) / 1e9)  # an H100
        3352
    """
    transfers = 2e6 * megahertz
    return transfers * bits / 8


def bandwidth_by_torch(properties: Any) -> float:
    """The `memory_bandwidth` of torch's properties of a GPU; 0 if they do not say."""
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    return memory_bandwidth(kilohertz / 1000, getattr(properties, "memory_bus_width", 0))


@lru_cache(maxsize=64)
def published_matrix_rate(name: str) -> float:
    """Dense 16-bit FLOP/s of one multiprocessor as published, by any name of its GPU; 0 if unknown.

    A name that begins with the words of one in the table is a variant of that GPU with other memory.

    Example:
        >>> published_matrix_rate("NVIDIA H200") / published_matrix_rate("NVIDIA H20") > 3.9
        True
        >>> published_matrix_rate("NVIDIA H20 192GB") == published_matrix_rate("NVIDIA H20")
        True
    """
    words = re.split(r"(?=[\s_()-])", name)
    beginnings = (squeeze("".join(words[:count])) for count in range(len(words), 0, -1))
    key = next((known_names()[it] for it in beginnings if it in known_names()), None)
    return _matrix_rate_of(_table()["gpus"][key]) if key else 0.0


@cache
def lowest_matrix_rate(capability: int) -> float:
    """The lowest published dense 16-bit FLOP/s of a multiprocessor of an NVIDIA architecture; 0 if unknown.

    If none is published of it, compute `capability` times ten, the latest one before it counts.

    Example:
        >>> lowest_matrix_rate(86) == published_matrix_rate("NVIDIA GeForce RTX 3090")
        True
        >>> lowest_matrix_rate(110) == published_matrix_rate("NVIDIA B200")
        True
    """
    known: dict[int, float] = {}
    for key, row in _table()["gpus"].items():
        arch, rate = device_of(key).capability, _matrix_rate_of(row)
        if rate and 0 < arch <= capability:
            known[arch] = min(rate, known.get(arch, rate))
    return known[max(known)] if known else 0.0


def _matrix_rate_of(row: dict[str, Any]) -> float:
    """Dense 16-bit FLOP/s of one multiprocessor of a GPU in the table; 0 if it or their number is unknown."""
    return _scaled(row.get("bf16_tflops")) / row["sms"] if row.get("sms") else 0.0


def _scaled(figure: float | None) -> float:
    """A figure in tera-units converted to units, rounded; 0 if unknown."""
    return float(round((figure or 0) * 1e12))


def device_of(key: str, arch: str = "") -> Device:
    """The device of row `key`, optionally with another architecture."""
    row = _table()["gpus"][key]
    return Device(
        platform=row["platform"],
        arch=arch or row["arch"],
        name=row["names"][0],
        sms=row["sms"] or 0,
        memory_bytes=row.get("memory_mib", row["memory_gib"] * 1024) * _MIB,
        bandwidth=_scaled(row["bandwidth_tb_s"]),
        bf16_flops=_scaled(row["bf16_tflops"]),
        fp8_flops=_scaled(row["fp8_tflops"]),
        fp4_flops=_scaled(row.get("fp4_tflops")),
    )


def device_names() -> tuple[str, ...]:
    """Names of all GPUs in the table and of the CPUs."""
    return (*_table()["gpus"], "cpu", "cpu-amx")


def find_device(name: str) -> Device:
    """The device called `name`.

    A name is a GPU (``h100``, ``NVIDIA H200``, ``mi300x``), an architecture (``sm90``, ``gfx942``: a
    representative GPU of it), a CPU (``cpu``, ``cpu-amx``, ``cpu-zen``, ``cpu-arm``, ``cpu-power``), ``tpu``
    or ``out-of-tree``. UsageError with near matches for an unknown name or architecture.

    Example:
        >>> device = find_device("h200")
        >>> device.name, device.arch, device.sms
        ('NVIDIA H200', 'sm90', 132)
    """
    text = name.strip().lower()
    if text in _CPUS:
        arch, features = _CPUS[text]
        return Device("cpu", arch, "cpu", features=features)
    if text in _PLUG_INS:
        return Device(text, text, text)
    if key := known_names().get(squeeze(text)):
        return device_of(key)
    representatives = _table()["representatives"]
    cuda = _CUDA_ARCH.fullmatch(text)
    arch = f"sm{cuda[1]}" if cuda else text
    if key := representatives.get(arch):
        return device_of(key, arch)
    architectures = _table()["architectures"]
    for platform, known in architectures.items():
        if arch in known:
            return Device(platform, arch, arch)
    names = [*_table()["gpus"], *representatives, *_CPUS, *_PLUG_INS]
    if cuda:
        near = sorted(architectures["cuda"], key=lambda known: abs(int(known[2:]) - int(cuda[1])))[:4]
    else:
        near = get_close_matches(text, dict.fromkeys([*architectures["rocm"], *names]), n=4, cutoff=0.5)
    if counted := _COUNTED.fullmatch(name.strip()):
        number, one = counted["before"] or counted["after"], counted["named"] or counted["gpu"]
        if key := known_names().get(squeeze(one)):
            raise UsageError(
                f"no device is called {name!r}: --gpu takes one GPU's name, without a number",
                hint=f"use --gpu {key} --tp {number}, or --dp {number} --ep",
            )
    raise UsageError(
        f"no device is called {name!r}",
        hint=f"Near matches: {', '.join(near)}." if near else f"Known are {', '.join(names)}.",
    )

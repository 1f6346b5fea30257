"""Machines and installed packages as values; reading the real ones happens at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the CPU.

    Attributes:
        platform: ``cuda``, ``rocm``, ``xpu`` or ``cpu``.
        arch: ``sm90``, ``gfx942``, ``x86``, ``aarch64``, ...
        name: the name an engine would see.
        sms: streaming multiprocessors (CUDA), compute units (ROCm), cores (CPU).
        memory_bytes: device memory.
        bandwidth: peak memory bandwidth, bytes/s; 0 when unknown.
        bf16_flops, fp8_flops: peak dense matrix rates, FLOP/s; 0 when unknown or absent.
        features: instruction sets that decide, such as ``amx``.
    """

    platform: str
    arch: str
    name: str
    sms: int = 0
    memory_bytes: int = 0
    bandwidth: float = 0.0
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    features: frozenset[str] = frozenset()

    @property
    def capability(self) -> int:
        """CUDA compute capability times ten (``sm90`` is 90, ``sm103`` 103); 0 off CUDA."""
        return int(self.arch[2:].rstrip("af")) if self.platform == "cuda" else 0


@dataclass(frozen=True, slots=True)
class Packages:
    """Optional packages and switches that a decision depends on.

    `versions` maps an importable package to its version (``""`` when unknown); `missing` lists
    symbols (``package:dotted.name``) that an installed package lacks; `env` holds engine switches.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)

    def has(self, package: str, symbol: str = "") -> bool:
        """True when `package` is installed and, if named, holds `symbol`."""
        return package in self.versions and f"{package}:{symbol}" not in self.missing

"""The conditions of a run: this machine, its versions and rates."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from ..cache.measurement_keys import kernel_hash
from ..capabilities.unpacked_libraries import LOCATIONS, PREFIX
from ..environment import detect_gpus
from ..environment.nvidia import DriverFailure
from ..kernels.timing.cold_calls import last_level_cache
from ..problem.roofline import MeasuredRates
from ..run import RunMachine
from .run_bench import gpu_uuid
from .settings import BenchSettings

LIBRARIES = (
    "triton",
    *("vllm", "flashinfer", "flashinfer_cubin", "humming", "triton_kernels"),
    *(PREFIX + name for name in LOCATIONS),
)
"""Packages other than torch whose versions affect times: installed ones, and those of `MOECTL_PEERS`."""


def versions_of(machine: RunMachine) -> dict[str, str]:
    """Versions of everything present that affects times; ``kernels`` is a hash of moectl's kernels."""
    versions = {
        "moectl": __version__,
        "kernels": kernel_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    libraries = {"triton": _triton(), **machine.packages.versions}
    return versions | {name: libraries[name] for name in LIBRARIES if libraries.get(name)}


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _driver(gpu: str) -> str:
    """The version of the driver of the GPU with UUID `gpu`; empty if it does not say."""
    try:
        return next((listed.driver for listed in detect_gpus() if gpu == listed.uuid), "")
    except DriverFailure:
        return ""


def machine_metadata(machine: RunMachine, settings: BenchSettings, rates: MeasuredRates) -> dict[str, Any]:
    """The machine and the conditions of the run as plain data, for `RunHeader.machine`."""
    gpu = gpu_uuid(machine.torch)
    driver = _driver(gpu) if gpu else ""
    return {
        "device": machine.device.name,
        "driver": driver,
        "versions": versions_of(machine),
        "rates": asdict(rates),
        "cache_bytes": last_level_cache(machine.torch),
        "caches": settings.caches,
        "clocks": "the driver's, while each case was timed" if gpu else "not recorded: no NVIDIA GPU",
        "begun": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def rates_of(data: Mapping[str, Any]) -> MeasuredRates | None:
    """The rates recorded by an earlier run; None without them."""
    try:
        rates = data["rates"]
        fp8 = float(rates.get("fp8_flops", 0.0))
        return MeasuredRates(float(rates["bandwidth"]), float(rates["flops"]), str(rates["source"]), fp8)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None

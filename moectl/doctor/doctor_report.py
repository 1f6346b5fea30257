"""`DoctorReport`: the state of a machine, and remarks on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..environment import Device
from ..environment.gpu_links import Links
from ..environment.gpus import Gpu
from ..environment.host import Host
from ..environment.installed_packages import InstalledPackage
from ..environment.variables import SET, VariableFinding
from ..files.records import to_json
from ..oracle.engine import Engine
from ..oracle.registry import answering_engines
from .kernel_caches import CompilerJobs, KernelCache
from .runnable_backends import BackendStatus
from .software import Software, TorchView

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
"""Levels of a `DoctorRemark`: something to fix, something that may mislead, or something to know."""


@dataclass(frozen=True, slots=True)
class DoctorRemark:
    """One sentence about the machine, and how to fix it."""

    level: str
    about: str
    says: str
    do: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """The result of an examination.

    Attributes:
        gpus: every GPU; `shown` those visible to this process, in its order.
        hidden_by: variables that hide or order GPUs, as set.
        refused: why `shown` could not be determined, such as a variable that names an unknown GPU.
        driver_failure: why NVIDIA's driver lists no GPUs although it is installed, in its own words.
        driver_warnings: what it says, or what is to be said about it, besides.
        device: the device that decisions are made for; None if there are GPUs that cannot be used.
        driver_cuda: highest CUDA version that the driver supports.
        packages: optional packages and tools, whether installed or not.
        imports: with a deep check, why a package cannot be imported, by name; empty for one that can.
        torch_view: with a deep check, the devices that torch reports.
        peers_refused: why the directory of unpacked libraries could not be used.
        host: the machine around the GPUs.
        links: how pairs of NVIDIA GPUs are connected.
    """

    software: Software
    gpus: tuple[Gpu, ...]
    shown: tuple[Gpu, ...]
    hidden_by: Mapping[str, str]
    refused: str
    device: Device | None
    driver_cuda: str
    packages: tuple[InstalledPackage, ...]
    caches: tuple[KernelCache, ...]
    jobs: CompilerJobs
    host: Host
    variables: tuple[VariableFinding, ...]
    backends: tuple[BackendStatus, ...]
    imports: Mapping[str, str] = field(default_factory=dict)
    torch_view: TorchView | None = None
    peers_refused: str = ""
    driver_failure: str = ""
    driver_warnings: tuple[str, ...] = ()
    links: Links = field(default_factory=dict)
    remarks: tuple[DoctorRemark, ...] = ()

    @property
    def problems(self) -> tuple[DoctorRemark, ...]:
        """The remarks on things to fix."""
        return tuple(remark for remark in self.remarks if remark.level == PROBLEM)

    @property
    def driver(self) -> str:
        """The driver's version; empty if unknown."""
        return next((gpu.driver for gpu in self.gpus if gpu.driver), "")

    def installed(self, name: str) -> InstalledPackage:
        """The package or tool called `name`."""
        return next(package for package in self.packages if package.name == name)

    def engine_version(self, engine: Engine) -> str | None:
        """The installed version of an engine; None if it is not installed."""
        return self.software.libraries.get(engine.package)

    def odd_variables(self) -> Iterator[VariableFinding]:
        """Variables that do not have the intended effect."""
        return (finding for finding in self.variables if finding.verdict != SET)

    def to_json(self) -> dict[str, Any]:
        """The complete report as JSON values."""
        return {
            "software": to_json(self.software),
            "driver": self.driver,
            "driver_cuda": self.driver_cuda,
            "host": to_json(self.host),
            "links": {f"{one}-{other}": name for (one, other), name in self.links.items()},
            "gpus": [_gpu_json(gpu, gpu in self.shown) for gpu in self.gpus],
            "hidden_by": dict(self.hidden_by),
            "refused": self.refused or None,
            "driver_failure": self.driver_failure or None,
            "driver_warnings": list(self.driver_warnings),
            "device": _device_json(self.device) if self.device else None,
            "peers_refused": self.peers_refused or None,
            "packages": [_package_json(package, self.imports) for package in self.packages],
            "imports": dict(self.imports),
            "torch_devices": self.torch_view.devices if self.torch_view else None,
            "caches": to_json(self.caches),
            "jobs": self.jobs.to_json(),
            "variables": to_json(self.variables),
            "backends": [status.to_json() for status in self.backends],
            "engines": [
                {"name": engine.name, "rules": engine.version, "installed": self.engine_version(engine)}
                for engine in answering_engines()
                if engine.package
            ],
            "remarks": to_json(self.remarks),
        }


def _device_json(device: Device) -> dict[str, Any]:
    return {
        "platform": device.platform,
        "arch": device.arch,
        "name": device.name,
        "sms": device.sms,
        "memory_bytes": device.memory_bytes,
        "features": sorted(device.features),
    }


def _gpu_json(gpu: Gpu, shown: bool) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "name": gpu.device.name,
        "arch": gpu.device.arch,
        "memory_bytes": gpu.device.memory_bytes,
        "mig": gpu.mig or None,
        "shown": shown,
        "remark": gpu.remark or None,
    }


def _package_json(package: InstalledPackage, imports: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": package.name,
        "present": package.present,
        "module": package.module or None,
        "version": package.version or None,
        "path": package.path or None,
        "lacks": list(package.lacks),
        "wrong": package.wrong or None,
        "wrong_version": package.wrong_version or None,
        "import_error": imports.get(package.name) or None,
    }

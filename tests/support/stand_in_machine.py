"""Stand-in machines: a site folder, a PATH, kernel files and drivers of their own."""

import importlib
import stat
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moectl.doctor import kernel_caches
from moectl.environment import host, nvidia, sysfs_gpus
from moectl.environment.gpus import VISIBILITY
from moectl.oracle.registry import known_packages

from .invoking import moectl

SMI = """#!{python}
import sys
if sys.argv[1:] == ["-L"]:
    print('''{listing}''')
elif sys.argv[1:] == ["topo", "-m"]:
    print('''{topology}''')
elif len(sys.argv) > 1:
    print('''{rows}''')
else:
    print("| NVIDIA-SMI 580.95.05      Driver Version: 580.95.05      CUDA Version: {cuda}     |")
"""


NVML = '''
"""A stand-in for nvidia-ml-py, with what it gives for the machine in GPUS."""
import time

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
GPUS, ERROR, SECONDS = {gpus!r}, {error!r}, {seconds!r}

class NVMLError(Exception):
    pass

class NVMLError_LibraryNotFound(NVMLError):
    pass

def nvmlInit():
    time.sleep(SECONDS)
    if ERROR == "no library":
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    if ERROR:
        raise NVMLError(ERROR)

def nvmlShutdown():
    pass

def _value(gpu, name):
    if gpu.get(name) is None:
        raise NVMLError(gpu.get("error", "Not Supported"))
    return gpu[name]

class _Memory:
    def __init__(self, total):
        self.total = total

def nvmlDeviceGetCount():
    return len(GPUS)

def nvmlSystemGetDriverVersion():
    return b"580.95.05"

def nvmlSystemGetCudaDriverVersion():
    return 13000

def nvmlDeviceGetHandleByIndex(index):
    return GPUS[index]

def nvmlDeviceGetHandleByUUID(uuid):
    for gpu in GPUS:
        for part in (gpu, *gpu.get("slices", ())):
            if part["uuid"] == uuid:
                return part
    raise NVMLError("Not Found")

def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part):
    return next(gpu for gpu in GPUS if part in gpu.get("slices", ()))

def nvmlDeviceGetCudaComputeCapability(gpu):
    return _value(gpu, "capability")

def nvmlDeviceGetUUID(gpu):
    return _value(gpu, "uuid")

def nvmlDeviceGetName(gpu):
    return _value(gpu, "name")

def nvmlDeviceGetMemoryInfo(gpu):
    return _Memory(_value(gpu, "memory"))

def nvmlDeviceGetMigMode(gpu):
    return [_value(gpu, "mig"), 0]

def nvmlDeviceGetMaxMigDeviceCount(gpu):
    return 7

def nvmlDeviceGetMigDeviceHandleByIndex(gpu, index):
    if index >= len(gpu["slices"]):
        raise NVMLError("Not Found")
    return gpu["slices"][index]

def nvmlDeviceGetClockInfo(gpu, kind):
    return _value(gpu, "sm" if kind == NVML_CLOCK_SM else "clock")

def nvmlDeviceGetMaxClockInfo(gpu, kind):
    return _value(gpu, "most" if kind == NVML_CLOCK_SM else "most_memory")

def nvmlDeviceGetMemoryBusWidth(gpu):
    return _value(gpu, "width")

def nvmlDeviceGetNumGpuCores(gpu):
    return _value(gpu, "cores")

def nvmlDeviceGetTemperature(gpu, kind):
    return _value(gpu, "celsius")

def nvmlDeviceGetPowerUsage(gpu):
    return _value(gpu, "milliwatts")

def nvmlDeviceGetCurrentClocksThrottleReasons(gpu):
    return _value(gpu, "reasons")

class _Address:
    def __init__(self, bus):
        self.busId = bus

def nvmlDeviceGetPciInfo(gpu):
    return _Address(_value(gpu, "bus"))

def _link(gpu, number):
    if number >= len(gpu.get("links", ())):
        raise NVMLError("Invalid Argument")
    return gpu["links"][number]

def nvmlDeviceGetNvLinkState(gpu, number):
    return int(_link(gpu, number) != "down")

def nvmlDeviceGetNvLinkRemotePciInfo(gpu, number):
    return _Address(_link(gpu, number))

def nvmlDeviceGetTopologyCommonAncestor(one, other):
    return 50 if one["node"] != other["node"] else 10
'''


class Bench:
    """A machine under construction: its folder is site folder, PATH and home at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str, text: str = "", program: bool = False) -> Path:
        """Writes one file below the folder."""
        if name == "pynvml.py":
            sys.modules.pop("pynvml", None)
            importlib.invalidate_caches()
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if program:
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def package(
        self, module: str, distribution: str, version: str, text: str = "", requires: tuple[str, ...] = ()
    ) -> None:
        """Installs a package with metadata."""
        self.file(f"{module}/__init__.py", text)
        needs = "".join(f"Requires-Dist: {name}\n" for name in requires)
        self.file(
            f"{distribution.replace('-', '_')}-{version}.dist-info/METADATA",
            f"Name: {distribution}\nVersion: {version}\n{needs}",
        )

    def gpus(self, rows: str, listing: str = "", cuda: str = "13.0", topology: str = "") -> None:
        """Installs an `nvidia-smi` that prints these rows."""
        text = SMI.format(python=sys.executable, rows=rows, listing=listing, cuda=cuda, topology=topology)
        self.file("nvidia-smi", text, program=True)

    def failing_gpus(self, words: str, status: int = 9, seconds: float = 0) -> None:
        """Installs an `nvidia-smi` that prints `words` after a while and fails."""
        text = f'#!/bin/sh\n{f"/bin/sleep {seconds}" if seconds else ":"}\necho "{words}"\nexit {status}\n'
        self.file("nvidia-smi", text, program=True)

    def nvml(self, *gpus: dict[str, Any], error: str = "", seconds: float = 0) -> None:
        """Installs a `pynvml` that lists these GPUs after a while, or fails with `error`."""
        self.file("pynvml.py", NVML.format(gpus=gpus, error=error, seconds=seconds))

    def env(self, **variables: str) -> dict[str, str]:
        """The environment of a process on this machine."""
        return {"HOME": str(self.folder), "PATH": str(self.folder), **variables}


@cache
def import_libraries() -> None:
    """Imports the libraries of commands, once in a process: stand-in machines do not have them."""
    moectl("explain", "openai/gpt-oss-120b", "--gpu", "h100", "--offline")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An empty machine without GPU; this process lives on it."""
    import_libraries()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MOECTL_PEERS", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in {name for names in VISIBILITY.values() for name in names}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sysfs_gpus, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(sysfs_gpus, "DRM", tmp_path / "drm")
    monkeypatch.setattr(sysfs_gpus, "AMDGPU_VERSION", tmp_path / "amdgpu")
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_caches, "PROC", tmp_path / "proc")
    monkeypatch.setattr(kernel_caches, "CGROUP", tmp_path / "cgroup")
    for probe in known_packages().values():
        for module in probe.modules:
            monkeypatch.delitem(sys.modules, module.split(".")[0], raising=False)
    return Bench(tmp_path)

"""`moectl doctor`: what this machine has, which backends can run on it, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..capabilities.unpacked_libraries import find_peers, peers_folder
from ..environment import Device, detect_cpu
from ..environment.detection import find_gpus, first_usable
from ..environment.gpu_links import gpu_links
from ..environment.gpus import VISIBILITY, Gpu, visible_gpus
from ..environment.host import find_host
from ..environment.installed_packages import InstalledPackage, find_all, package_folder
from ..environment.nvidia import DriverFailure, NvidiaAnswer
from ..environment.nvidia_smi import driver_cuda
from ..environment.package_probes import TOOLS
from ..environment.packages import packages_of
from ..environment.python_environments import PythonEnvironment
from ..errors import Unavailable, UsageError
from ..oracle.machine_packages import present_engines
from ..oracle.registry import answering_engines, engine_variables, known_packages
from .doctor_report import NOTE, PROBLEM, WARNING, DoctorRemark, DoctorReport
from .kernel_caches import find_caches, find_jobs
from .problems import remarks_on
from .runnable_backends import backend_statuses
from .software import installed_software, torch_view, try_import

__all__ = ["NOTE", "PROBLEM", "WARNING", "DoctorRemark", "DoctorReport", "examine"]

ORDER = "CUDA_DEVICE_ORDER"
LIBRARIES_TRIED = ("torch", "triton")
"""Libraries that a deep check imports in addition to the optional packages and the engines."""


def examine(
    env: Mapping[str, str], *, deep: bool = False, where: PythonEnvironment | None = None
) -> DoctorReport:
    """Examines this machine for a process with the environment `env`, in this Python environment or `where`.

    No package is imported, except NVIDIA's bindings of NVML. With `deep`, every installed package is
    imported, and torch is queried for its devices, in subprocesses.
    """
    gpus, driver, failure = _gpus()
    visible, refused = _visible(gpus, env)
    peers, peers_refused = _peers(env) if where is None else ((), "")
    probed = (*find_all(known_packages(), where), *peers)
    packages = packages_of(probed, engine_variables(env))
    device = _device(visible) if not (failure or refused) else None
    installed = installed_software(where)
    engines = present_engines(where)
    report = DoctorReport(
        software=installed,
        gpus=gpus,
        shown=visible,
        hidden_by=_hiding(gpus, env),
        refused=refused,
        driver_failure=failure,
        driver_warnings=tuple(filter(None, (driver.warning, driver.slowness))),
        device=device,
        driver_cuda=driver.cuda or (driver_cuda() if driver.through == "nvidia-smi" else ""),
        packages=probed,
        caches=find_caches(env),
        jobs=find_jobs(env),
        engines=engines,
        variables=tuple(finding for engine in engines for finding in engine.judge(env)),
        backends=tuple(
            status
            for engine in engines
            if device is not None
            for status in backend_statuses(engine.policy, device, packages, installed.libraries, where)
        ),
        imports=_imports(probed, where) if deep else {},
        torch_view=torch_view(where) if deep and package_folder("torch", where) else None,
        peers_refused=peers_refused,
        host=find_host(env),
        links=gpu_links() if sum(gpu.device.platform == "cuda" for gpu in gpus) > 1 else {},
    )
    return replace(report, remarks=remarks_on(report, packages))


def _gpus() -> tuple[tuple[Gpu, ...], NvidiaAnswer, str]:
    """The GPUs with NVIDIA's answer, and the driver's own words if it fails."""
    try:
        return (*find_gpus(), "")
    except DriverFailure as error:
        return (), NvidiaAnswer(), error.what


def _device(visible: tuple[Gpu, ...]) -> Device | None:
    """The device that decisions are made for: never the CPU in place of GPUs that cannot be used."""
    try:
        return first_usable(visible) or detect_cpu()
    except DriverFailure:
        return None


def _visible(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs visible to a process with `env`, or why they cannot be determined."""
    try:
        return visible_gpus(gpus, env), ""
    except Unavailable as error:
        return (), error.what


def _peers(env: Mapping[str, str]) -> tuple[tuple[InstalledPackage, ...], str]:
    """The unpacked libraries, or why their directory cannot be used."""
    try:
        return find_peers(peers_folder(env)), ""
    except UsageError as error:
        return (), error.what


def _hiding(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that hide or order GPUs, as set."""
    names = [name for gpu in gpus[:1] for name in VISIBILITY[gpu.device.platform]]
    return {name: env[name] for name in (*names, ORDER) if name in env}


def _imports(packages: tuple[InstalledPackage, ...], where: PythonEnvironment | None) -> dict[str, str]:
    """Why each installed package cannot be imported, by name; empty for one that can."""
    modules = {item.name: item.module for item in packages if item.present and item.name not in TOOLS}
    engines = tuple(engine.package for engine in answering_engines() if engine.package)
    modules |= {name: name for name in (*LIBRARIES_TRIED, *engines) if package_folder(name, where)}
    return {name: try_import(module, where) for name, module in modules.items()}

"""The state of this machine as far as MoE layers go: what is there, what can run, what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..capabilities.unpacked_libraries import find_peers, peers_folder
from ..environment import detect_cpu, detect_gpus
from ..environment.gpus import VISIBILITY, Gpu, visible_gpus
from ..environment.installed_packages import InstalledPackage, find_all, package_folder
from ..environment.nvidia_smi import driver_cuda
from ..environment.package_probes import TOOLS
from ..environment.packages import packages_of
from ..errors import Unavailable, UsageError
from ..oracle.registry import engine_variables, known_packages, newest_engines
from .doctor_report import NOTE, PROBLEM, DoctorRemark, DoctorReport
from .kernel_caches import find_caches, find_jobs
from .problems import remarks_on
from .runnable_backends import backend_statuses
from .software import installed_software, torch_view, try_import

__all__ = ["NOTE", "PROBLEM", "DoctorRemark", "DoctorReport", "examine"]

ORDER = "CUDA_DEVICE_ORDER"
LIBRARIES_TRIED = ("torch", "triton")
"""Libraries that a deep look imports beside the optional packages and the engines."""


def examine(env: Mapping[str, str], *, deep: bool = False) -> DoctorReport:
    """What this machine has, and what is wrong with it, for a process with `env`.

    Nothing is imported; with `deep`, each package that is installed is imported, and torch is asked for
    its devices, in processes of their own.
    """
    gpus = detect_gpus()
    shown, refused = _shown(gpus, env)
    peers, peers_refused = _peers(env)
    found = (*find_all(known_packages()), *peers)
    packages = packages_of(found, engine_variables(env))
    device = next((gpu.device for gpu in shown if not gpu.remark), None) or detect_cpu()
    installed = installed_software()
    report = DoctorReport(
        software=installed,
        gpus=gpus,
        shown=shown,
        hidden_by=_hiding(gpus, env),
        refused=refused,
        device=device,
        driver_cuda=driver_cuda() if any(gpu.device.platform == "cuda" for gpu in gpus) else "",
        packages=found,
        caches=find_caches(env),
        jobs=find_jobs(env),
        variables=tuple(finding for engine in newest_engines() for finding in engine.judge(env)),
        backends=tuple(
            status
            for engine in newest_engines()
            for status in backend_statuses(engine.policy, device, packages, installed.libraries)
        ),
        imports=_imports(found) if deep else {},
        torch_view=torch_view() if deep else None,
        peers_refused=peers_refused,
    )
    return replace(report, remarks=remarks_on(report, packages))


def _shown(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """GPUs that a process with `env` may use, or why that cannot be told."""
    try:
        return visible_gpus(gpus, env), ""
    except Unavailable as error:
        return (), error.what


def _peers(env: Mapping[str, str]) -> tuple[tuple[InstalledPackage, ...], str]:
    """What the folder of unpacked libraries has, or why it cannot be told."""
    try:
        return find_peers(peers_folder(env)), ""
    except UsageError as error:
        return (), error.what


def _hiding(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> dict[str, str]:
    """Variables that hide or order GPUs, as set."""
    names = [name for gpu in gpus[:1] for name in VISIBILITY[gpu.device.platform]]
    return {name: env[name] for name in (*names, ORDER) if name in env}


def _imports(found: tuple[InstalledPackage, ...]) -> dict[str, str]:
    """Why each package that is installed cannot be imported; empty for one that can."""
    modules = {one.name: one.module for one in found if one.present and one.name not in TOOLS}
    engines = tuple(engine.package for engine in newest_engines() if engine.package)
    modules |= {name: name for name in (*LIBRARIES_TRIED, *engines) if package_folder(name)}
    return {name: try_import(module) for name, module in modules.items()}

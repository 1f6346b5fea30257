"""The checks of `moectl doctor`, one function per subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..capabilities.unpacked_libraries import VARIABLE
from ..environment.gpus import cut_short
from ..environment.installed_packages import unrelated_package
from ..environment.packages import Packages
from ..errors import install_hint
from ..oracle.engine import Engine
from ..oracle.registry import answering_engines, known_packages
from .doctor_report import NOTE, PROBLEM, WARNING, DoctorRemark, DoctorReport
from .kernel_caches import ENOUGH_SPACE, JOB_BYTES


def remarks_on(report: DoctorReport, packages: Packages) -> tuple[DoctorRemark, ...]:
    """Every remark on `report`, problems first, then warnings.

    `packages` are the packages that decisions depend on.
    """
    remarks = [remark for check in CHECKS for remark in check(report, packages)]
    return tuple(sorted(remarks, key=lambda remark: (PROBLEM, WARNING, NOTE).index(remark.level)))


def _driver(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    if report.driver_failure:
        yield DoctorRemark(
            PROBLEM,
            "driver",
            report.driver_failure,
            "repair the driver: until nvidia-smi lists the GPUs, nothing can use them",
        )
    for warning in report.driver_warnings:
        yield DoctorRemark(WARNING, "driver", warning)


def _gpus(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    if report.refused:
        yield DoctorRemark(PROBLEM, "GPUs", report.refused)
    elif ignored := cut_short(report.gpus, report.hidden_by):
        names = ", ".join(name for name in report.hidden_by if name != "CUDA_DEVICE_ORDER")
        yield DoctorRemark(PROBLEM, "GPUs", f"{names} lists {', '.join(ignored)}, ignored: no such GPU")
    for gpu in report.gpus:
        if gpu.remark:
            fix = "nvidia-smi mig -cgi ... -C" if gpu.mig else ""
            yield DoctorRemark(PROBLEM, "GPUs", f"GPU {gpu.index}: {gpu.remark}", fix)
    if report.driver_failure:
        return
    if not report.gpus:
        yield DoctorRemark(NOTE, "GPUs", "no GPU was found: decisions are made for the CPU")
    elif not report.shown and not report.refused:
        settings = ", ".join(f"{name}={value!r}" for name, value in report.hidden_by.items())
        yield DoctorRemark(NOTE, "GPUs", f"every GPU is hidden by {settings}")
    kinds = {gpu.device.name for gpu in report.gpus}
    by_name = any(value.startswith(("GPU-", "MIG-")) for value in report.hidden_by.values())
    nvidia = any(gpu.device.platform == "cuda" for gpu in report.gpus)
    if nvidia and len(kinds) > 1 and not by_name and "CUDA_DEVICE_ORDER" not in report.hidden_by:
        yield DoctorRemark(
            NOTE,
            "GPUs",
            "the GPUs differ, and CUDA numbers them by speed, nvidia-smi and moectl by PCI bus ID",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _torch(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    software = report.software
    if not software.torch_built:
        yield _without_torch(report)
        return
    device = report.device
    platform = {"cuda": "cuda", "rocm": "hip", "xpu": "xpu"}.get(device.platform, "") if device else ""
    if device and platform and not software.torch_built.startswith(platform):
        yield DoctorRemark(
            PROBLEM,
            "torch",
            f"torch {software.libraries.get('torch', '')} is built for {software.torch_built}, "
            f"the device is {device.name}",
            f"install a build of torch for {platform}",
        )
    if _newer(software.torch_cuda, report.driver_cuda):
        yield DoctorRemark(
            PROBLEM,
            "driver",
            f"driver {report.driver} supports CUDA up to {report.driver_cuda}, torch is built with "
            f"{software.torch_cuda}",
            "update the driver, or install a build of torch for an older CUDA",
        )


def _without_torch(report: DoctorReport) -> DoctorRemark:
    """A problem where an engine is installed, which needs torch; else moectl is installed without `run`."""
    for engine in answering_engines():
        if engine.package and report.engine_version(engine) is not None:
            says = f"torch is not installed, and {engine.title} cannot run without it"
            return DoctorRemark(PROBLEM, "torch", says, "pip install torch")
    return DoctorRemark(
        NOTE,
        "torch",
        "torch is not installed: explain, list, compare, convert --dry-run and doctor work without it; run, "
        "bench, tune and convert need it",
        install_hint("run"),
    )


def _newer(built: str, driver: str) -> bool:
    """True if CUDA `built` has a higher major version than the driver's; minor versions are compatible."""
    return bool(built and driver) and int(built.split(".")[0]) > int(driver.split(".")[0])


def _engine(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    for engine in answering_engines():
        installed = report.engine_version(engine)
        if engine.package and installed is None:
            says = f"{engine.title} is not installed: its backends are judged by its rules alone"
            yield DoctorRemark(NOTE, engine.package, says)
        elif installed is not None and (warning := engine.other_version(installed)):
            yield DoctorRemark(WARNING, engine.package, warning)


def _packages(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    probes = known_packages()
    for package in report.packages:
        probe = probes.get(package.name)
        if probe is None:
            continue
        if package.wrong:
            yield DoctorRemark(
                PROBLEM,
                package.name,
                unrelated_package(package),
                f"pip uninstall {package.name}; the real one: {probe.get}",
            )
        lacks = [symbol for symbol in package.lacks if symbol not in probe.own]
        if lacks:
            yield DoctorRemark(
                PROBLEM,
                package.name,
                f"{package.name} {package.version} lacks {', '.join(lacks)}",
                f"update it: {probe.get}",
            )


def _peers(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    if report.peers_refused:
        yield DoctorRemark(
            PROBLEM,
            VARIABLE,
            report.peers_refused,
            f"unset {VARIABLE}, or set it to a directory (docs/environment.md); other commands fail",
        )


def _deep(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    for name, why in report.imports.items():
        if why:
            yield DoctorRemark(PROBLEM, name, f"{name} is installed but cannot be imported: {why}")
    view, usable = report.torch_view, [gpu for gpu in report.shown if not gpu.remark]
    if view is not None and usable and view.devices == 0 and not report.imports.get("torch"):
        why = f": {view.error}" if view.error else ""
        yield DoctorRemark(
            PROBLEM, "torch", f"torch sees no device, but the driver shows {len(usable)} to this process{why}"
        )


def _compiled_kernels(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    for engine in answering_engines():
        yield from _not_compiled(engine, report, packages)


def _not_compiled(engine: Engine, report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    for row in engine.compiled_kernels:
        if packages.has(row.package) and not row.need.met(packages):
            lacking = " and ".join(name for name in row.need.instead if not packages.has(name))
            yield DoctorRemark(
                PROBLEM,
                row.package,
                f"{row.title} has neither {row.kernels} nor the means to compile them "
                f"({lacking} missing): {engine.title} uses none of its backends",
                row.get.format(version=report.installed(row.package).version or "VERSION"),
            )


def _flashinfer(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    flashinfer, cubin = report.installed("flashinfer"), report.installed("flashinfer_cubin")
    if cubin.present and cubin.version and flashinfer.version and cubin.version != flashinfer.version:
        yield DoctorRemark(
            PROBLEM,
            "flashinfer",
            f"flashinfer-cubin {cubin.version} does not belong to flashinfer {flashinfer.version} and is "
            "ignored: kernels are downloaded or compiled when they are first called",
            f"pip install flashinfer-cubin=={flashinfer.version}",
        )


def _caches(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    for cache in report.caches:
        if not cache.writable:
            yield DoctorRemark(
                PROBLEM,
                "caches",
                f"{cache.name} cannot write to {cache.path}: it compiles its kernels at every start",
                f"set {cache.variable} to a writable directory",
            )
        elif cache.free < ENOUGH_SPACE:
            yield DoctorRemark(
                PROBLEM,
                "caches",
                f"{cache.free / 1e9:.2g} GB of disk are free for {cache.name}'s kernels in {cache.path}",
                f"make room, or set {cache.variable}",
            )
        if cache.remote and cache.there:
            yield DoctorRemark(
                NOTE,
                "caches",
                f"{cache.name}'s kernels are on {cache.filesystem} ({cache.path}): starting is slow",
                f"set {cache.variable} to a local disk",
            )


def _jobs(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    jobs = report.jobs
    compiles = packages.has("nvcc") and packages.has("ninja")
    if compiles and jobs.too_many:
        running = jobs.asked or f"{jobs.cores} (one per core)"
        yield DoctorRemark(
            PROBLEM,
            "compilers",
            f"{running} compilers of {JOB_BYTES >> 30} GiB each would run at once, "
            f"but {jobs.memory / (1 << 30):.0f} GiB are free",
            f"export MAX_JOBS={jobs.safe}",
        )


def _variables(report: DoctorReport, packages: Packages) -> Iterator[DoctorRemark]:
    for finding in report.odd_variables():
        yield DoctorRemark(PROBLEM, "variables", finding.remark)


CHECKS: tuple[Callable[[DoctorReport, Packages], Iterator[DoctorRemark]], ...] = (
    _driver,
    _gpus,
    _torch,
    _engine,
    _packages,
    _peers,
    _deep,
    _compiled_kernels,
    _flashinfer,
    _caches,
    _jobs,
    _variables,
)
"""Every check."""

"""`moectl doctor`: what this machine has for MoE layers, which backends run on it, and what is wrong."""

import os
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from ..errors import ExitCode
from .options import framed, option
from .output import Output, count, gib, size

if TYPE_CHECKING:
    from ..doctor import DoctorReport
    from ..doctor.runnable_backends import BackendStatus
    from ..environment.gpus import Gpu
    from ..environment.installed_packages import InstalledPackage
    from .text_blocks import Block

EXAMPLES = (
    "moectl doctor",
    "moectl doctor -v --md > machine.md",
    "moectl doctor --deep --json",
    "moectl doctor --python /opt/venv/bin/python",
)
MORE = ("Exit code 1 if there is a problem, 0 if there are only notes.",)


@framed("doctor")
def doctor(
    deep: Annotated[
        bool, option("--deep", help="Import each installed package, in its own process.")
    ] = False,
    python: Annotated[
        str | None, option("--python", help="Inspect another environment: PATH/bin/python.")
    ] = None,
    md: Annotated[bool, option("--md", own=True, help="Print markdown, for an issue.")] = False,
    verbose: Annotated[
        bool, option("--verbose", "-v", help="Also show every backend with reasons, paths and caches.")
    ] = False,
    *,
    out: Output,
) -> ExitCode:
    """Check this machine, and which backends can run on it.

    Covers GPUs, driver, packages, caches and environment variables. Without --deep nothing is imported:
    packages are judged by their files.
    """
    from ..doctor import examine
    from ..environment.python_environments import python_environment
    from . import text_blocks

    report = examine(os.environ, deep=deep, where=python_environment(python) if python else None)
    blocks = list(drawn(report, verbose))
    if md and not (out.as_json or out.quiet):
        out.text(text_blocks.markdown(blocks))
    else:
        brief = [f"{remark.about}: {remark.says}" for remark in report.problems]
        out.result(
            report.to_json(), lambda console: text_blocks.draw(blocks, console), brief or "no problems"
        )
    return ExitCode.FOUND if report.problems else ExitCode.DONE


def drawn(report: "DoctorReport", verbose: bool = False) -> "Iterator[Block]":
    """The report as text blocks: problems first, then a summary of the machine; all of it if `verbose`."""
    from .text_blocks import TextLine

    yield from _remarks(report)
    yield from _machine(report, verbose)
    yield from _runnable(report)
    yield from _variables(report)
    if verbose:
        yield from _backends(report)
        yield from _packages(report)
        yield from _caches(report)
    else:
        more = "-v: every backend with reasons, packages with paths, caches of kernels"
        yield TextLine("")
        yield TextLine(more, tone="dim")


def _remarks(report: "DoctorReport") -> "Iterator[Block]":
    from ..doctor import PROBLEM, WARNING
    from .text_blocks import Heading, Listing, ListingEntry, TextLine

    problems = len(report.problems)
    yield Heading(
        count(problems, "problem") if problems else "no problems", 1, tone="wrong" if problems else "good"
    )
    tones = {PROBLEM: "wrong", WARNING: "warning"}
    entries = tuple(
        ListingEntry(
            remark.level,
            f"{remark.about}: {remark.says}",
            (("fix", remark.do),) if remark.do else (),
            strong=remark in report.problems,
            tone=tones.get(remark.level, ""),
        )
        for remark in report.remarks
    )
    yield Listing(entries) if entries else TextLine("Nothing to report.")


def _machine(report: "DoctorReport", verbose: bool) -> "Iterator[Block]":
    from ..environment.gpu_links import link_words
    from .text_blocks import Heading, LabelledValues

    yield Heading("machine")
    host, device = report.host, report.device
    cpu = f"{host.cpu}, {host.machine}, {count(host.cores, 'core')}, {gib(host.memory_bytes)} of RAM"
    rows = [("GPUs" if len(report.gpus) > 1 else "GPU", line) for line in gpu_lines(report)]
    rows += [("GPU links", link_words(report.links))]
    rows += [("limited by", f"{name}={value}") for name, value in report.hidden_by.items()]
    rows += [("CPU", cpu)] if verbose or not rows[0][1] or (device and device.platform == "cpu") else []
    rows += [("decides for", f"{device.name}, {device.arch}")] if device and verbose else []
    rows += [
        ("driver", _driver_words(report)),
        ("system", system_words(report)),
        ("python", " in ".join(filter(None, (report.software.python, report.software.environment)))),
        ("torch", torch_words(report)),
    ]
    rows += [
        ("CUDA", f"toolkit (nvcc) {report.software.cuda_toolkit}" if report.software.cuda_toolkit else "")
    ]
    # A name and its version stay on one line.
    rows += [("software", ", ".join(word.replace(" ", "\u00a0") for word in software_words(report)))]
    if verbose:
        free = f"{gib(report.jobs.memory)} of memory free" if report.jobs.memory else "unknown free memory"
        cores = count(report.jobs.cores, "core")
        rows += [("compilers", f"MAX_JOBS={report.jobs.safe} is safe: {cores}, {free}")]
    yield LabelledValues(tuple(rows))


def _driver_words(report: "DoctorReport") -> str:
    cuda = f", supports CUDA up to {report.driver_cuda}" if report.driver_cuda else ""
    return f"{report.driver}{cuda}" if report.driver else ""


def system_words(report: "DoctorReport") -> str:
    """``Ubuntu 24.04.3 LTS, kernel 6.8.0, x86_64, glibc 2.39, in Docker``."""
    host = report.host
    inside = f"in {host.container}" if host.container else ""
    parts = (host.system, f"kernel {host.kernel}", host.machine, host.libc, inside)
    return ", ".join(filter(None, parts))


def torch_words(report: "DoctorReport") -> str:
    """torch's version, what it was built for, the libraries that it loads, and the devices that it sees."""
    software = report.software
    if not software.torch_built:
        return "not installed"
    built = " ".join(
        part.upper() if part in ("cuda", "hip", "cpu") else part for part in software.torch_built.split()
    )
    parts = [software.libraries.get("torch", "unknown version"), f"built for {built}"]
    parts += [f"{name} {version}" for name, version in software.torch_libraries.items()]
    parts += [f"sees {count(report.torch_view.devices, 'device')}"] if report.torch_view else []
    return ", ".join(parts)


def gpu_lines(report: "DoctorReport") -> list[str]:
    """A line for GPUs that are alike: how many, name, architecture, memory, and whether they are hidden.

    GPUs that differ begin with their numbers: ``0-3: 4x NVIDIA H100 80GB HBM3, sm90, 79.6 GiB``.
    """

    def words(gpu: "Gpu") -> str:
        hidden = "" if gpu in report.shown else ", hidden from this process"
        return f"{gpu.device.name}, {gpu.device.arch}, {memory_words(gpu)}{hidden}"

    groups = [(text, list(alike)) for text, alike in groupby(report.gpus, words)]
    lines = []
    for text, alike in groups:
        number = f"{len(alike)}x " if len(alike) > 1 else ""
        ends = dict.fromkeys((alike[0].index, alike[-1].index))
        which = f"{'-'.join(ends)}: " if len(groups) > 1 else ""
        lines.append(f"{which}{number}{text}")
    return lines


def memory_words(gpu: "Gpu") -> str:
    """A GPU's memory as its driver counts it, and as it is sold if that number is another."""
    from ..environment.named_devices import nominal_memory

    nbytes = gpu.device.memory_bytes
    if not nbytes:
        return "memory unknown"
    sold = nominal_memory(gpu.device.name)
    return gib(nbytes) + (f" (sold as {sold} GB)" if sold and sold != round(nbytes / 2**30) else "")


def software_words(report: "DoctorReport") -> list[str]:
    """Installed software with versions, without torch: ``moectl 0.1.0``, ``triton 3.6.0``, ..."""
    libraries = {name: version for name, version in report.software.libraries.items() if name != "torch"}
    packages = {package.name: package.version for package in report.packages if package.present}
    named = {"moectl": report.software.moectl, **libraries, **packages}
    # Engines ask for some packages by the names of their modules.
    once = {name.replace("_", "-").removeprefix("nvidia-"): name for name in reversed(named)}
    return [
        f"{name} {version}".rstrip()
        for name, version in named.items()
        if name != "nvcc" and name in once.values()
    ]


def _runnable(report: "DoctorReport") -> "Iterator[Block]":
    """Which backends can run, with a column for each weight format, and what others for this device lack."""
    from ..oracle.backend import UNTRIED
    from .text_blocks import Heading, LabelledValues, TableBlock, TextLine

    running = [status for status in report.backends if status.runs]
    formats = sorted({format for status in running for format in weight_formats(status)} - {ANY})
    arch = report.device.arch if report.device else ""
    for policy, statuses in groupby(running, key=lambda status: status.policy):
        yield Heading(f"backends of {policy} that run on {arch}, by weight format")
        yield TableBlock(
            ("backend", *formats),
            tuple(
                (
                    f"{status.name}{' *' if status.untried else ''}",
                    *("yes" if {format, ANY} & set(weight_formats(status)) else "-" for format in formats),
                )
                for status in statuses
            ),
        )
    if any(status.untried for status in running):
        yield TextLine(f"  *: {UNTRIED}.", tone="dim")
    lacking: dict[str, list[str]] = {}
    for status in report.backends:
        if not status.runs and not status.elsewhere:
            # Engines have backends of the same name, and another engine's may run.
            another = any(status.name == other.name for other in running)
            name = f"{status.name} ({status.policy})" if another else status.name
            lacking.setdefault(_wanting(status), []).append(name)
    if lacking:
        yield Heading(f"other backends for {arch}")
        yield LabelledValues(
            tuple((", ".join(dict.fromkeys(names)), reason) for reason, names in lacking.items())
        )


def _wanting(status: "BackendStatus") -> str:
    """Why a backend cannot run, in brief: packages that are not installed by name, else in sentences."""
    absent = [verdict for verdict in status.against if verdict.offered == "not installed"]
    if absent and len(absent) == len(status.against):
        names = dict.fromkeys(verdict.question.partition(" ")[2] for verdict in absent)
        return f"not installed: {', '.join(names)}"
    return "; ".join(text for _, text in against(status))


ANY = "any format"
"""The row of backends that support every weight format."""


def weight_formats(status: "BackendStatus") -> list[str]:
    """The number formats of weights that a backend can run: ``fp8``, ``int4``; `ANY` for all."""
    return list(dict.fromkeys(format.split(" ")[0].rstrip("*") for format in status.formats)) or [ANY]


def _backends(report: "DoctorReport") -> "Iterator[Block]":
    from ..oracle.backend import UNTRIED
    from .text_blocks import Heading, Listing, ListingEntry

    device = report.device
    for policy in dict.fromkeys(status.policy for status in report.backends):
        yield Heading(f"backends of {policy} on {device.arch if device else 'this machine'}")
        yield Listing(
            tuple(
                ListingEntry(
                    "yes" if status.runs else "no",
                    f"{status.name}: {', '.join(status.formats) or ANY}"
                    f"{f' ({UNTRIED})' if status.untried else ''}"
                    if status.runs
                    else status.name,
                    against(status),
                    tone="" if status.runs else "dim",
                )
                for status in report.backends
                if status.policy == policy
            )
        )


def against(status: "BackendStatus") -> tuple[tuple[str, str], ...]:
    """(group, sentence) for each distinct reason why a backend cannot run."""
    from ..oracle.verdict_sentences import sentence

    reasons: dict[str, tuple[str, str]] = {}
    for verdict in status.against:
        # A missing package is a single reason, whichever of its symbols are needed.
        name = verdict.question.partition(" ")[2]
        absent = verdict.offered == "not installed" and verdict.wanted.startswith(f"{name}.")
        reason = verdict._replace(wanted=name) if absent else verdict
        reasons.setdefault(sentence(reason), (reason.group, sentence(reason)))
    return tuple(reasons.values())


def _packages(report: "DoctorReport") -> "Iterator[Block]":
    from .text_blocks import Heading, Listing, ListingEntry, TextLine

    yield Heading("optional packages and tools")
    listed = [package for package in report.packages if package.present or package.wrong]
    yield Listing(
        tuple(
            ListingEntry(
                _state(report, package),
                " ".join(filter(None, (package.name, package.version))),
                (("path", package.path or package.wrong),),
                tone="wrong" if package.wrong or package.lacks or report.imports.get(package.name) else "",
            )
            for package in listed
        )
    )
    missing = [package.name for package in report.packages if package not in listed]
    if missing:
        yield TextLine(f"Not installed: {', '.join(missing)}.")


def _state(report: "DoctorReport", package: "InstalledPackage") -> str:
    if package.wrong:
        return "a different package of that name"
    if report.imports.get(package.name):
        return "cannot be imported"
    if package.lacks:
        return f"lacks {count(len(package.lacks), 'symbol')}"
    return "imports" if package.name in report.imports else "found"


def _variables(report: "DoctorReport") -> "Iterator[Block]":
    from .text_blocks import Heading, Listing, ListingEntry

    if report.variables:
        yield Heading("environment variables of engines")
        yield Listing(
            tuple(
                ListingEntry(
                    finding.verdict,
                    f"{finding.name}={finding.value}{f': {finding.does}' if finding.does else ''}",
                    (("why", finding.remark),) if finding.remark else (),
                )
                for finding in report.variables
            )
        )


def _caches(report: "DoctorReport") -> "Iterator[Block]":
    from .text_blocks import Heading, Listing, ListingEntry, TextLine

    yield Heading("caches of compiled kernels")
    shown = [cache for cache in report.caches if cache.there]
    yield Listing(
        tuple(
            ListingEntry(
                "",
                f"{cache.name}: {'' if cache.counted else 'over '}{count(cache.files, 'file')}, "
                f"{size(cache.nbytes)}, {size(cache.free)} of disk free"
                f"{'' if cache.writable else ', not writable'}",
                (("path", cache.path),),
                tone="" if cache.writable else "wrong",
            )
            for cache in shown
        )
    )
    missing = [cache.name for cache in report.caches if cache not in shown]
    if missing:
        yield TextLine(f"Not created yet: {', '.join(missing)}.")

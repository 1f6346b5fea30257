"""`moectl doctor`: what this machine has for MoE layers, which backends run on it, and what is wrong."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ..errors import ExitCode
from .options import framed, option
from .output import Output, count, size

if TYPE_CHECKING:
    from ..doctor import DoctorReport
    from ..doctor.runnable_backends import BackendStatus
    from ..environment.installed_packages import InstalledPackage
    from .text_blocks import Block

EXAMPLES = (
    "moectl doctor",
    "moectl doctor -v --md > machine.md",
    "moectl doctor --deep --json",
)
MORE = ("Exit code 1 if there is a problem, 0 if there are only notes.",)


@framed("doctor")
def doctor(
    deep: Annotated[
        bool, option("--deep", help="Import each installed package, in its own process.")
    ] = False,
    md: Annotated[bool, option("--md", own=True, help="Print markdown, for an issue.")] = False,
    verbose: Annotated[
        bool, option("--verbose", "-v", help="Also show what is missing, and backends for other devices.")
    ] = False,
    *,
    out: Output,
) -> ExitCode:
    """Check this machine, and which backends can run on it.

    Covers GPUs, driver, packages, caches and environment variables. Without --deep nothing is imported:
    packages are judged by their files.
    """
    from ..doctor import examine
    from . import text_blocks

    report = examine(os.environ, deep=deep)
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
    """The report as text blocks: problems first, then the inventory."""
    yield from _remarks(report)
    yield from _machine(report)
    yield from _backends(report, verbose)
    yield from _packages(report, verbose)
    yield from _variables(report)
    yield from _caches(report, verbose)


def _remarks(report: "DoctorReport") -> "Iterator[Block]":
    from .text_blocks import Heading, Listing, ListingEntry, TextLine

    problems = len(report.problems)
    yield Heading(count(problems, "problem") if problems else "no problems", 1)
    entries = tuple(
        ListingEntry(
            remark.level,
            f"{remark.about}: {remark.says}",
            (("fix", remark.do),) if remark.do else (),
            strong=remark in report.problems,
        )
        for remark in report.remarks
    )
    yield Listing(entries) if entries else TextLine("Nothing to report.")


def _machine(report: "DoctorReport") -> "Iterator[Block]":
    from .text_blocks import Heading, LabelledValues

    yield Heading("machine")
    device = report.device
    chosen = f"{device.name}, {device.arch}: decisions are made for it" if device else "unknown"
    rows = [("device", chosen)]
    rows += [("GPUs", line) for line in gpu_lines(report)]
    rows += [("limited by", f"{name}={value}") for name, value in report.hidden_by.items()]
    cuda = f", supports CUDA up to {report.driver_cuda}" if report.driver_cuda else ""
    rows += [
        ("driver", f"{report.driver}{cuda}" if report.driver else ""),
        ("software", ", ".join(software_words(report))),
        ("torch", _torch_words(report)),
        (
            "compilers",
            f"MAX_JOBS={report.jobs.safe} is safe: {count(report.jobs.cores, 'core')}, "
            f"{size(report.jobs.memory) if report.jobs.memory else 'unknown amount'} of memory free",
        ),
    ]
    yield LabelledValues(tuple(rows))


def _torch_words(report: "DoctorReport") -> str:
    built = report.software.torch_built
    seen = f", sees {count(report.torch_view.devices, 'device')}" if report.torch_view else ""
    return f"built for {built}{seen}" if built else "not installed"


def gpu_lines(report: "DoctorReport") -> list[str]:
    """A line per GPU: number, name, architecture, memory, and whether it is hidden from this process."""
    return [
        f"{gpu.index}: {gpu.device.name}, {gpu.device.arch}, "
        f"{size(gpu.device.memory_bytes) if gpu.device.memory_bytes else 'memory unknown'}"
        f"{'' if gpu in report.shown else ', hidden'}"
        for gpu in report.gpus
    ]


def software_words(report: "DoctorReport") -> list[str]:
    """Installed software with versions: ``python 3.11.7``, ``torch 2.13.0``, ..."""
    software = report.software
    named = {"moectl": software.moectl, "python": software.python, **software.libraries}
    return [*(f"{name} {version}" for name, version in named.items()), software.system]


def _backends(report: "DoctorReport", verbose: bool) -> "Iterator[Block]":
    from ..oracle.backend import UNTRIED
    from .text_blocks import Heading, Listing, ListingEntry, TextLine

    device = report.device
    for policy in dict.fromkeys(status.policy for status in report.backends):
        of_policy = [status for status in report.backends if status.policy == policy]
        yield Heading(f"backends of {policy} on {device.arch if device else 'this machine'}")
        listed = [status for status in of_policy if verbose or not status.elsewhere]
        yield Listing(
            tuple(
                ListingEntry(
                    "yes" if status.runs else "no",
                    f"{status.name}: {', '.join(status.formats) or 'any format'}"
                    f"{f' ({UNTRIED})' if status.untried else ''}"
                    if status.runs
                    else status.name,
                    against(status),
                )
                for status in listed
            )
        )
        others = [status.name for status in of_policy if status not in listed]
        if others:
            yield TextLine(f"For other devices: {', '.join(others)} (-v lists their reasons).")


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


def _packages(report: "DoctorReport", verbose: bool) -> "Iterator[Block]":
    from .text_blocks import Heading, TableBlock, TextLine

    yield Heading("optional packages and tools")
    listed = [package for package in report.packages if verbose or package.present or package.wrong]
    if listed:
        rows = tuple(
            (
                package.name,
                package.version or "-",
                _state(report, package),
                package.path or package.wrong or "-",
            )
            for package in listed
        )
        yield TableBlock(("package", "version", "state", "path"), rows)
    missing = [package.name for package in report.packages if package not in listed]
    if missing:
        yield TextLine(f"Not installed: {', '.join(missing)}.")


def _state(report: "DoctorReport", package: "InstalledPackage") -> str:
    if package.wrong:
        return "a different package of that name"
    if not package.present:
        return "not installed"
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


def _caches(report: "DoctorReport", verbose: bool) -> "Iterator[Block]":
    from .text_blocks import Heading, TableBlock, TextLine

    yield Heading("compiled kernels")
    shown = [cache for cache in report.caches if verbose or cache.there]
    rows = tuple(
        (
            cache.name,
            str(cache.files) if cache.counted else f"over {cache.files}",
            size(cache.nbytes) if cache.there else "-",
            size(cache.free),
            "yes" if cache.writable else "no",
            cache.path,
        )
        for cache in shown
    )
    if rows:
        columns = ("cache", "files", "size", "free", "writable", "path")
        yield TableBlock(columns, rows, frozenset({"files", "size", "free"}))
    missing = [cache.name for cache in report.caches if cache not in shown]
    if missing:
        yield TextLine(f"Not created yet: {', '.join(missing)}.")

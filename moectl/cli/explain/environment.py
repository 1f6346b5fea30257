"""The environment section: engine variables, packages, tuned files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...environment import Packages
from ...environment.installed_packages import distribution_version
from ...environment.variables import VariableFinding
from ...explain import Explanation
from ...files.records import to_json
from ...oracle.decision import Decision
from ...oracle.registry import engine_named, known_packages
from ...oracle.tuned_files import TunedFiles, TunedStatus, tuned_status
from ...problem.layer_ranges import layers_of
from ..text_blocks import Block, Heading, LabelledValues


def environment_blocks(explanation: Explanation) -> Iterator[Block]:
    """Findings about variables and packages, and the tuned-file status."""
    rows = [
        (finding.verdict, finding_words(finding))
        for finding in variables(explanation.policy, explanation.packages)
    ]
    rows += [("package", sentence) for sentence in package_sentences(explanation)]
    rows += [("tuned files", sentence) for sentence in tuned_sentences(explanation)]
    rows += [("tuned files", sentence) for sentence in file_sentences(explanation)]
    if rows:
        yield Heading("environment")
        yield LabelledValues(tuple(rows))


def environment_document(explanation: Explanation) -> dict[str, Any]:
    """The same as plain data."""
    files = engine_named(explanation.policy).tuned_files
    return {
        "variables": [to_json(finding) for finding in variables(explanation.policy, explanation.packages)],
        "packages": list(package_sentences(explanation)),
        "tuned": [
            {"layers": list(group.layers), **status.to_json(), "remark": _file_remark(status, files) or None}
            for group, status in zip(explanation.groups, _statuses(explanation), strict=True)
        ],
    }


def variables(policy: str, packages: Packages) -> tuple[VariableFinding, ...]:
    """A finding for each variable of the policy's engine that is set."""
    return engine_named(policy).judge(packages.env)


def notes_of(decision: Decision) -> tuple[str, ...]:
    """The notes of a decision except those about variables, which this section shows."""
    remarks = {finding.remark for finding in variables(decision.inputs.policy, decision.inputs.packages)}
    return tuple(note for note in decision.notes if note not in remarks)


def finding_words(finding: VariableFinding) -> str:
    """The remark, or what the variable does and how its value is read."""
    if finding.remark:
        return finding.remark
    means = f" ({finding.means})" if finding.means else ""
    return f"{finding.name}={finding.value}: {finding.does}{means}"


def package_sentences(explanation: Explanation) -> Iterator[str]:
    """Problems of the packages that a decision depends on."""
    packages = explanation.packages
    yield from packages.remarks
    for row in engine_named(explanation.policy).compiled_kernels:
        if packages.has(row.package) and not row.need.met(packages):
            yield (
                f"{row.title} has neither {row.kernels} nor {' and '.join(row.need.instead)} to compile "
                "them: none of its backends can be used"
            )
    lacking: dict[str, list[str]] = {}
    for entry in sorted(packages.missing):
        name, _, symbol = entry.partition(":")
        lacking.setdefault(name, []).append(symbol)
    for name, symbols in lacking.items():
        version = packages.versions.get(name, "")
        if "" in symbols:
            oldest = known_packages()[name].oldest if name in known_packages() else ""
            yield f"{name} {version} is too old: its backends need {oldest or 'a newer version'}"
        else:
            yield f"{name} {version} lacks {', '.join(symbols)}"


def _statuses(explanation: Explanation) -> list[TunedStatus]:
    files = engine_named(explanation.policy).tuned_files
    folders = files.listed(explanation.packages.env) if files else {}
    return [tuned_status(group.decision, files, folders) for group in explanation.groups]


def tuned_sentences(explanation: Explanation) -> Iterator[str]:
    """The tuned-file status of each layer group; equal ones are merged."""
    files = engine_named(explanation.policy).tuned_files
    layers_by_sentence: dict[str, list[int]] = {}
    for group, status in zip(explanation.groups, _statuses(explanation), strict=True):
        if group.decision.chosen is not None:
            layers_by_sentence.setdefault(tuned_sentence(status, files), []).extend(group.layers)
    for sentence, layers in layers_by_sentence.items():
        prefix = f"{layers_of(layers)}: " if len(layers_by_sentence) > 1 else ""
        yield prefix + sentence


def untuned_words(explanation: Explanation) -> str:
    """That a chosen kernel finds no tuned file, and what makes one; empty if none is missing."""
    engine = engine_named(explanation.policy)
    missing = [
        status for status in _statuses(explanation) if status.reads and not (status.found or status.why)
    ]
    if engine.tuned_files is None or not missing:
        return ""
    name = missing[0].wanted
    makes = (
        f"; moectl tune --to {engine.family} writes one" if name and engine.tuned_files.kernel(name) else ""
    )
    return (
        f"no file for this GPU and shape: {engine.title} warns and uses its default kernel config, "
        f"which is not an error{makes}"
    )


def file_sentences(explanation: Explanation) -> Iterator[str]:
    """Warnings about tuned files in a user's directory, each once."""
    files = engine_named(explanation.policy).tuned_files
    yield from dict.fromkeys(filter(None, (_file_remark(status, files) for status in _statuses(explanation))))


def _file_remark(status: TunedStatus, files: TunedFiles | None) -> str:
    if files is None or status.found in ("", files.shipped):
        return ""
    return files.remark(Path(status.found) / str(status.wanted), distribution_version("triton"))


def tuned_sentence(status: TunedStatus, files: TunedFiles | None) -> str:
    """The tuned-file status of one decision: found, missing with near misses, or not read at all."""
    if files is None or not status.reads:
        return status.why
    when = f"{status.why}, " if status.why else ""
    if status.found:
        return f"{when}{status.wanted} is used (found in {status.found})"
    near = []
    if status.other_gpus:
        near.append(f"the same shape is tuned for {', '.join(name.gpu for name in status.other_gpus)}")
    if status.other_shapes:
        shapes = ", ".join(name.shape for name in status.other_shapes)
        near.append(f"this GPU has {shapes}")
    also = f"; {', and '.join(near)}" if near else ""
    directories = ", ".join(status.folders)
    return (
        f"{when}{status.wanted} not found (in {directories}): the default kernel config is used, "
        f"which is not an error{also}. Set {files.variable} to a directory that has it"
    )

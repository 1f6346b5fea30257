"""What of the environment bears on a decision: engine variables, packages, tuned files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...environment import Packages
from ...environment.installed import distribution_version
from ...environment.variables import SET, Finding, judge_variables
from ...environment.vllm_0_33_0 import other_names
from ...explain import Explanation
from ...oracle.backends.flashinfer import KERNELS
from ...oracle.decision import Decision
from ...oracle.registry import policy_named
from ...ranges import ranges
from ...tuned import FOLDER, SHIPPED, TunedStatus, file_remark, listed_folders, tuned_status
from ..text_blocks import Block, Facts, Heading


def environment_blocks(explanation: Explanation, verbose: bool) -> Iterator[Block]:
    """What is odd about variables and packages, and how tuned files stand; what is set with `verbose`."""
    rows = [
        (finding.verdict, _told(finding))
        for finding in variables(explanation.policy, explanation.packages)
        if verbose or finding.verdict != SET
    ]
    rows += [("package", sentence) for sentence in package_sentences(explanation)]
    rows += [("tuned files", sentence) for sentence in tuned_sentences(explanation)]
    rows += [("tuned files", sentence) for sentence in file_sentences(explanation)]
    if rows:
        yield Heading("environment")
        yield Facts(tuple(rows))


def environment_document(explanation: Explanation) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "variables": [finding.to_json() for finding in variables(explanation.policy, explanation.packages)],
        "packages": list(package_sentences(explanation)),
        "tuned": [
            {"layers": list(group.layers), **status.to_json(), "remark": _file_remark(status) or None}
            for group, status in zip(explanation.groups, _statuses(explanation), strict=True)
        ],
    }


def variables(policy: str, packages: Packages) -> tuple[Finding, ...]:
    """What the policy's engine makes of each variable that is set; nothing for a policy without an engine."""
    known = policy_named(policy).variables
    if not known:
        return ()
    return judge_variables(packages.env, known, policy, others=other_names())


def notes_of(decision: Decision) -> tuple[str, ...]:
    """The notes of a decision, without what this section says of variables."""
    told = {finding.remark for finding in variables(decision.inputs.policy, decision.inputs.packages)}
    return tuple(note for note in decision.notes if note not in told)


def _told(finding: Finding) -> str:
    """The remark; else what the variable is for and how it is read."""
    if finding.remark:
        return finding.remark
    means = f" ({finding.means})" if finding.means else ""
    return f"{finding.name}={finding.value}: {finding.does}{means}"


def package_sentences(explanation: Explanation) -> Iterator[str]:
    """What is wrong with the packages that a decision counts on."""
    packages = explanation.packages
    yield from packages.remarks
    if packages.has("flashinfer") and not KERNELS.met(packages):
        yield (
            "FlashInfer has neither compiled kernels (flashinfer-cubin) nor nvcc and ninja to compile "
            "them: none of its backends is used"
        )
    lacking: dict[str, list[str]] = {}
    for entry in sorted(packages.missing):
        name, _, symbol = entry.partition(":")
        lacking.setdefault(name, []).append(symbol)
    for name, symbols in lacking.items():
        yield f"{name} {packages.versions.get(name, '')} lacks {', '.join(symbols)}"


def _statuses(explanation: Explanation) -> list[TunedStatus]:
    folders = listed_folders(explanation.packages.env)
    return [tuned_status(group.decision, folders) for group in explanation.groups]


def tuned_sentences(explanation: Explanation) -> Iterator[str]:
    """One sentence for each layer group whose choice looks for a file; equal ones stand once."""
    found: dict[str, list[int]] = {}
    for group, status in zip(explanation.groups, _statuses(explanation), strict=True):
        if group.decision.chosen is not None:
            found.setdefault(tuned_sentence(status), []).extend(group.layers)
    for sentence, layers in found.items():
        where = f"layers {ranges(tuple(sorted(layers)))}: " if len(found) > 1 else ""
        yield where + sentence


def file_sentences(explanation: Explanation) -> Iterator[str]:
    """What is odd about the tuned files that are read from a user's folder, each once."""
    yield from dict.fromkeys(filter(None, map(_file_remark, _statuses(explanation))))


def _file_remark(status: TunedStatus) -> str:
    if status.found in ("", SHIPPED):
        return ""
    return file_remark(Path(status.found) / str(status.wanted), distribution_version("triton"))


def tuned_sentence(status: TunedStatus) -> str:
    """How tuned files stand for one decision: found, missing with near misses, or not read at all."""
    if not status.reads:
        return status.why
    when = f"{status.why}, " if status.why else ""
    if status.found:
        return f"{when}{status.wanted} is read (found in {status.found})"
    near = []
    if status.other_gpus:
        near.append(f"the same shape is tuned for {', '.join(name.gpu for name in status.other_gpus)}")
    if status.other_shapes:
        shapes = ", ".join(f"E={name.experts},N={name.size}" for name in status.other_shapes)
        near.append(f"this GPU has {shapes}")
    also = f"; {', and '.join(near)}" if near else ""
    places = ", ".join(status.folders)
    return (
        f"{when}{status.wanted} is looked for and missing (in {places}): default launch choices are used, "
        f"which is no error{also}. A folder named by {FOLDER} may hold it"
    )

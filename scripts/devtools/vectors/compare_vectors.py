"""Bit-for-bit comparison of recorded conversions with moectl's layouts.

Every input of a recording must be used and every output compared, and restoring must reproduce the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from moectl.convert.steps.value_steps import Statistics
from moectl.errors import MoectlError, UsageError

from .recorded_cases import Deviation, RecordedCase, case_of, function_of
from .recorded_packings import PACKINGS, compare_packings
from .recordings import Mismatch, Recording, Unsupported, read_recording


class VectorStatus(Enum):
    """The result of checking a recording."""

    PASS = "PASS"
    DEVIATION = "DEVIATION"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"

    @property
    def good(self) -> bool:
        """True when moectl is correct: equal, or different for a listed reason."""
        return self in (VectorStatus.PASS, VectorStatus.DEVIATION)


@dataclass(frozen=True)
class VectorOutcome:
    """The result for one recording; `reason` says what was compared, or what differs."""

    file: str
    status: VectorStatus
    reason: str


def check_file(path: Path) -> VectorOutcome:
    """The result for the recording in `path`."""
    try:
        recording = read_recording(path)
        status, reason = _judge(recording)
    except Unsupported as error:
        status, reason = VectorStatus.UNSUPPORTED, f"no layout here for {error}"
    except (Mismatch, MoectlError) as error:
        status, reason = VectorStatus.FAIL, str(error)
    return VectorOutcome(path.name, status, reason)


def check_folder(folder: Path) -> list[VectorOutcome]:
    """The results for all ``*.safetensors`` of `folder`, by name; UsageError when there are none."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a directory.", hint="Give a directory of recorded conversions.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no recorded conversions (*.safetensors).")
    return [check_file(path) for path in files]


def total(outcomes: list[VectorOutcome]) -> str:
    """One line: how many recordings there are, and how many of each status."""
    counts = {status: sum(o.status is status for o in outcomes) for status in VectorStatus}
    parts = ", ".join(f"{count} {status.value}" for status, count in counts.items())
    return f"{len(outcomes)} recordings: {parts}"


def _judge(recording: Recording) -> tuple[VectorStatus, str]:
    packing = PACKINGS.get(function_of(recording))
    if packing is not None:
        return VectorStatus.PASS, compare_packings(recording, packing(recording))
    return _compare(recording, case_of(recording))


def _compare(recording: Recording, case: RecordedCase) -> tuple[VectorStatus, str]:
    """Converts the layer and back, and compares both with the recording; Mismatch at the first difference."""
    uncompared = set(recording.outputs) - set(case.names.values())
    if uncompared:
        raise Mismatch(f"tensors that are not compared: {', '.join(sorted(uncompared))}")
    recipe, deviations = case.recipe, list[Deviation]()
    statistics = recipe.update_statistics(case.canonical, {})
    stored = dict(recipe.store(case.canonical, statistics))
    restored = recipe.restore(stored, case.problem.experts)
    for role, t in case.canonical.items():
        if not _same_bytes(restored[role], t):
            raise Mismatch(f"{role}: restoring does not reproduce the input")
    for name, recorded_name in case.names.items():
        output = recording.outputs.get(recorded_name)
        if output is None:
            raise Mismatch(f"{recorded_name}: there is no output to compare with")
        different = _difference(_as_recorded(stored[name], case, name), output, case.labels.get(name, ""))
        if different:
            deviations.append(_deviation(recording, case, name, statistics, output, different))
    if deviations:
        return VectorStatus.DEVIATION, "; ".join(f"{d.name}: {d.why}" for d in deviations)
    return VectorStatus.PASS, f"{len(case.names)} tensors equal, round trip exact"


def _as_recorded(t: Tensor, case: RecordedCase, name: str) -> Tensor:
    return t.flatten(0, 1).unsqueeze(0) if name in case.joined else t


_LABELS = {"F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3": torch.float8_e4m3fn}


def _difference(ours: Tensor, recorded: Tensor, label: str) -> str:
    """How two tensors differ, in words; empty if bytes, shape and dtype are equal."""
    if recorded.dtype not in (ours.dtype, _LABELS.get(label)) or ours.shape != recorded.shape:
        return (
            f"{recorded.dtype} {list(recorded.shape)} is recorded, moectl has {label or ours.dtype} "
            f"{list(ours.shape)}"
        )
    different = _bytes(ours) != _bytes(recorded)
    count = int(different.sum())
    return f"{count} of {different.numel()} bytes differ" if count else ""


def _deviation(
    recording: Recording,
    case: RecordedCase,
    name: str,
    statistics: Statistics,
    output: Tensor,
    different: str,
) -> Deviation:
    """The known deviation that fully explains a difference; Mismatch if there is none."""
    ours = case.recipe.outputs[name]
    for deviation in case.deviations:
        if deviation.role == name and deviation.applies(recording, case.problem):
            theirs = replace(ours, chain=deviation.recorded(case.problem, ours.chain))
            if not _difference(theirs.apply(case.canonical, statistics), output, case.labels.get(name, "")):
                return deviation
    raise Mismatch(f"{name}: {different}")


def _bytes(t: Tensor) -> Tensor:
    return t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))

"""Recorded conversions compared bit for bit with this project's layouts.

Every input of a recording must be used and every output compared, and the way back must give the
inputs again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from ..errors import MoectlError, UsageError
from .canonical import canonical_shapes
from .recordings import (
    OUTPUT_NAMES,
    Case,
    Deviation,
    Mismatch,
    Recording,
    Unsupported,
    case_of,
    read_recording,
)
from .transforms import View, dtype_name


class Status(Enum):
    """What became of a recording."""

    PASS = "PASS"
    DEVIATION = "DEVIATION"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"

    @property
    def good(self) -> bool:
        """True when nothing is wrong here: equal, or different for a listed reason."""
        return self in (Status.PASS, Status.DEVIATION)


@dataclass(frozen=True)
class Outcome:
    """The judgement of one recording; `reason` says what was compared or what is wrong."""

    file: str
    status: Status
    reason: str


def check_file(path: Path) -> Outcome:
    """The judgement of the recording in `path`."""
    try:
        recording = read_recording(path)
        status, reason = _compare(recording, case_of(recording))
    except Unsupported as error:
        status, reason = Status.UNSUPPORTED, f"no layout here for {error}"
    except (Mismatch, MoectlError) as error:
        status, reason = Status.FAIL, str(error)
    return Outcome(path.name, status, reason)


def check_folder(folder: Path) -> list[Outcome]:
    """The judgement of every ``*.safetensors`` in `folder`, by name; UsageError when there is none."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder.", hint="Give a folder of recorded conversions.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no recorded conversions (*.safetensors).")
    return [check_file(path) for path in files]


def total(outcomes: list[Outcome]) -> str:
    """One line: how many recordings there are, and how many of each status."""
    counts = {status: sum(o.status is status for o in outcomes) for status in Status}
    parts = ", ".join(f"{count} {status.value}" for status, count in counts.items())
    return f"{len(outcomes)} recordings: {parts}"


def _compare(recording: Recording, case: Case) -> tuple[Status, str]:
    """Runs every chain forth and back against the recording; Mismatch at the first difference."""
    unused = set(recording.inputs) - set(case.names.values())
    uncompared = set(recording.outputs) - {OUTPUT_NAMES.get(role, role) for role in case.names}
    if unused or uncompared:
        raise Mismatch(f"tensors nobody compares: {', '.join(sorted(unused | uncompared))}")
    found: list[Deviation] = []
    compared = [role for role, name in case.names.items() if name in recording.inputs]
    absent = {role for role in case.names if not role.endswith("_bias")} - set(compared)
    if absent:
        raise Mismatch(f"inputs missing: {', '.join(sorted(absent))}")
    for role in compared:
        chain = case.chains[role]
        canonical = _canonical(recording.inputs[case.names[role]], case, role)
        stored = chain.apply(canonical)
        back = chain.undo(stored, tuple(canonical.shape), dtype_name(canonical.dtype))
        if not _same_bytes(back, canonical):
            raise Mismatch(f"{role}: the way back does not give the input")
        output = recording.outputs.get(OUTPUT_NAMES.get(role, role))
        if output is None:
            raise Mismatch(f"{role}: there is no output to compare with")
        different = _difference(stored, output, case.labels.get(role, ""))
        if different:
            found.append(_deviation(recording, case, role, canonical, output, different))
    if found:
        return Status.DEVIATION, "; ".join(f"{d.name}: {d.why}" for d in found)
    return Status.PASS, f"{len(compared)} tensors equal, and back"


def _canonical(t: Tensor, case: Case, role: str) -> Tensor:
    """An input in its canonical shape: packed words as bytes, blocks of a row joined."""
    if t.dtype is torch.int32:
        t = View("I32", "U8").apply(t)
    if t.dtype in _LABELS.values():
        t = t.view(torch.uint8)
    if role not in ("weight", "scale"):
        shape = canonical_shapes(case.problem, case.problem.experts)[role][0]
        t = t.flatten(2) if t.ndim == 4 else t
        if tuple(t.shape) != shape:
            raise Mismatch(f"{role}: the input is {list(t.shape)}, {list(shape)} expected")
    return t


_LABELS = {"F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3": torch.float8_e4m3fn}


def _difference(ours: Tensor, recorded: Tensor, label: str) -> str:
    """Where two tensors differ, in words; empty when they hold the same bytes under the same names."""
    if recorded.dtype not in (ours.dtype, _LABELS.get(label)) or ours.shape != recorded.shape:
        return (
            f"{recorded.dtype} {list(recorded.shape)} is recorded, moectl has {label or ours.dtype} "
            f"{list(ours.shape)}"
        )
    different = _bytes(ours) != _bytes(recorded)
    count = int(different.sum())
    return f"{count} of {different.numel()} bytes differ" if count else ""


def _deviation(
    recording: Recording, case: Case, role: str, canonical: Tensor, output: Tensor, different: str
) -> Deviation:
    """The listed deviation that explains all of a difference; Mismatch when none does."""
    for known in case.deviations:
        if known.role == role and known.holds(recording):
            theirs = known.recorded(case.problem, case.chains[role]).apply(canonical)
            if not _difference(theirs, output, case.labels.get(role, "")):
                return known
    raise Mismatch(f"{role}: {different}")


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8).reshape(-1)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))

"""The report of a portable output: a fragment per layer during the conversion, then a single document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.access import Access
from ...files.atomic import remove_file, write_file
from ...files.folder_handle import read_inside
from ...files.records import Count, From0, Size, extensible, from_json
from ...files.strict_json import json_bytes, parse_document
from ...problem.layer_ranges import ranges
from ...whole_numbers import whole_number
from ..manifest.manifest_records import REPORT as REPORT
from ..manifest.manifest_records import FileRecord
from ..manifest.signed_document import refuse_long_lists

PART = "moectl-report-part-"

LAYER_KINDS = ("repacked", "decoded", "quantized", "kept")
"""What becomes of a layer's experts: kinds of `FormatChange`, and kept as they are in the source."""


def label_of(layer: int) -> str:
    """The name of a layer in the report; numbers below zero are those of other matrices."""
    return str(layer) if layer >= 0 else f"linears{-1 - layer}"


def part_name(label: str) -> str:
    """Name of the file with one layer's fragment."""
    return f"{PART}{label}.json"


def write_part(folder: Path, label: str, costs: Mapping[str, Any], access: Access) -> None:
    """Writes the fragment of the layer `label`: costs by role."""
    data = json.dumps({"label": label, "roles": dict(costs)}).encode()
    write_file(folder / part_name(label), data, access)


LONGEST_REPORT = 1 << 29
"""Most bytes of a report."""


@dataclass(frozen=True)
class ReportPart:
    """The fragment of a layer in its file."""

    label: str
    roles: Mapping[str, Any]


def read_parts(folder: Path, labels: Iterable[str]) -> dict[str, Any]:
    """Costs by label and role; CheckpointError if a fragment is missing or damaged."""
    costs: dict[str, Any] = {}
    for label in labels:
        path = folder / part_name(label)
        if not path.is_file():
            raise CheckpointError(
                f"{path}, the report of a finished layer, is missing.",
                hint="Convert into an empty directory.",
            )
        part = parse_document(read_inside(folder, part_name(label), LONGEST_REPORT), part_name(label))
        costs[label] = from_json(ReportPart, part, f"{path}: ").roles
    return costs


@dataclass(frozen=True)
class CostTable:
    """The costs of a portable output, by layer and role."""

    layers: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def columns(self) -> tuple[str, ...]:
        """Titles of the columns of `rows`."""
        outputs = ("output SNR dB", "rtn output SNR dB") if self._calibrated else ()
        errors = ("RMS error", "SNR dB", "rtn SNR dB", "worst block")
        return ("layers", "tensor", "became", "lossless", *errors, *outputs)

    @property
    def _calibrated(self) -> bool:
        return any("output_snr_db" in cost for roles in self.layers.values() for cost in roles.values())

    def rows(self) -> Iterator[tuple[str, ...]]:
        """For each kind of change and role as text: its layers, and the errors of the worst of them."""
        found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for label, roles in self.layers.items():
            for role, cost in roles.items():
                found.setdefault((cost["kind"], role), {})[label] = cost
        for (kind, role), by_layer in sorted(found.items(), key=lambda item: LAYER_KINDS.index(item[0][0])):
            costs = list(by_layer.values())
            outputs = _signal_to_noise(costs, "output_snr_db") if self._calibrated else ()
            yield (_layers(by_layer), role, kind, _lossless(costs), *_errors(costs), *outputs)

    def lossless(self, layers: Iterable[int]) -> bool:
        """True if every weight or block of the experts of `layers` kept its value."""
        costs = [cost for layer in layers for cost in self.layers[str(layer)].values()]
        return all("lossless" in c and c["lossless"] == c.get("blocks", c.get("weights")) for c in costs)


def _layers(labels: Iterable[str]) -> str:
    """Ranges of layer numbers; "other" for matrices that are not experts."""
    numbers = [number for label in labels if (number := whole_number(label)) is not None]
    return ranges(numbers) if numbers else "other"


def _lossless(costs: Sequence[Mapping[str, Any]]) -> str:
    exact = sum(cost.get("lossless", 0) for cost in costs)
    for unit in ("blocks", "weights"):
        if "lossless" in costs[0] and unit in costs[0]:
            return f"{exact} of {sum(cost[unit] for cost in costs)} {unit}"
    return ""


def _errors(costs: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    """RMS error, SNR, SNR of round-to-nearest, worst block's error: each of the layer where it is worst."""
    measured = [cost for cost in costs if "rms_error" in cost]
    if not measured:
        return "", "", "", ""
    rms = max(cost["rms_error"] for cost in measured)
    worst = max(cost["worst_block"]["relative_error"] for cost in measured)
    return f"{rms:.3g}", *_signal_to_noise(costs, "snr_db"), f"{worst:.3g}"


def _signal_to_noise(costs: Sequence[Mapping[str, Any]], key: str) -> tuple[str, str]:
    """The lowest `key`, and the lowest of round-to-nearest; empty if nothing was measured."""
    measured = [cost for cost in costs if key in cost]
    if not measured:
        return "", ""
    compared = (measured, [cost["rtn"] for cost in measured])
    least = [min((c[key] for c in costs if c[key] is not None), default=None) for costs in compared]
    ours, nearest = ("exact" if snr is None else f"{snr:.2f}" for snr in least)
    return ours, nearest


REPORT_VERSION = 2
"""Version 1 has no hash of the report itself."""


def report_bytes(report: Mapping[str, Any]) -> bytes:
    """The serialized report, with its version first and the SHA-256 of all else last."""
    document = {"report_version": REPORT_VERSION, **report}
    return json_bytes({**document, "sha256": hashlib.sha256(json_bytes(document)).hexdigest()})


def _is_as_written(data: bytes, report: Mapping[str, Any]) -> bool:
    if report.get("report_version") == 1 and "sha256" not in report:
        return True
    return data == report_bytes({key: value for key, value in report.items() if key not in _OWN})


_OWN = ("report_version", "sha256")


@extensible
@dataclass(frozen=True)
class RecordedBlock:
    """A block of a tensor in a report."""

    relative_error: From0


@extensible
@dataclass(frozen=True)
class RecordedSignal:
    """Ratios of signal to noise in a report; None where nothing was lost."""

    snr_db: float | None = None
    output_snr_db: float | None = None


@extensible
@dataclass(frozen=True)
class RecordedCost(RecordedSignal):
    """What converting one tensor of a layer cost, as far as a `CostTable` shows it."""

    kind: str = ""
    lossless: Size = 0
    blocks: Size = 0
    weights: Size = 0
    rms_error: From0 = 0.0
    worst_block: RecordedBlock = RecordedBlock(0.0)
    rtn: RecordedSignal = RecordedSignal()

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise ValueError(f"its kind is none of {', '.join(LAYER_KINDS)}")


@extensible
@dataclass(frozen=True)
class ReportDocument:
    """A report, as far as it is read back."""

    layers: Mapping[str, Mapping[str, RecordedCost]]
    experts: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...]
    report_version: Count = 1
    sha256: str = ""


def _refused(sentence: str) -> CheckpointError:
    return CheckpointError(sentence, hint="Convert again.")


def read_report(folder: Path) -> dict[str, Any]:
    """The report in `folder`; CheckpointError if it is missing, incomplete, or not as it was written."""
    data = read_inside(folder, REPORT, LONGEST_REPORT, str(folder / REPORT))
    report = parse_document(data, REPORT)
    refuse_long_lists(report, str(folder / REPORT))
    from_json(ReportDocument, report, f"{folder / REPORT}: ", _refused)
    if not _is_as_written(data, report):
        raise CheckpointError(f"{REPORT} of {folder} is not what was written.", hint="Convert again.")
    return report


def remove_parts(folder: Path) -> None:
    """Removes the fragments once the report holds them."""
    for path in folder.glob(f"{PART}*.json"):
        remove_file(path)

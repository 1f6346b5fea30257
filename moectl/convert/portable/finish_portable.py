"""The last files of a portable output: index and report, and finally the config."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoint.source.shards import QUANTIZATION_FILES
from ...errors import CheckpointError, UsageError
from ...files.atomic import write_file
from ...files.records import to_json
from ...files.strict_json import json_bytes
from ..execute.passthrough import copy_small_files
from ..manifest.manifest_records import CONFIG, INDEX, FileRecord, LayerRecord, PassthroughRecord
from ..plan.source_pin import PinnedSource, source_record
from .report_fragments import REPORT, label_of, read_parts, read_report, remove_parts, report_bytes
from .verify_portable import layer_digest, verify_portable

if TYPE_CHECKING:
    from ..plan.conversion_plan import ConversionPlan

STALE = frozenset((*QUANTIZATION_FILES, REPORT))
"""Files of the source that describe its quantization and are not copied."""


@dataclass(frozen=True)
class PortableFinalizer:
    """Finishes a portable output.

    Attributes:
        target, container: as in `PortableOptions`.
        config: the model's config with the new quantization.
        kinds: layers by what becomes of their experts, as in `LAYER_KINDS`.
        served: whether an engine loads the output.
    """

    target: str
    container: str
    config: Mapping[str, Any]
    kinds: Mapping[str, tuple[int, ...]]
    served: bool
    mark = CONFIG

    def check_finished(self, plan: ConversionPlan, folder: Path, out: Path) -> None:
        report = read_report(out)
        expected = {"conversion": plan.layout.name, "source": to_json(source_record(plan.checkpoint, folder))}
        for key, value in expected.items():
            if report.get(key) != value:
                raise UsageError(
                    f"{out} holds another conversion; it differs in {key}.",
                    hint="Resume with the same arguments, or convert into an empty directory.",
                )
        remove_parts(out)  # which a writer leaves that was stopped after its last file
        findings = verify_portable(out).findings
        if findings:
            raise CheckpointError(
                f"{out} is damaged: {findings[0]}.", hint="Convert into an empty directory."
            )

    def finish(
        self,
        plan: ConversionPlan,
        source: PinnedSource,
        out: Path,
        layers: Sequence[LayerRecord],
        passthrough: Sequence[PassthroughRecord],
        producer: Mapping[str, str],
    ) -> tuple[str, ...]:
        """Copies small files, writes index, report and config. Returns the names of skipped files."""
        files, skipped = copy_small_files(source, out, STALE, keep_index=False)
        documents = {INDEX: json_bytes(plan.index), CONFIG: json_bytes(self.config)}
        write_file(out / INDEX, documents[INDEX], source.access)
        written = [FileRecord(name, len(data), _digest(data)) for name, data in documents.items()]
        report = {
            "format": self.target,
            "container": self.container,
            "conversion": plan.layout.name,
            "producer": dict(producer),
            "source": to_json(source.record),
            "experts_only": plan.experts_only,
            "layer_kinds": {kind: list(layers) for kind, layers in self.kinds.items()},
            "layers": read_parts(out, [label_of(layer.layer) for layer in plan.layers]),
            "experts": [
                {"file": r.file, "size": r.size, "sha256": layer_digest(layer.file.header, r.sha256.values())}
                for layer, r in zip(plan.layers, layers, strict=True)
            ],
            "files": [
                {"file": item.file, "size": item.size, "sha256": item.sha256}
                for item in (*passthrough, *files, *written)
            ],
        }
        source.check()
        write_file(out / REPORT, report_bytes(report), source.access)
        write_file(out / CONFIG, documents[CONFIG], source.access)
        remove_parts(out)
        return skipped


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

"""Finishes a converted directory: small files, index, configs, manifest, and READY last."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ... import __version__
from ...files.atomic import write_file
from ...files.strict_json import json_bytes
from ...lazy_torch import torch
from ..manifest.manifest_records import (
    CONFIG,
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    READY,
    SOURCE_CONFIG,
    FileRecord,
    LayerRecord,
    ManifestRecord,
    PassthroughRecord,
    converted_config,
    manifest_bytes,
    ready_bytes,
)
from ..plan.conversion_plan import ConversionPlan
from .passthrough import copy_small_files, source_record


def producer() -> dict[str, str]:
    """Versions of the software that writes the directory; empty for packages that are not installed."""
    versions = {"moectl": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name, package in (("triton", "triton"), ("flashinfer", "flashinfer-python")):
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def finish_folder(
    plan: ConversionPlan,
    folder: Path,
    out: Path,
    layers: Sequence[LayerRecord],
    passthrough: Sequence[PassthroughRecord],
) -> tuple[str, ...]:
    """Copies small files, writes index, configs and manifest, then READY. Returns the skipped files."""
    if plan.finalizer is not None:
        return plan.finalizer.finish(plan, folder, out, layers, passthrough, producer())
    files, skipped = copy_small_files(folder, out, {info.file for info in plan.checkpoint.tensors.values()})
    config = converted_config(plan.checkpoint.config, plan.layout)
    source = source_record(plan.checkpoint, folder)
    documents = {
        INDEX: json_bytes(plan.index),
        CONFIG: json_bytes(config),
        SOURCE_CONFIG: (folder / CONFIG).read_bytes(),
    }
    for name, data in documents.items():
        write_file(out / name, data)
    record = ManifestRecord(
        format_version=FORMAT_VERSION,
        producer=producer(),
        source=source,
        layout=plan.layout,
        shard=plan.shard,
        experts_only=plan.experts_only,
        groups=plan.groups,
        layers=tuple(layers),
        rest=tuple(passthrough),
        files=files,
        documents=tuple(
            FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in documents.items()
        ),
    )
    data = manifest_bytes(record)
    write_file(out / MANIFEST, data)
    write_file(out / READY, ready_bytes(data))
    return skipped

"""Finishes a converted directory: small files, index, configs, manifest, and READY last."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ... import __version__
from ...checkpoint.source.shards import DOCUMENT_LIMIT
from ...files.access import Access
from ...files.atomic import write_file
from ...files.folder_handle import read_inside
from ...files.strict_json import json_bytes
from ...lazy_torch import torch
from ..manifest.manifest_records import (
    CONFIG,
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    READY,
    SOURCE_CONFIG,
    DeploymentRecord,
    FileRecord,
    LayerRecord,
    ManifestRecord,
    PassthroughRecord,
    RankRecord,
    converted_config,
    manifest_bytes,
    ready_bytes,
)
from ..plan.conversion_plan import ConversionPlan, PassthroughPlan, index_document
from ..plan.source_pin import PinnedSource
from .passthrough import copy_small_files


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
    source: PinnedSource,
    out: Path,
    layers: Sequence[LayerRecord],
    passthrough: Sequence[PassthroughRecord],
) -> tuple[str, ...]:
    """Copies small files, writes index, configs and manifest, then READY. Returns the skipped files.

    The directory of one of several ranks gets a manifest alone. Raises CheckpointError, before it writes what
    makes the directory a finished one, if `source` is not what it was.
    """
    if plan.finalizer is not None:
        return plan.finalizer.finish(plan, source, out, layers, passthrough, producer())
    rank = RankRecord(
        format_version=FORMAT_VERSION,
        producer=producer(),
        source=source.record,
        layout=plan.layout,
        shard=plan.shard,
        experts_only=plan.experts_only,
        groups=plan.groups,
        layers=tuple(layers),
    )
    if plan.shard.ranks > 1:
        source.check()
        write_file(out / MANIFEST, manifest_bytes(rank), source.access)
        return ()
    files, documents, skipped = write_small_files(plan, plan.passthrough, source, out)
    record = ManifestRecord(**vars(rank), rest=tuple(passthrough), files=files, documents=documents)
    source.check()
    write_signed(out, record, source.access)
    return skipped


def write_small_files(
    plan: ConversionPlan, passthrough: Sequence[PassthroughPlan], source: PinnedSource, out: Path
) -> tuple[tuple[FileRecord, ...], tuple[FileRecord, ...], tuple[str, ...]]:
    """Copies the source's small files, and writes configs and the index of `passthrough` if there is any.

    Returns the records of the copies and of what was written, and the names of skipped files.
    """
    files, skipped = copy_small_files(source, out)
    documents = {
        CONFIG: json_bytes(converted_config(plan.checkpoint.config, plan.layout)),
        SOURCE_CONFIG: read_inside(source.folder, CONFIG, DOCUMENT_LIMIT),
    }
    if passthrough:
        documents[INDEX] = json_bytes(index_document({item.name: item.tensors for item in passthrough}))
    for name, data in documents.items():
        write_file(out / name, data, source.access)
    written = (
        FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in documents.items()
    )
    return files, tuple(written), skipped


def write_signed(out: Path, record: ManifestRecord | DeploymentRecord, access: Access) -> None:
    """Writes the manifest of a directory, then READY with its hash."""
    data = manifest_bytes(record)
    write_file(out / MANIFEST, data, access)
    write_file(out / READY, ready_bytes(data), access)

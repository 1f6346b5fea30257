"""Checkpoints with real headers and sparse data: full-size models that take no disk space."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moectl.checkpoint.source.catalogue import CatalogueEntry
from moectl.checkpoint.source.shards import CONFIG, INDEX
from moectl.convert.manifest.progress_log import only_writer
from moectl.errors import UsageError
from moectl.files.atomic import disk_errors
from moectl.files.output_folder import refuse_filled
from moectl.files.safetensors_writer import TensorSpec, header_bytes, in_file_order

SHARD_BYTES = 10_000_000_000
"""Most bytes of one file, unless a single tensor is larger; a usual size in published checkpoints."""

METADATA = {"format": "pt", "moectl": "sparse: headers only, every byte of data is zero"}
"""The metadata in the header of each file."""

PROBE_BYTES = 16 << 20
"""Size of the probe file that shows whether the file system supports sparse files."""


@dataclass(frozen=True)
class SparseCheckpoint:
    """What was written: numbers of tensors and weight files, and the files' apparent and allocated bytes."""

    tensors: int
    files: int
    apparent: int
    real: int


def write_sparse(entry: CatalogueEntry, out: Path, *, shard_bytes: int = SHARD_BYTES) -> SparseCheckpoint:
    """A checkpoint folder `out` with the MoE tensors of every MoE layer of `entry`, and no data.

    It holds config.json, the quantization files, safetensors files with real headers and a hole in
    place of every tensor, and an index when there is more than one file.

    Raises:
        UsageError: `out` is not empty, or on a file system that keeps no holes.
        Unavailable: `out` cannot be written. After any error, an interrupt included, `out` is as it was.
    """
    refuse_filled(out)
    shards = list(_shards(entry, shard_bytes))
    names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    documents = {CONFIG: entry.config, **entry.documents}
    probe = ".holes"
    with only_writer(out, "sparse", [*names, *documents, INDEX, probe]), disk_errors(out, 0):
        _refuse_without_holes(out / probe, sum(spec.nbytes for shard in shards for spec in shard))
        apparent = real = 0
        for name, shard in zip(names, shards, strict=True):
            size, taken = _write_shard(out / name, shard)
            apparent, real = apparent + size, real + taken
        if shards[1:]:
            documents[INDEX] = {
                "metadata": {"total_size": sum(spec.nbytes for shard in shards for spec in shard)},
                "weight_map": {
                    spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
                },
            }
        for name, document in documents.items():
            (out / name).write_text(json.dumps(document, indent=2) + "\n")
    return SparseCheckpoint(sum(map(len, shards)), len(shards), apparent, real)


def _shards(entry: CatalogueEntry, shard_bytes: int) -> Iterator[list[TensorSpec]]:
    """The model's tensors, layer by layer, in runs of at most `shard_bytes`, each in a file's order."""
    run: list[TensorSpec] = []
    room = shard_bytes
    for info in entry.listing().values():
        if run and info.nbytes > room:
            yield in_file_order(run)
            run, room = [], shard_bytes
        run.append(TensorSpec(info.name, info.dtype, info.shape))
        room -= info.nbytes
    yield in_file_order(run)


def _write_shard(path: Path, shard: list[TensorSpec]) -> tuple[int, int]:
    """Writes one file; returns its apparent and allocated bytes."""
    header = header_bytes(shard, METADATA)
    path.write_bytes(header)
    os.truncate(path, len(header) + sum(spec.nbytes for spec in shard))
    status = path.stat()
    return status.st_size, status.st_blocks * 512


def _refuse_without_holes(probe: Path, needed: int) -> None:
    """UsageError if the file system allocates holes, so that `needed` bytes would be written."""
    probe.touch()
    os.truncate(probe, PROBE_BYTES)
    taken = probe.stat().st_blocks * 512
    probe.unlink()
    if taken > PROBE_BYTES // 2:
        raise UsageError(
            f"{probe.parent} is on a file system without holes, where this checkpoint takes {needed} bytes.",
            hint="Write to a file system that has them, such as ext4, xfs, btrfs, apfs or tmpfs.",
        )

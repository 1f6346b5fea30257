"""What a conversion copies unchanged: passthrough tensors, tokenizers and other small files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.source.open_checkpoint import rank_number
from ...checkpoint.source.shards import SUFFIX, inside
from ...errors import CheckpointError
from ...files.atomic import copy_bytes, copy_file, link_or_copy, replacing, write_exactly
from ...files.safe_reading import (
    file_findings,
    file_sha256,
    hash_range,
    open_regular,
    range_sha256,
    read_exactly,
)
from ...files.safetensors_header import header_length
from ...files.safetensors_writer import FilePlan
from ...files.strict_json import parse_json_object
from ...files.tensor_table import TensorInfo
from ..manifest.manifest_records import (
    CONFIG,
    INDEX,
    MANIFEST,
    READY,
    SOURCE_CONFIG,
    SOURCE_INDEX,
    FileRecord,
    PassthroughRecord,
    SourceFile,
    SourceRecord,
    is_plain_name,
)
from ..manifest.progress_log import LOG, Meter, ProgressLog
from ..plan.conversion_plan import RESERVED, PassthroughPlan
from ..stream.source_reader import FolderReader

SMALL_FILE = 64 << 20
"""Size above which files other than safetensors are skipped and named in the summary, in bytes."""

_CONVERSION_FILES = frozenset({CONFIG, SOURCE_CONFIG, INDEX, SOURCE_INDEX, MANIFEST, READY, LOG})


def file_matches(path: Path, file: FilePlan, hashes: Mapping[TensorInfo, str]) -> bool:
    """True if `path` has the planned size and header, and each tensor in `hashes` has its SHA-256."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_size != file.size:
            return False
        header = bytearray(len(file.header))
        read_exactly(fd, memoryview(header), 0, path.name)
        if header != file.header:
            return False
        return all(range_sha256(fd, i.start, i.end, path.name) == sha256 for i, sha256 in hashes.items())
    finally:
        os.close(fd)


def write_passthrough(
    item: PassthroughPlan, reader: FolderReader, folder: Path, out: Path, log: ProgressLog, meter: Meter
) -> PassthroughRecord:
    """Links, copies or extracts one file of passthrough tensors; an existing equal copy is kept.

    Extracted tensors are few; they are extracted again when a conversion is resumed.
    """
    path = out / item.name
    size = sum(info.nbytes for info in item.tensors)
    logged = log.passthrough.get(item.name)
    same = logged and (logged.source, logged.whole) == (item.source, item.file is None)
    if logged and same and logged.whole and not file_findings(path, logged.size, logged.sha256):
        source = folder / item.source
        if source.samefile(path) or not file_findings(source, logged.size, logged.sha256):
            meter.advance(size)
            return logged
    path.unlink(missing_ok=True)
    if item.file is None:
        link_or_copy(folder / item.source, path)
        record = PassthroughRecord(item.name, path.stat().st_size, file_sha256(path), item.source, True)
    else:
        record = _extract(item, item.file, reader, path)
    meter.advance(size)
    log.add(record)
    return record


def _extract(item: PassthroughPlan, file: FilePlan, reader: FolderReader, path: Path) -> PassthroughRecord:
    with replacing(path, file.size) as fd:
        write_exactly(fd, memoryview(file.header), 0)
        for info in item.tensors:
            target = file.tensors[info.name]
            copy_bytes(reader.fd(info.file), fd, info.start, target.start, info.nbytes, info.file)
    return PassthroughRecord(file.name, file.size, file_sha256(path), item.source, False)


def passthrough_sha256(item: PassthroughPlan, reader: FolderReader, folder: Path) -> str:
    """SHA-256 of the file that `write_passthrough` would write."""
    if item.file is None:
        return file_sha256(folder / item.source)
    digest = hashlib.sha256(item.file.header)
    infos = {info.name: info for info in item.tensors}
    for name in item.file.tensors:
        info = infos[name]
        hash_range(digest, reader.fd(info.file), info.start, info.end, info.file)
    return digest.hexdigest()


def source_record(checkpoint: Checkpoint, folder: Path) -> SourceRecord:
    """The identity of a checkpoint: name, revision, and the hashes of its config and of every header."""
    files = sorted({info.file for info in checkpoint.tensors.values()})
    return SourceRecord(
        kind=checkpoint.origin.kind,
        name=checkpoint.origin.name.encode("utf-8", "backslashreplace").decode(),
        revision=checkpoint.origin.revision,
        config_sha256=file_sha256(folder / CONFIG),
        files=tuple(_source_file(folder, name) for name in files),
    )


def _source_file(folder: Path, name: str) -> SourceFile:
    with open_regular(folder / name, name) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        raw = file.read(header_length(prefix, size, name))
    metadata = parse_json_object(raw, f"{name}: the header").get("__metadata__", {})
    return SourceFile(name, size, hashlib.sha256(prefix + raw).hexdigest(), dict(metadata))


def copy_small_files(
    folder: Path,
    out: Path,
    tensor_files: set[str],
    ignored: frozenset[str] = frozenset(),
    *,
    keep_index: bool = True,
) -> tuple[tuple[FileRecord, ...], tuple[str, ...]]:
    """Copies index, tokenizer and other small files. Returns their records and the names of skipped files.

    Skipped are directories, files over `SMALL_FILE`, safetensors that the checkpoint does not use, and
    links out of the checkpoint (the blobs of a Hub cache belong to it). Names in `ignored` are passed over.
    """
    records, skipped = [], []
    if keep_index and (folder / INDEX).is_file():
        records.append(_copy(folder / INDEX, out / SOURCE_INDEX))
    for path in sorted(folder.iterdir()):
        if path.name in _CONVERSION_FILES or path.name in tensor_files or path.name in ignored:
            continue
        if not _is_small_file(path, folder):
            skipped.append(path.name)
            continue
        records.append(_copy(path, out / path.name))
    return tuple(records), tuple(skipped)


def _copy(source: Path, target: Path) -> FileRecord:
    copy_file(source, target)
    return FileRecord(target.name, target.stat().st_size, file_sha256(target))


def _is_small_file(path: Path, folder: Path) -> bool:
    if not is_plain_name(path.name) or path.name.startswith(RESERVED) or path.suffix == SUFFIX:
        return False
    if rank_number(path) is not None:
        return False
    try:
        return inside(folder, path.name).stat().st_size <= SMALL_FILE
    except CheckpointError:
        return False

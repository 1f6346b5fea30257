"""What a conversion copies unchanged: passthrough tensors, tokenizers and other small files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.access import Access
from ...files.atomic import copy_bytes, copy_file, link_or_copy, remove_file, replacing, write_exactly
from ...files.folder_handle import FolderHandle, file_findings, open_inside, sha256_inside
from ...files.safe_reading import hash_range, range_sha256, read_exactly
from ...files.safetensors_header import read_header
from ...files.safetensors_writer import FilePlan
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
)
from ..manifest.progress_log import LOG, Meter, ProgressLog
from ..plan.conversion_plan import PassthroughPlan
from ..plan.source_pin import PinnedSource
from ..stream.source_reader import FolderReader

_CONVERSION_FILES = frozenset({CONFIG, SOURCE_CONFIG, INDEX, SOURCE_INDEX, MANIFEST, READY, LOG})


def file_matches(path: Path, file: FilePlan, hashes: Mapping[TensorInfo, str]) -> bool:
    """True if `path` has the planned size and header, and each tensor in `hashes` has its SHA-256."""
    try:
        with FolderHandle(path.parent) as folder:
            fd = folder.open(path.name)
    except CheckpointError:
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
    item: PassthroughPlan,
    reader: FolderReader,
    source: PinnedSource,
    out: Path,
    log: ProgressLog,
    meter: Meter,
) -> PassthroughRecord:
    """Links, copies or extracts one file of passthrough tensors; an existing equal copy is kept.

    Extracted tensors are few; they are extracted again when a conversion is resumed.
    """
    path = out / item.name
    size = sum(info.nbytes for info in item.tensors)
    logged = log.passthrough.get(item.name)
    same = logged and (logged.source, logged.whole) == (item.source, item.file is None)
    if logged and same and logged.whole and not file_findings(out, item.name, logged.size, logged.sha256):
        linked = os.path.samestat(os.fstat(reader.fd(item.source)), path.lstat())
        if linked or not file_findings(source.folder, item.source, logged.size, logged.sha256):
            meter.advance(size)
            return logged
    remove_file(path)
    if item.file is None:
        link_or_copy(reader.fd(item.source), item.source, path, source.access)
        record = _recorded(path, item)
    else:
        record = _extract(item, item.file, reader, path, source.access)
    meter.advance(size)
    log.add(record)
    return record


def _extract(
    item: PassthroughPlan, file: FilePlan, reader: FolderReader, path: Path, access: Access
) -> PassthroughRecord:
    with replacing(path, file.size, access) as fd:
        write_exactly(fd, memoryview(file.header), 0)
        for info in item.tensors:
            target = file.tensors[info.name]
            copy_bytes(reader.fd(info.file), fd, info.start, target.start, info.nbytes, info.file)
    return _recorded(path, item)


def _recorded(path: Path, item: PassthroughPlan) -> PassthroughRecord:
    """The record of a file of passthrough tensors, which is read once."""
    with open_inside(path.parent, path.name) as file:
        size, fd = os.fstat(file.fileno()).st_size, file.fileno()
        infos = sorted(read_header(file, size, path.name).values(), key=lambda info: (info.start, info.end))
        whole, header, tensors = hashlib.sha256(), hashlib.sha256(), {}
        hash_range(_Both(whole, header), fd, 0, infos[0].start if infos else size, path.name)
        for info in infos:
            digest = hashlib.sha256()
            hash_range(_Both(whole, digest), fd, info.start, info.end, path.name)
            tensors[info.name] = digest.hexdigest()
    hashes = whole.hexdigest(), header.hexdigest()
    return PassthroughRecord(path.name, size, hashes[0], item.source, item.file is None, hashes[1], tensors)


class _Both:
    """Two digests of the same bytes."""

    def __init__(self, *digests: Any) -> None:
        self._digests = digests

    def update(self, data: memoryview) -> None:
        for digest in self._digests:
            digest.update(data)


def passthrough_sha256(item: PassthroughPlan, reader: FolderReader, folder: Path) -> str:
    """SHA-256 of the file that `write_passthrough` would write."""
    if item.file is None:
        return sha256_inside(folder, item.source)
    digest = hashlib.sha256(item.file.header)
    infos = {info.name: info for info in item.tensors}
    for name in item.file.tensors:
        info = infos[name]
        hash_range(digest, reader.fd(info.file), info.start, info.end, info.file)
    return digest.hexdigest()


def copy_small_files(
    source: PinnedSource,
    out: Path,
    ignored: frozenset[str] = frozenset(),
    *,
    keep_index: bool = True,
) -> tuple[tuple[FileRecord, ...], tuple[str, ...]]:
    """Copies index, tokenizer and other small files. Returns their records and the names of skipped files.

    Skipped are directories and files that are not `is_small_file`. Names in `ignored` are passed over.
    """
    records, skipped = [], []
    tensor_files = {file.name for file in source.record.files}
    with FolderHandle(source.folder) as folder:
        if keep_index and INDEX in source.files:
            records.append(_copy(folder, INDEX, out / SOURCE_INDEX, source.access))
        for name in sorted(path.name for path in source.folder.iterdir()):
            if name in _CONVERSION_FILES or name in tensor_files or name in ignored:
                continue
            if name not in source.files:
                skipped.append(name)
                continue
            records.append(_copy(folder, name, out / name, source.access))
    return tuple(records), tuple(skipped)


def _copy(source: FolderHandle, name: str, target: Path, access: Access) -> FileRecord:
    with source.file(name) as file:
        copy_file(file.fileno(), name, target, access)
    return FileRecord(target.name, target.stat().st_size, sha256_inside(target.parent, target.name))

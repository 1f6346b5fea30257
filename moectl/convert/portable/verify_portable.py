"""Checks a portable output against the hashes in its report."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.folder_handle import file_findings
from ...files.records import from_json
from ...files.safe_reading import range_sha256
from ..manifest.checked_files import read_file_header
from ..manifest.manifest_records import MANIFEST, FileRecord, is_plain_name
from ..manifest.progress_log import Meter, Progress, silent
from ..restore.verify import VerifyReport, unlisted_files
from ..stream.source_reader import FolderReader
from .report_fragments import REPORT, read_report


def is_portable(folder: Path) -> bool:
    """True if `folder` has the report of a portable conversion, and no manifest of another."""
    return (folder / REPORT).is_file() and not (folder / MANIFEST).exists()


def layer_digest(header: bytes, tensors: Iterable[str]) -> str:
    """SHA-256 over the header of a layer's file and the SHA-256 of its tensors, in the order of the file.

    Tensors are hashed while they are written, in any order, so that the file need not be read again.
    """
    return hashlib.sha256(header + "".join(tensors).encode()).hexdigest()


def verify_portable(out: Path, *, progress: Progress = silent) -> VerifyReport:
    """Checks a portable output against the sizes and hashes in its report; damage is a finding.

    So is a file that a loader might read but the conversion did not write.

    Raises CheckpointError if the report cannot be read.
    """
    report = read_report(out)
    layers = [_file_record(item) for item in report["experts"]]
    files = [_file_record(item) for item in report["files"]]
    size = sum(item.size for item in (*layers, *files))
    meter = Meter(progress, size)
    findings: list[str] = []
    with FolderReader(out) as reader:
        for item in layers:
            meter.start(item.file)
            try:
                if _digest(out, item, reader) != item.sha256:
                    findings.append(f"{item.file} has changed since it was written")
            except CheckpointError as error:
                findings.append(str(error))
            meter.advance(item.size)
    for item in files:
        meter.start(item.file)
        findings += file_findings(out, item.file, item.size, item.sha256)
        meter.advance(item.size)
    findings += unlisted_files(out, {REPORT, *(item.file for item in (*layers, *files))})
    return VerifyReport(len(layers), len(files), 0, 0, size, False, tuple(findings))


def _digest(out: Path, item: FileRecord, reader: FolderReader) -> str:
    """The `layer_digest` of an existing file."""
    header = read_file_header(out, item.file, item.size)
    infos = sorted(header.values(), key=lambda info: info.start)
    head = bytearray(infos[0].start if infos else item.size)
    reader.read(item.file, memoryview(head), 0)
    fd = reader.fd(item.file)
    return layer_digest(bytes(head), (range_sha256(fd, i.start, i.end, item.file) for i in infos))


def _file_record(data: Any) -> FileRecord:
    record = from_json(FileRecord, data if isinstance(data, Mapping) else {}, REPORT)
    if not is_plain_name(record.file):
        raise CheckpointError(f"{REPORT} names the file {record.file!r}, which is outside the directory.")
    return record

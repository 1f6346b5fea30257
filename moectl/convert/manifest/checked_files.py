"""Files of a converted directory, checked against the manifest when they are used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...errors import CheckpointError
from ...files.folder_handle import file_findings, open_inside
from ...files.safetensors_header import read_header
from ...files.strict_json import parse_json_object
from ...files.tensor_table import TensorInfo
from .manifest_records import SOURCE_CONFIG, DeploymentRecord, FileRecord, ManifestRecord, PassthroughRecord
from .signed_document import read_small


def read_file_header(folder: Path, name: str, size: int | None = None) -> Mapping[str, TensorInfo]:
    """The checked header of `folder`/`name`; CheckpointError if it is missing or not `size` bytes long."""
    with open_inside(folder, name, str(folder / name)) as file:
        return read_header(file, check_size(file, name, size), name)


def check_header(folder: Path, name: str, tensors: Mapping[str, TensorInfo], sha256: str) -> None:
    """Raises CheckpointError unless the header of a file, of these `tensors`, has its SHA-256."""
    with open_inside(folder, name, str(folder / name)) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(min((info.start for info in tensors.values()), default=size))
    if hashlib.sha256(head).hexdigest() != sha256:
        raise CheckpointError(
            f"the header of {name} is not what was written: its metadata or the order of its tensors differ.",
            hint="Check the whole directory with moectl verify, and convert again.",
        )


def refuse_changed(folder: Path, item: FileRecord) -> None:
    """Raises CheckpointError unless a file has its size and SHA-256."""
    if findings := file_findings(folder, item.file, item.size, item.sha256):
        raise CheckpointError(
            f"{findings[0]}.", hint="Check the whole directory with moectl verify, and convert again."
        )


def source_config(folder: Path, record: ManifestRecord | DeploymentRecord) -> dict[str, Any]:
    """The source's config.json in the converted `folder`; CheckpointError unless it has its SHA-256."""
    item = next(item for item in record.documents if item.file == SOURCE_CONFIG)
    data = read_small(folder, item.file, item.size) or b""
    if hashlib.sha256(data).hexdigest() != item.sha256:
        raise CheckpointError(
            f"{item.file} fails its SHA-256 check.",
            hint="Check the whole directory with moectl verify, and convert again.",
        )
    return parse_json_object(data, item.file)


def check_size(file: IO[bytes], name: str, size: int | None) -> int:
    """The length of an open file in bytes; CheckpointError if it is not `size`."""
    length = os.fstat(file.fileno()).st_size
    if size is not None and length != size:
        raise CheckpointError(
            f"{name} must have {size} bytes, got {length}.",
            reason="The file was truncated or changed.",
            hint="Convert again into an empty directory.",
        )
    return length


def passthrough_headers(folder: Path, files: Sequence[PassthroughRecord]) -> Mapping[str, TensorInfo]:
    """The tensors of `files` in `folder`, whose headers are checked; raises CheckpointError."""
    found: dict[str, TensorInfo] = {}
    for item in files:
        header = read_file_header(folder, item.file, item.size)
        if item.header_sha256:
            check_header(folder, item.file, header, item.header_sha256)
        found |= header
    return found

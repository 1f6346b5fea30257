"""The manifest of a converted directory, validated on loading, and access to the layers it describes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from ...errors import CheckpointError
from ...files.records import from_json
from ...files.safe_reading import open_regular, range_sha256
from ...files.safetensors_header import read_header
from ...files.safetensors_writer import TensorSpec
from ...files.strict_json import parse_json_object
from ...files.tensor_table import TensorInfo
from ...lazy_torch import torch
from ...problem.moe_problem import MoEProblem
from ...torch_dtypes import TORCH_DTYPES
from ..recipe.recipe import SIDE
from ..sources import output_name
from ..stream.file_transfers import Transfer, flat, transfer
from ..stream.pipeline import usable_cores
from ..stream.source_reader import FolderReader
from ..worker_partition import partitions_in
from .manifest_check import check_manifest
from .manifest_records import (
    FORMAT_VERSION,
    LOG,
    MANIFEST,
    READY,
    REPORT,
    GroupRecord,
    LayerRecord,
    LayoutRecord,
    ManifestRecord,
    RoleRecord,
    ready_bytes,
)


@dataclass(frozen=True)
class StoredRole:
    """One stored tensor of a layer: its spec, role record and SHA-256."""

    role: str
    spec: TensorSpec
    record: RoleRecord
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A validated manifest and the directory it describes."""

    folder: Path
    record: ManifestRecord

    @property
    def problem(self) -> MoEProblem:
        """The problem of the first layer group, with padded sizes; see `problem_of` for a given layer."""
        return self.record.groups[0].problem

    @property
    def layout(self) -> LayoutRecord:
        return self.record.layout

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the converted layers, ascending."""
        return tuple(sorted(self._layers))

    @cached_property
    def _layers(self) -> Mapping[int, LayerRecord]:
        return {record.layer: record for record in self.record.layers}

    @cached_property
    def _groups(self) -> Mapping[int, GroupRecord]:
        return {layer: group for group in self.record.groups for layer in group.layers}

    def layer(self, layer: int) -> LayerRecord:
        """The record of one layer; CheckpointError lists the existing layers if there is no such layer."""
        if layer not in self._layers:
            numbers = ", ".join(map(str, self.layers))
            raise CheckpointError(f"{self.folder.name} holds no layer {layer}; it has layers {numbers}.")
        return self._layers[layer]

    def group_of(self, layer: int) -> GroupRecord:
        """The group that `layer` belongs to."""
        return self._groups[self.layer(layer).layer]

    def problem_of(self, layer: int) -> MoEProblem:
        """The problem of `layer`, with padded sizes."""
        return self.group_of(layer).problem

    def tensors(self, layer: int) -> Mapping[str, StoredRole]:
        """The stored tensors of `layer` by role, ``source.*`` ones included."""
        record, group = self.layer(layer), self.group_of(layer)
        prefix = group.prefix.replace("{layer}", str(layer))
        return {
            role: StoredRole(
                role,
                TensorSpec(output_name(prefix, role), item.dtype, item.shape),
                item,
                record.sha256[output_name(prefix, role)],
            )
            for role, item in group.roles.items()
        }

    @cached_property
    def passthrough(self) -> Mapping[str, TensorInfo]:
        """The passthrough tensors by name; empty if the directory holds experts only.

        Raises CheckpointError if a file is missing or truncated.
        """
        return {
            name: info
            for item in self.record.rest
            for name, info in read_file_header(self.folder, item.file, item.size).items()
        }

    def open_layer(self, layer: int) -> Mapping[str, TensorInfo]:
        """The location of each role in the layer's file, whose header is checked against the manifest.

        Raises CheckpointError naming the fields that differ.
        """
        record = self.layer(layer)
        header = read_file_header(self.folder, record.file, record.size)
        stored = self.tensors(layer)
        expected = {item.spec.name: item.spec for item in stored.values()}
        differences = sorted(set(header) ^ set(expected)) + [
            f"{name} ({expected[name].dtype} {list(expected[name].shape)} expected, "
            f"got {header[name].dtype} {list(header[name].shape)})"
            for name in sorted(set(header) & set(expected))
            if (header[name].dtype, header[name].shape) != (expected[name].dtype, expected[name].shape)
        ]
        if differences:
            raise CheckpointError(
                f"{record.file} does not match the manifest in {'; '.join(differences[:8])}.",
                hint="Convert again.",
            )
        return {role: header[item.spec.name] for role, item in stored.items()}


def read_file_header(folder: Path, name: str, size: int | None = None) -> Mapping[str, TensorInfo]:
    """The checked header of `folder`/`name`; CheckpointError if it is missing or not `size` bytes long."""
    with open_regular(folder / name, str(folder / name)) as file:
        return read_header(file, _check_size(file, name, size), name)


def _check_size(file: IO[bytes], name: str, size: int | None) -> int:
    """The length of an open file in bytes; CheckpointError if it is not `size`."""
    length = os.fstat(file.fileno()).st_size
    if size is not None and length != size:
        raise CheckpointError(
            f"{name} must have {size} bytes, got {length}.",
            reason="The file was truncated or changed.",
            hint="Convert again into an empty directory.",
        )
    return length


def load_manifest(folder: Path) -> Manifest:
    """The validated `Manifest` of a complete converted directory.

    Nothing in it is trusted before it is checked: READY must exist and hold the manifest's hash, the
    format version must be supported, file names must stay inside the directory, and shapes, chains,
    hashes and source locations must be consistent.

    Raises:
        CheckpointError: not a converted directory, incomplete, or inconsistent.
    """
    data = _read_small(folder / MANIFEST, 1 << 29)
    ready = _read_small(folder / READY, 1 << 10)
    if not folder.is_dir():
        raise CheckpointError(f"there is no directory {folder}.", hint="Check the path.")
    has_log = (folder / LOG).exists()
    partitioned = bool(partitions_in(folder))
    if data is None and (folder / REPORT).exists():
        raise CheckpointError(
            f"{folder} is a portable checkpoint, from which the source cannot be restored.",
            hint="Convert from the source again where another format is wanted.",
        )
    if data is None and ready is None:
        raise CheckpointError(
            f"{folder} is not a finished converted directory: {MANIFEST} and {READY} are missing.",
            hint="Complete it with convert --finish."
            if partitioned
            else "Finish it with convert --resume."
            if has_log
            else "Give a directory that convert has written.",
        )
    if data is None or ready is None:
        missing = MANIFEST if data is None else READY
        raise CheckpointError(
            f"{folder} is not complete: {missing} is missing.",
            reason=f"{READY} is written last, when everything else is there.",
            hint="Finish it with convert --resume." if has_log else "Convert again into an empty directory.",
        )
    if ready != ready_bytes(data):
        raise CheckpointError(
            f"{READY} does not hold the SHA-256 of {MANIFEST}: one of them was changed.",
            hint="Convert again.",
        )
    document = parse_json_object(data, MANIFEST)
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST} has format version {version!r}, this program reads {FORMAT_VERSION}.",
            hint="Use the program that wrote it, or convert again.",
        )
    record = from_json(ManifestRecord, document, MANIFEST)
    problems = check_manifest(record)
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{MANIFEST} does not agree with itself: {'; '.join(problems[:5])}{more}.")
    return Manifest(folder, record)


def _read_small(path: Path, limit: int) -> bytes | None:
    if not path.exists():
        return None
    with open_regular(path, str(path)) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(
                f"{path.name} has more than {limit} bytes, which no converted directory has."
            )
        return file.read()


def check_layer(manifest: Manifest, layer: int, locations: Mapping[str, TensorInfo]) -> None:
    """Checks every stored tensor of a layer against its SHA-256; `locations` as from `Manifest.open_layer`.

    Raises CheckpointError if the file is missing, truncated, or holds other bytes than were written.
    """
    stored = manifest.tensors(layer)
    with FolderReader(manifest.folder) as reader, ThreadPoolExecutor(usable_cores(), "hash") as threads:
        fds = {info.file: reader.fd(info.file) for info in locations.values()}

        def sha256(info: TensorInfo) -> str:
            return range_sha256(fds[info.file], info.start, info.end, info.file)

        # A tensor is hashed by one thread, from its first byte to its last.
        hashes = threads.map(sha256, (locations[role] for role in stored))
        for (role, item), found in zip(stored.items(), hashes, strict=True):
            if found != item.sha256:
                raise _other_bytes(item.spec.name, locations[role].file)


def _other_bytes(name: str, file: str) -> CheckpointError:
    return CheckpointError(
        f"{name} of {file} does not have the SHA-256 that was written.",
        hint="Check the whole directory with moectl verify, and convert again.",
    )


def load_layer(
    manifest: Manifest,
    layer: int,
    locations: Mapping[str, TensorInfo] | None = None,
    *,
    check: bool = False,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """One layer's stored tensors by role, in their stored shape and dtype, without the ``source.*`` ones.

    On the CPU they are views of a private memory map of the file: data is read on first use, and nothing is
    ever written to the file. On another device they are allocated with their exact sizes, and read through
    buffers in host memory (`stream.file_transfers`).

    Args:
        locations: the result of `Manifest.open_layer`, if the file's header has been read already.
        check: check each tensor against its SHA-256.
        device: where the tensors are wanted; None for the CPU.

    Raises:
        CheckpointError: the file is missing, truncated, or differs from the manifest in any field.
    """
    if locations is None:
        locations = manifest.open_layer(layer)
    if check:
        check_layer(manifest, layer, locations)
    if device is not None and device.type != "cpu":
        return _read_layer(manifest.folder, locations, device)
    record = manifest.layer(layer)
    path = manifest.folder / record.file
    with open_regular(path, str(path)) as file:
        _check_size(file, record.file, record.size)
        # A private writable mapping, since torch has no read-only tensors.
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return {
        role: memory[info.start : info.end].view(TORCH_DTYPES[info.dtype]).reshape(info.shape)
        for role, info in locations.items()
        if not role.startswith(SIDE)
    }


def _read_layer(
    folder: Path, locations: Mapping[str, TensorInfo], device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors at `locations`, without the ``source.*`` ones, newly allocated on `device`."""
    wanted = {role: info for role, info in locations.items() if not role.startswith(SIDE)}
    tensors = {
        role: torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device=device)
        for role, info in wanted.items()
    }
    with FolderReader(folder) as reader:
        transfers = (
            Transfer(info.file, info.start, info.nbytes, flat(tensors[role])) for role, info in wanted.items()
        )
        transfer(reader, transfers, device)
    return tensors

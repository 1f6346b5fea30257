"""The manifest of a converted folder, read with suspicion, and the layers it describes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import torch

from ...errors import CheckpointError
from ...files.records import from_json
from ...files.safe_reading import open_regular, range_sha256
from ...files.safetensors_header import read_header
from ...files.safetensors_writer import TensorSpec
from ...files.strict_json import parse_json_object
from ...files.tensor_table import TensorInfo
from ...problem.moe_problem import MoEProblem
from ...torch_dtypes import TORCH_DTYPES
from ..recipe.recipe import SIDE
from ..sources import output_name
from ..stream.source_reader import FolderReader
from ..worker_partition import portions_in
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
    """A checked manifest and the folder that it describes."""

    folder: Path
    record: ManifestRecord

    @property
    def problem(self) -> MoEProblem:
        """The problem of the first layer group, with padded sizes; `problem_of` for a layer's own."""
        return self.record.groups[0].problem

    @property
    def layout(self) -> LayoutRecord:
        return self.record.layout

    @property
    def layers(self) -> tuple[int, ...]:
        """Converted layers in order."""
        return tuple(sorted(self._layers))

    @cached_property
    def _layers(self) -> Mapping[int, LayerRecord]:
        return {record.layer: record for record in self.record.layers}

    @cached_property
    def _groups(self) -> Mapping[int, GroupRecord]:
        return {layer: group for group in self.record.groups for layer in group.layers}

    def layer(self, layer: int) -> LayerRecord:
        """The record of one layer; CheckpointError names the layers there are."""
        if layer not in self._layers:
            known = ", ".join(map(str, self.layers))
            raise CheckpointError(f"{self.folder.name} holds no layer {layer}; it has layers {known}.")
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
        """The tensors that were not converted, by name, where their files were not left out.

        Raises CheckpointError when a file is missing or cut.
        """
        return {
            name: info
            for item in self.record.rest
            for name, info in read_file_header(self.folder, item.file, item.size).items()
        }

    def open_layer(self, layer: int) -> Mapping[str, TensorInfo]:
        """Where each role's bytes are in the layer's file, after its header was held to the manifest.

        Raises CheckpointError naming every field that differs.
        """
        record = self.layer(layer)
        found = read_file_header(self.folder, record.file, record.size)
        stored = self.tensors(layer)
        expected = {item.spec.name: item.spec for item in stored.values()}
        wrong = sorted(set(found) ^ set(expected)) + [
            f"{name} ({expected[name].dtype} {list(expected[name].shape)} expected, "
            f"got {found[name].dtype} {list(found[name].shape)})"
            for name in sorted(set(found) & set(expected))
            if (found[name].dtype, found[name].shape) != (expected[name].dtype, expected[name].shape)
        ]
        if wrong:
            raise CheckpointError(
                f"{record.file} does not match the manifest in {'; '.join(wrong[:8])}.",
                hint="Convert again.",
            )
        return {role: found[item.spec.name] for role, item in stored.items()}


def read_file_header(folder: Path, name: str, size: int | None = None) -> Mapping[str, TensorInfo]:
    """The checked header of `folder`/`name`; CheckpointError when missing or not `size` bytes long."""
    with open_regular(folder / name, str(folder / name)) as file:
        return read_header(file, _check_size(file, name, size), name)


def _check_size(file: IO[bytes], name: str, size: int | None) -> int:
    """The bytes of an open file; CheckpointError when they are not `size`."""
    got = os.fstat(file.fileno()).st_size
    if size is not None and got != size:
        raise CheckpointError(
            f"{name} must have {size} bytes, got {got}.",
            reason="The file was cut or changed.",
            hint="Convert again into an empty folder.",
        )
    return got


def load_manifest(folder: Path) -> Manifest:
    """The checked `Manifest` of a complete converted folder.

    Nothing in it is believed before it is checked: READY must be there and hold the manifest's
    hash, the format must be known, names must stay inside the folder, shapes, chains, hashes and
    source places must agree with each other.

    Raises:
        CheckpointError: not a converted folder, not complete, or anything that does not agree.
    """
    data = _read_small(folder / MANIFEST, 1 << 29)
    ready = _read_small(folder / READY, 1 << 10)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}.", hint="Check the path.")
    begun = (folder / LOG).exists()
    parts = bool(portions_in(folder))
    if data is None and (folder / REPORT).exists():
        raise CheckpointError(
            f"{folder} is a portable checkpoint, which holds no way back to its source.",
            hint="Convert from the source again where another format is wanted.",
        )
    if data is None and ready is None:
        raise CheckpointError(
            f"{folder} is not a finished converted folder: {MANIFEST} and {READY} are missing.",
            hint="Complete it with convert --finish."
            if parts
            else "Finish it with convert --resume."
            if begun
            else "Give a folder that convert has written.",
        )
    if data is None or ready is None:
        missing = MANIFEST if data is None else READY
        raise CheckpointError(
            f"{folder} is not complete: {missing} is missing.",
            reason=f"{READY} is written last, when everything else is there.",
            hint="Finish it with convert --resume." if begun else "Convert again into an empty folder.",
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
            raise CheckpointError(f"{path.name} has more than {limit} bytes, which no converted folder has.")
        return file.read()


def check_layer(manifest: Manifest, layer: int, places: Mapping[str, TensorInfo]) -> None:
    """Compares every stored tensor of a layer with its SHA-256; `places` are of `Manifest.open_layer`.

    Raises CheckpointError when the file is missing, cut, or holds other bytes than were written.
    """
    with FolderReader(manifest.folder) as reader:
        for role, item in manifest.tensors(layer).items():
            info = places[role]
            if range_sha256(reader.fd(info.file), info.start, info.end, info.file) != item.sha256:
                raise _other_bytes(item.spec.name, info.file)


def _other_bytes(name: str, file: str) -> CheckpointError:
    return CheckpointError(
        f"{name} of {file} does not have the SHA-256 that was written.",
        hint="Look at the whole folder with moectl verify, and convert again.",
    )


def load_layer(
    manifest: Manifest, layer: int, places: Mapping[str, TensorInfo] | None = None, *, check: bool = False
) -> dict[str, torch.Tensor]:
    """One layer's stored tensors by role, ``source.*`` ones left out, in their stored shape and dtype.

    They are views of the file's memory map, private to this process: nothing is read before it is
    used, and nothing is ever written to the file.

    Args:
        places: of `Manifest.open_layer`, where the file's header was read before.
        check: compare each tensor with its SHA-256.

    Raises:
        CheckpointError: the file is missing, cut, or differs from the manifest in any field.
    """
    if places is None:
        places = manifest.open_layer(layer)
    if check:
        check_layer(manifest, layer, places)
    record = manifest.layer(layer)
    path = manifest.folder / record.file
    with open_regular(path, str(path)) as file:
        _check_size(file, record.file, record.size)
        # A private mapping that could be written: torch has no read-only tensors.
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return {
        role: memory[info.start : info.end].view(TORCH_DTYPES[info.dtype]).reshape(info.shape)
        for role, info in places.items()
        if not role.startswith(SIDE)
    }

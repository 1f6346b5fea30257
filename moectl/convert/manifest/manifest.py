"""The manifest of a converted directory, validated on loading, and access to the layers it describes."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...checkpoint.source.open_checkpoint import rank_folder, rank_number
from ...errors import CheckpointError
from ...files.folder_handle import open_inside
from ...files.records import from_json
from ...files.safe_reading import range_sha256
from ...files.safetensors_writer import TensorSpec, plan_file
from ...files.tensor_table import TensorInfo
from ...lazy_torch import torch
from ...problem.moe_problem import MoEProblem
from ...torch_dtypes import TORCH_DTYPES
from ..recipe.recipe import SIDE
from ..sources import output_name
from ..stream.pipeline import usable_cores
from ..stream.source_reader import FolderReader
from ..stream.tensor_reading import TensorReading
from .checked_files import (
    check_header,
    check_size,
    passthrough_headers,
    read_file_header,
    refuse_changed,
)
from .manifest_check import check_deployment, check_manifest, check_rank
from .manifest_records import (
    MANIFEST,
    READY,
    DeploymentRecord,
    GroupRecord,
    LayerRecord,
    LayoutRecord,
    ManifestRecord,
    RankRecord,
    RoleRecord,
    layer_metadata,
    rank_manifest,
)
from .signed_document import LONGEST_MANIFEST, read_small, signed_document, versioned_document


@dataclass(frozen=True)
class StoredRole:
    """One stored tensor of a layer: its spec, role record and SHA-256."""

    role: str
    spec: TensorSpec
    record: RoleRecord
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A validated manifest and what it describes.

    Attributes:
        folder: the directory of the layers' files.
        record: the manifest.
        top: the directory of all other files: `folder`, or the one above it that several ranks share.
    """

    folder: Path
    record: ManifestRecord
    top: Path

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
        """The passthrough tensors by name, of files in `top`; empty if the directory holds experts only.

        Raises CheckpointError if a file is missing or truncated, or its header has been changed.
        """
        return passthrough_headers(self.top, self.record.rest)

    @cached_property
    def passthrough_sha256(self) -> Mapping[str, str]:
        """SHA-256 of passthrough tensors by name; of none in directories of earlier versions."""
        return {name: sha256 for item in self.record.rest for name, sha256 in item.tensors.items()}

    def check_passthrough(self, file: str) -> None:
        """Checks a file of passthrough tensors against its SHA-256, once; CheckpointError if it differs."""
        record = next(item for item in self.record.rest if item.file == file)
        if file not in self._checked:
            refuse_changed(self.top, record)
            self._checked.add(file)

    @cached_property
    def _checked(self) -> set[str]:
        return set()

    def open_layer(self, layer: int) -> Mapping[str, TensorInfo]:
        """The location of each role in the layer's file, whose header is checked against the manifest.

        Raises CheckpointError naming the fields that differ.
        """
        record, layout = self.layer(layer), self.record.layout
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
        metadata = layer_metadata(self.record.format_version, layout.name, layout.version)
        planned = plan_file(record.file, expected.values(), metadata)
        check_header(self.folder, record.file, header, hashlib.sha256(planned.header).hexdigest())
        return {role: header[item.spec.name] for role, item in stored.items()}


@dataclass(frozen=True)
class Deployment:
    """The directory above those of several ranks, with what they share, and its validated manifest."""

    folder: Path
    record: DeploymentRecord

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.record.ranks)

    @cached_property
    def passthrough(self) -> Mapping[str, TensorInfo]:
        """As `Manifest.passthrough`."""
        return passthrough_headers(self.folder, self.record.rest)

    def rank(self, number: int) -> Manifest:
        """The manifest of one rank, whose files alone are needed beside those that all ranks share.

        Raises CheckpointError if there is no such rank, its directory is not here, or its manifest is not the
        one whose hash this directory's manifest has.
        """
        folder, record = rank_folder(self.folder, number), self.record
        if number >= self.ranks:
            raise CheckpointError(f"{self.folder} has no {folder.name}: it is for {self.ranks} ranks.")
        data = read_small(folder, MANIFEST, LONGEST_MANIFEST)
        if data is None:
            raise CheckpointError(
                f"{self.folder} lacks {folder.name} of {self.ranks} ranks.",
                hint=f"Put that directory there, or convert it again with --rank {number}.",
            )
        digest = hashlib.sha256(data).hexdigest()
        if digest != record.ranks[number].sha256:
            owner = next(
                (item.file for item in record.ranks if item.sha256 == digest), "another conversion's"
            )
            raise CheckpointError(
                f"{rank_manifest(number)} is not the one that was written there, but {owner}.",
                reason=f"{self.folder / MANIFEST} has its SHA-256.",
                hint="Put the directories of one conversion together, each under its own rank.",
            )
        rank = _rank_record(data, rank_manifest(number))
        headers = rank.source.headers, record.source.headers
        agree = {
            "shard": (rank.shard, record.shard(number)),
            "source": (replace(rank.source, files=headers[0]), replace(record.source, files=headers[1])),
            "the bytes of the source": (rank.source.samples, record.source.samples),
            "layout": (rank.layout, record.layout),
            "experts_only": (rank.experts_only, record.experts_only),
            "layers": (tuple(sorted(layer.layer for layer in rank.layers)), record.layers),
        }
        if differing := [name for name, (own, shared) in agree.items() if own != shared]:
            raise CheckpointError(
                f"{rank_manifest(number)} and {self.folder / MANIFEST} differ in {', '.join(differing)}.",
                hint="Convert again.",
            )
        merged = ManifestRecord(
            **vars(rank), rest=record.rest, files=record.files, documents=record.documents
        )
        return Manifest(folder, merged, self.folder)


def load_rank_record(folder: Path) -> RankRecord:
    """The validated manifest in the directory of one of several ranks, which nothing above it confirms.

    Raises CheckpointError if there is none, it is of version 1, or it is not valid.
    """
    data = read_small(folder, MANIFEST, LONGEST_MANIFEST)
    if data is None:
        raise CheckpointError(f"{folder} is not finished: it has no {MANIFEST}.")
    return _rank_record(data, f"{folder.name}/{MANIFEST}")


def _rank_record(data: bytes, where: str) -> RankRecord:
    document = versioned_document(data, where)
    if document["format_version"] == 1:
        raise CheckpointError(
            f"{where} is of format version 1, whose ranks are whole directories.",
            hint="Convert all ranks again, into an empty directory.",
        )
    record = from_json(RankRecord, document, where)
    _refuse(check_rank(record), where)
    return record


def load_manifest(folder: Path) -> Manifest:
    """The validated `Manifest` of a complete converted directory, or of one of several ranks'.

    Nothing in it is trusted before it is checked: READY must exist and hold the manifest's hash, the
    format version must be supported, file names must stay inside the directory, and shapes, chains,
    hashes and source locations must be consistent. What a rank shares with the others is in the directory
    above its own; with version 1, in its own.

    Raises:
        CheckpointError: not a converted directory, incomplete, inconsistent, or that of all ranks.
    """
    found = load_directory(folder)
    if isinstance(found, Deployment):
        raise CheckpointError(
            f"{folder} holds the directories of several ranks, and none was asked for.",
            hint=f"Give one of them, such as {rank_folder(folder, 0)}.",
        )
    return found


def load_directory(folder: Path) -> Manifest | Deployment:
    """The validated manifest of what `convert` has written; raises CheckpointError as `load_manifest`."""
    number = rank_number(folder.absolute())
    if number is not None and (folder / MANIFEST).exists() and not (folder / READY).exists():
        above = folder.absolute().parent
        top = recorded(signed_document(above), str(above / MANIFEST))
        if isinstance(top, ManifestRecord):
            raise CheckpointError(f"{above / MANIFEST} is not of several ranks.", hint="Convert again.")
        return replace(Deployment(above, top).rank(number), folder=folder)
    record = recorded(signed_document(folder), str(folder / MANIFEST))
    if isinstance(record, DeploymentRecord):
        return Deployment(folder, record)
    return Manifest(folder, record, folder)


def recorded(document: Mapping[str, Any], where: str) -> ManifestRecord | DeploymentRecord:
    """The validated record of a manifest document, whole or above ranks; raises CheckpointError."""
    if "ranks" in document:
        deployment = from_json(DeploymentRecord, document, where)
        _refuse(check_deployment(deployment), MANIFEST)
        return deployment
    record = from_json(ManifestRecord, document, where)
    problems = check_manifest(record)
    if record.format_version > 1 and record.shard.ranks > 1:
        problems.append("it is of one rank, and not named by a manifest of all ranks")
    _refuse(problems, MANIFEST)
    return record


def _refuse(problems: Sequence[str], where: str) -> None:
    """Raises CheckpointError if there are `problems` with a manifest."""
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{where} does not agree with itself: {'; '.join(problems[:5])}{more}.")


ALWAYS_CHECKED = 1 << 20
"""Size up to which a layer's tensors, such as biases and global scales, are checked against their SHA-256
whenever they are loaded, in bytes. Larger ones are where it is asked for: loading is faster than hashing."""

HASHED_AT_ONCE = 1 << 20
"""Bytes of a layer's tensors up to which starting threads takes longer than hashing them."""


def check_layer(
    manifest: Manifest, layer: int, locations: Mapping[str, TensorInfo], largest: int | None = None
) -> None:
    """Checks every stored tensor of a layer against its SHA-256; `locations` as from `Manifest.open_layer`.

    With `largest`, only tensors of at most that many bytes.

    Raises CheckpointError if the file is missing, truncated, or holds other bytes than were written.
    """
    stored = {
        role: item
        for role, item in manifest.tensors(layer).items()
        if largest is None or locations[role].nbytes <= largest
    }
    if not stored:
        return
    checked = [locations[role] for role in stored]
    with FolderReader(manifest.folder) as reader, ExitStack() as stack:
        fds = {info.file: reader.fd(info.file) for info in locations.values()}

        def sha256(info: TensorInfo) -> str:
            return range_sha256(fds[info.file], info.start, info.end, info.file)

        hashes: Iterator[str] = map(sha256, checked)
        if sum(info.nbytes for info in checked) > HASHED_AT_ONCE:
            # A tensor is hashed by one thread, from its first byte to its last.
            threads = stack.enter_context(ThreadPoolExecutor(usable_cores(), "hash"))
            hashes = threads.map(sha256, checked)
        for (role, item), found in zip(stored.items(), hashes, strict=True):
            if found != item.sha256:
                raise other_bytes(item.spec.name, locations[role].file)


def other_bytes(name: str, file: str) -> CheckpointError:
    """The error for a tensor whose bytes are not those that were written."""
    return CheckpointError(
        f"{name} of {file} fails its SHA-256 check.",
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
        return begin_layer(manifest, locations, device).tensors()
    record = manifest.layer(layer)
    with open_inside(manifest.folder, record.file, str(manifest.folder / record.file)) as file:
        check_size(file, record.file, record.size)
        # A private writable mapping, since torch has no read-only tensors.
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return {
        role: memory[info.start : info.end].view(TORCH_DTYPES[info.dtype]).reshape(info.shape)
        for role, info in locations.items()
        if not role.startswith(SIDE)
    }


def begin_layer(
    manifest: Manifest, locations: Mapping[str, TensorInfo], device: torch.device
) -> TensorReading:
    """`load_layer` to a GPU, which returns while threads read; `locations` are of `Manifest.open_layer`."""
    wanted = {role: info for role, info in locations.items() if not role.startswith(SIDE)}
    return TensorReading(manifest.folder, wanted, device)

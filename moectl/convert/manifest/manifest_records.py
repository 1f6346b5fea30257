"""The records of the manifest document, and the names of the files written with it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...checkpoint.source.open_checkpoint import LOG as LOG
from ...checkpoint.source.open_checkpoint import MANIFEST as MANIFEST
from ...checkpoint.source.open_checkpoint import rank_folder
from ...checkpoint.source.shards import CONFIG as CONFIG
from ...checkpoint.source.shards import INDEX as INDEX
from ...errors import CheckpointError
from ...files.records import Size, to_json
from ...files.tensor_table import TensorType
from ...problem.moe_problem import Dims, MoEProblem
from ..rank_slice import RankShard, RankSlice, shard_of
from ..recipe.chain import Chain
from ..recipe.recipe import Recipe, StoredOutput
from ..sources import MappedTensors, TensorMapping, output_name
from ..steps.value_steps import value_from_json, value_to_json

FORMAT_VERSION = 2
"""The version of the directories that are written; see docs/format.md."""

READABLE_VERSIONS = (1, 2)
READY = "READY"
REPORT = "moectl-report.json"
"""The report of a portable output: what was converted, quantization errors, and the hashes of its files."""

SOURCE_CONFIG = f"source.{CONFIG}"
SOURCE_INDEX = f"source.{INDEX}"
QUANT_METHOD = "moectl"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,200}")


@dataclass(frozen=True)
class SourceFile:
    """A file of the source checkpoint: its size, and the SHA-256 of its header bytes.

    `sample_sha256` is of evenly spread blocks of its tensors, and tells one revision of a model from another,
    whose headers are the same; empty in directories of earlier versions.
    """

    name: str
    size: Size
    header_sha256: str
    metadata: Mapping[str, str]
    sample_sha256: str = ""


@dataclass(frozen=True)
class SourceRecord:
    """The identity of the checkpoint that was converted."""

    kind: str
    name: str
    revision: str | None
    config_sha256: str
    files: tuple[SourceFile, ...]

    @property
    def headers(self) -> tuple[SourceFile, ...]:
        """The files without samples of their tensors: equal for all revisions of a model."""
        return tuple(replace(file, sample_sha256="") for file in self.files)

    @property
    def samples(self) -> tuple[str, ...]:
        """The samples of the files, in order."""
        return tuple(file.sample_sha256 for file in self.files)

    def resampled(self, other: SourceRecord) -> tuple[str, ...]:
        """Names of the files whose samples are others in `other`, which has the same headers."""
        pairs = zip(self.files, other.files, strict=True)
        both = ((a.name, a.sample_sha256, b.sample_sha256) for a, b in pairs)
        return tuple(name for name, a, b in both if a and b and a != b)


@dataclass(frozen=True)
class LayoutRecord:
    """The weight layout of a directory, its readers, and whether a recorded conversion confirms it."""

    name: str
    target: str
    version: int
    archs: tuple[str, ...]
    readers: tuple[str, ...]
    verified: bool = True


@dataclass(frozen=True)
class RoleRecord:
    """One stored role of a layer group.

    Attributes:
        dtype, shape: of the tensor in the layer's file; experts first unless it is one tensor per layer.
        logical_dtype: what the stored bytes mean (``F4``, ``F8_E8M0``, ...).
        made: the JSON form of its `StoredOutput`; None for a source tensor that is kept unchanged.
    """

    dtype: str
    shape: tuple[int, ...]
    logical_dtype: str
    made: Any

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True)
class SourceTensorRecord:
    """One kind of source tensor, and the rows of a canonical role that it fills.

    Attributes:
        template: name with ``{layer}`` and, if there is one tensor per expert, ``{expert}``.
        role: canonical role; empty for a tensor that is kept unchanged.
        dtype, shape: of the source tensor.
        raw: dtype and shape of one expert's data as it is read.
        rows: rows of the role, first and last (exclusive).
        shared: one tensor applies to every expert.
        chain, values: JSON form of the steps from the source tensor to canonical rows.
    """

    template: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    raw: TensorType
    rows: tuple[int, int]
    shared: bool
    chain: Any
    values: Any


def source_tensor_record(mapped: MappedTensors, template: str) -> SourceTensorRecord:
    """The record of mapped tensors whose names follow `template`."""
    info, mapping = mapped.tensors[0], mapped.mapping
    return SourceTensorRecord(
        template=template,
        role=mapping.role,
        dtype=info.dtype,
        shape=info.shape,
        raw=mapping.type,
        rows=mapping.rows,
        shared=mapping.shared,
        chain=mapping.chain.to_json(),
        values=[value_to_json(value) for value in mapping.values],
    )


def recorded_mapping(stored: str, record: SourceTensorRecord) -> TensorMapping:
    """The mapping that a manifest's record describes; CheckpointError if it is invalid."""
    if not isinstance(record.values, list):
        raise CheckpointError(f"the values of part {stored} must be a list.")
    return TensorMapping(
        stored,
        record.role,
        record.raw.dtype,
        record.raw.shape,
        Chain.from_json(record.chain),
        tuple(value_from_json(v, f"part {stored}, value {i}") for i, v in enumerate(record.values)),
        record.rows,
        record.shared,
    )


@dataclass(frozen=True)
class GroupRecord:
    """Layers with one problem: `problem.dims` has logical and padded sizes, padding is `pad_value`.

    `experts` and `intermediate` are the ranges that the rank holds, first and last (exclusive), of all
    experts and of `whole_intermediate` intermediate channels. `canonical` and `roles` describe this slice,
    `parts` the source tensors of whole experts. `router` holds name templates of the router's tensors, as
    `ExpertNames.router`; the tensors themselves are passthrough tensors.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    experts: tuple[int, int]
    intermediate: tuple[int, int]
    whole_intermediate: int
    pad_value: int
    prefix: str
    canonical: Mapping[str, TensorType]
    roles: Mapping[str, RoleRecord]
    parts: Mapping[str, SourceTensorRecord]
    router: Mapping[str, str]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe by which the layers are stored; CheckpointError if the record is invalid."""
        outputs = {
            role: StoredOutput.from_json(record.made, f"role {role}")
            for role, record in self.roles.items()
            if record.made is not None
        }
        return Recipe(self.canonical, outputs)

    @cached_property
    def mappings(self) -> dict[str, TensorMapping]:
        """Tensor mappings by stored role; CheckpointError if a record is invalid."""
        return {stored: recorded_mapping(stored, record) for stored, record in self.parts.items()}


def expert_names(groups: Sequence[GroupRecord]) -> tuple[str, ...]:
    """Names of the tensors of `groups` and of the source's that they were made of, in order.

    They have ``{layer}`` and, where each expert has a tensor of its own, ``{expert}``.
    """
    stored = {output_name(group.prefix, role) for group in groups for role in group.roles}
    return tuple(sorted(stored | {part.template for group in groups for part in group.parts.values()}))


def unpadded(problem: MoEProblem) -> MoEProblem:
    """`problem` without padding, as the source stores it."""
    return replace(problem, dims=replace(problem.dims, padded_hidden=0, padded_intermediate=0))


def group_rank_slice(shard: RankShard, group: GroupRecord) -> RankSlice:
    """The slice of a group's layers that the rank `shard` holds; raises like `RankSlice`."""
    dims = Dims(group.problem.dims.hidden, group.whole_intermediate)
    return RankSlice(replace(group.problem, dims=dims, local_experts=0), shard)


@dataclass(frozen=True)
class SourceTensorHashes:
    """SHA-256 and source file of each source tensor of one kind, expert by expert.

    If one tensor holds all experts, only the bytes of the rank's experts are hashed.
    """

    sha256: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class LayerRecord:
    """One converted layer: its file, and the SHA-256 of each stored tensor and of each source tensor.

    `slices` has the `SliceHashes` of the canonical roles if the rank holds slices of experts.
    """

    layer: Size
    file: str
    size: Size
    sha256: Mapping[str, str]
    source: Mapping[str, SourceTensorHashes]
    slices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FileRecord:
    """Name, size in bytes and SHA-256 of a file that was written."""

    file: str
    size: Size
    sha256: str


@dataclass(frozen=True)
class PassthroughRecord(FileRecord):
    """A file of passthrough tensors: a `whole` source file, or tensors extracted from the file `source`.

    `header_sha256` and `tensors`, the SHA-256 of each tensor, are for readers of single tensors; empty in
    directories of earlier versions.
    """

    source: str
    whole: bool
    header_sha256: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class RankRecord:
    """The manifest of one of several ranks, field by field: the layers' files are all that is beside it."""

    format_version: int
    producer: Mapping[str, str]
    source: SourceRecord
    layout: LayoutRecord
    shard: RankShard
    experts_only: bool
    groups: tuple[GroupRecord, ...]
    layers: tuple[LayerRecord, ...]


@dataclass(frozen=True)
class ManifestRecord(RankRecord):
    """The manifest of a whole directory, or of a rank's with what all ranks share.

    `rest` lists the files of passthrough tensors, `files` the other files copied from the source, and
    `documents` the ones that were generated (config, index) or renamed (the source's config).
    """

    rest: tuple[PassthroughRecord, ...]
    files: tuple[FileRecord, ...]
    documents: tuple[FileRecord, ...]


@dataclass(frozen=True)
class DeploymentRecord:
    """The manifest above the directories of several ranks: what they share, and each one's manifest.

    `layers` are the numbers of the converted layers, the same on every rank, and `experts` the templates of
    their tensors' names, as from `expert_names`; `ranks` are the files ``rank-00/moectl.json`` and so on;
    `rest`, `files` and `documents` are as in `ManifestRecord`.
    """

    format_version: int
    producer: Mapping[str, str]
    source: SourceRecord
    layout: LayoutRecord
    tp_size: int
    ep_size: int
    experts_only: bool
    layers: tuple[int, ...]
    experts: tuple[str, ...]
    ranks: tuple[FileRecord, ...]
    rest: tuple[PassthroughRecord, ...]
    files: tuple[FileRecord, ...]
    documents: tuple[FileRecord, ...]

    def shard(self, rank: int) -> RankShard:
        """The share of rank number `rank`."""
        return shard_of(rank, self.tp_size, self.ep_size)


def is_plain_name(name: str) -> bool:
    """True for a file name that a manifest may contain: no directory, not hidden, no unusual characters."""
    return bool(_PLAIN_NAME.fullmatch(name))


def rank_manifest(rank: int) -> str:
    """Name of a rank's manifest, relative to the directory of all ranks."""
    return str(rank_folder(Path(), rank) / MANIFEST)


def layer_metadata(format_version: int, layout: str, layout_version: int) -> dict[str, str]:
    """The metadata in the headers of layers' files."""
    return {
        "format": "pt",
        "moectl.format_version": str(format_version),
        "moectl.layout": f"{layout} {layout_version}",
    }


def manifest_bytes(record: RankRecord | DeploymentRecord) -> bytes:
    """The serialized manifest document."""
    return (json.dumps(to_json(record), indent=1, ensure_ascii=False) + "\n").encode()


def ready_bytes(manifest: bytes) -> bytes:
    """The contents of READY for a serialized manifest: its SHA-256 and a newline."""
    return (hashlib.sha256(manifest).hexdigest() + "\n").encode()


def converted_config(config: Mapping[str, Any], layout: LayoutRecord) -> dict[str, Any]:
    """The source's config with a `quantization_config` whose method other engines reject by name."""
    return {
        **config,
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "layout": layout.name,
            "layout_version": layout.version,
        },
    }

"""The manifest's document as records, and what is written beside it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...checkpoint.source.open_checkpoint import MANIFEST as MANIFEST
from ...checkpoint.source.shards import CONFIG as CONFIG
from ...checkpoint.source.shards import INDEX as INDEX
from ...errors import CheckpointError
from ...files.records import to_json
from ...files.tensor_table import TensorType
from ...problem.moe_problem import Dims, MoEProblem
from ..rank_slice import RankShard, RankShare
from ..recipe.chain import Chain
from ..recipe.recipe import Recipe, StoredOutput
from ..sources import MappedTensors, TensorMapping
from ..steps.value_steps import value_from_json, value_to_json

FORMAT_VERSION = 1
READY = "READY"
REPORT = "moectl-report.json"
"""In a portable output: what was converted, what it cost, and the hashes of its files."""

LOG = "progress.jsonl"
SOURCE_CONFIG = f"source.{CONFIG}"
SOURCE_INDEX = f"source.{INDEX}"
QUANT_METHOD = "moectl"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,200}")


@dataclass(frozen=True)
class SourceFile:
    """A file of the source checkpoint: its size, and the SHA-256 of its header bytes."""

    name: str
    size: int
    header_sha256: str
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class SourceRecord:
    """Which checkpoint was converted."""

    kind: str
    name: str
    revision: str | None
    config_sha256: str
    files: tuple[SourceFile, ...]


@dataclass(frozen=True)
class LayoutRecord:
    """Which weight layout the folder holds, who reads it, and whether a recorded conversion confirms it."""

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
        dtype, shape: of the tensor in the layer's file; experts first, but for one of the whole layer.
        logical_dtype: what the stored bytes mean (``F4``, ``F8_E8M0``, ...).
        made: the `StoredOutput` it is; None for a canonical tensor that is kept as it was.
    """

    dtype: str
    shape: tuple[int, ...]
    logical_dtype: str
    made: Any

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True)
class PartRecord:
    """One kind of source tensor, and the rows of a canonical role that it holds.

    Attributes:
        template: has ``{layer}`` and, for one tensor per expert, ``{expert}``.
        role: canonical role; empty for a tensor that is kept as it was.
        dtype, shape: of the source's tensor.
        raw: of one expert's, as it is read.
        rows: of the role, first and last (exclusive).
        shared: one tensor holds for every expert.
        chain, values: steps from the source's tensor to canonical rows.
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


def part_record(mapped: MappedTensors, template: str) -> PartRecord:
    """The record of mapped tensors that are named by `template`."""
    info, mapping = mapped.tensors[0], mapped.mapping
    return PartRecord(
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


def recorded_mapping(stored: str, record: PartRecord) -> TensorMapping:
    """The mapping that a manifest's record describes; CheckpointError when it describes none."""
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
    """Layers that are one problem: `problem.dims` has logical and padded sizes, padding is `pad_value`.

    `experts` and `intermediate` are the ranges that the rank holds, first and last (exclusive), of all
    experts and of `whole_intermediate` lanes; `canonical` and `roles` are of those, `parts` of whole
    experts. `router` holds name templates of the router's tensors, as `ExpertNames.router`; the tensors
    themselves are among those that are no experts.
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
    parts: Mapping[str, PartRecord]
    router: Mapping[str, str]


def unpadded(problem: MoEProblem) -> MoEProblem:
    """`problem` with its logical sizes alone, as the source stores it."""
    return replace(problem, dims=replace(problem.dims, padded_hidden=0, padded_intermediate=0))


def group_share(shard: RankShard, group: GroupRecord) -> RankShare:
    """What the rank `shard` holds of a group's layers; errors as of `RankShare`."""
    dims = Dims(group.problem.dims.hidden, group.whole_intermediate)
    return RankShare(replace(group.problem, dims=dims, local_experts=0), shard)


def group_recipe(group: GroupRecord) -> Recipe:
    """How a group's layers are stored; CheckpointError when the record describes no such thing."""
    outputs = {
        role: StoredOutput.from_json(record.made, f"role {role}")
        for role, record in group.roles.items()
        if record.made is not None
    }
    return Recipe(group.canonical, outputs)


def group_mappings(group: GroupRecord) -> dict[str, TensorMapping]:
    """A group's mappings by their stored role; CheckpointError when a record describes none."""
    return {stored: recorded_mapping(stored, record) for stored, record in group.parts.items()}


@dataclass(frozen=True)
class PartHashes:
    """SHA-256 of a part's source tensors, and the source file of each, expert by expert.

    Of a tensor that holds all experts, the bytes of those that the rank has are hashed.
    """

    sha256: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class LayerRecord:
    """One converted layer: its file, the SHA-256 of each role's stored tensor, and of its source.

    `slices` are `SliceHashes` of the canonical roles where the rank holds slices of experts.
    """

    layer: int
    file: str
    size: int
    sha256: Mapping[str, str]
    source: Mapping[str, PartHashes]
    slices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PassthroughRecord(FileRecord):
    """A file of tensors that are no experts: a `whole` source file, or those extracted from `source`."""

    source: str
    whole: bool


@dataclass(frozen=True)
class ManifestRecord:
    """The manifest's document, field by field.

    `files` were copied from the source, `documents` (config, index, the source's config) were written.
    """

    format_version: int
    producer: Mapping[str, str]
    source: SourceRecord
    layout: LayoutRecord
    shard: RankShard
    experts_only: bool
    groups: tuple[GroupRecord, ...]
    layers: tuple[LayerRecord, ...]
    rest: tuple[PassthroughRecord, ...]
    files: tuple[FileRecord, ...]
    documents: tuple[FileRecord, ...]


def is_plain_name(name: str) -> bool:
    """True for a file name that a manifest may hold: no folder, nothing hidden, no odd characters."""
    return bool(_PLAIN_NAME.fullmatch(name))


def manifest_bytes(record: ManifestRecord) -> bytes:
    """The manifest document as it is written."""
    return (json.dumps(to_json(record), indent=1, ensure_ascii=False) + "\n").encode()


def ready_bytes(manifest: bytes) -> bytes:
    """What READY holds for a manifest: its SHA-256."""
    return (hashlib.sha256(manifest).hexdigest() + "\n").encode()


def converted_config(config: Mapping[str, Any], layout: LayoutRecord) -> dict[str, Any]:
    """The source's config with a `quantization_config` that other engines refuse by name."""
    return {
        **config,
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "layout": layout.name,
            "layout_version": layout.version,
        },
    }

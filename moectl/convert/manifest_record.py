"""The manifest's document as records, and what is written beside it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.opening import MANIFEST as MANIFEST
from ..checkpoint.shards import CONFIG as CONFIG
from ..checkpoint.shards import INDEX as INDEX
from ..problem import MoEProblem
from .records import to_json

FORMAT_VERSION = 1
READY = "READY"
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
    """Which weight layout the folder holds, and who reads it."""

    name: str
    target: str
    version: int
    archs: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass(frozen=True)
class RoleRecord:
    """One role of a layer group, all experts along the first axis.

    Attributes:
        dtype, shape: of the canonical tensor, before the chain.
        stored_dtype, stored_shape: of the tensor in the layer's file.
        logical_dtype: what the stored bytes mean (``F4_E2M1``, ``F8_E8M0``, ...).
        chain: the layout's steps from canonical to stored.
    """

    dtype: str
    shape: tuple[int, ...]
    stored_dtype: str
    stored_shape: tuple[int, ...]
    logical_dtype: str
    chain: Any


@dataclass(frozen=True)
class PartRecord:
    """One kind of source tensor, and the rows of a role that it holds.

    `template` has ``{layer}`` and, for one tensor per expert, ``{expert}``.
    """

    template: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int]


@dataclass(frozen=True)
class GroupRecord:
    """Layers that are one problem: `problem.dims` has logical and padded sizes, padding is `pad_value`.

    `router` holds name templates of the router's tensors, as `ExpertNames.router`; the tensors
    themselves are among those that are no experts.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    experts: tuple[int, int]
    pad_value: int
    prefix: str
    roles: Mapping[str, RoleRecord]
    parts: Mapping[str, PartRecord]
    router: Mapping[str, str]


@dataclass(frozen=True)
class PartHashes:
    """SHA-256 of a part's source tensors, and the source file of each, expert by expert."""

    sha256: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class LayerRecord:
    """One converted layer: its file, the SHA-256 of each role's stored tensor, and of its source."""

    layer: int
    file: str
    size: int
    sha256: Mapping[str, str]
    source: Mapping[str, PartHashes]


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class RestRecord(FileRecord):
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
    experts_only: bool
    groups: tuple[GroupRecord, ...]
    layers: tuple[LayerRecord, ...]
    rest: tuple[RestRecord, ...]
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

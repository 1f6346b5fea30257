"""A conversion that is decided: what is read, what is written, and how much of everything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ... import __version__
from ...checkpoint.checkpoint import Checkpoint
from ...files.records import to_json
from ...files.safetensors_writer import FilePlan
from ...files.tensor_table import TensorInfo
from ...problem.moe_problem import MoEProblem
from ..manifest.manifest_records import (
    FORMAT_VERSION,
    GroupRecord,
    LayerRecord,
    LayoutRecord,
    PassthroughRecord,
)
from ..rank_slice import RankShard, RankShare
from ..sources import LayerMapping
from ..stream.layer_writer import Writer
from ..stream.pipeline import SLOTS
from ..worker_partition import WorkerPartition
from .memory_budget import BASE_MEMORY, MIB, slot_buffers


@dataclass(frozen=True)
class LayerPlan:
    """One layer: the unit of work, of files, and of resuming.

    `map` has the experts of `share` alone, each of them whole; `problem` is the rank's, padded. `batch`
    is the number of experts converted at once, `working` the bytes that this takes beside the buffers;
    `holds` says what the bytes of each tensor mean, where its dtype does not.
    """

    map: LayerMapping
    share: RankShare
    problem: MoEProblem
    writer: Writer
    file: FilePlan
    batch: int
    working: int
    holds: Mapping[str, str]

    @property
    def layer(self) -> int:
        return self.map.layer

    @property
    def bytes_in(self) -> int:
        """Bytes of expert tensors read."""
        return sum(stop - start for _, start, stop in self.map.extents)

    @property
    def buffers(self) -> tuple[int, int, int]:
        """Bytes of a batch as it is read, of what is made of it, and as it is written."""
        return slot_buffers(self.map, self.writer, self.batch)


@dataclass(frozen=True)
class PassthroughPlan:
    """Tensors that are no experts, all from one source file.

    `file` is the safetensors file they are extracted to; None when the whole source file is kept.
    """

    source: str
    tensors: tuple[TensorInfo, ...]
    file: FilePlan | None

    @property
    def name(self) -> str:
        return self.file.name if self.file else self.source


class Finalizer(Protocol):
    """What completes an output that is no prepared folder.

    `mark` is the file whose presence says that all tensors are there.
    """

    @property
    def mark(self) -> str: ...

    def check_finished(self, plan: ConversionPlan, folder: Path, out: Path) -> None:
        """Raises UsageError when the finished `out` is not what `plan` makes of `folder`."""

    def finish(
        self,
        plan: ConversionPlan,
        folder: Path,
        out: Path,
        layers: Sequence[LayerRecord],
        rest: Sequence[PassthroughRecord],
        producer: Mapping[str, str],
    ) -> tuple[str, ...]:
        """Writes the last files; names of small files of the source `folder` that were left out."""


@dataclass(frozen=True)
class ConversionPlan:
    """Everything `convert` does, decided and checked before anything is created.

    `ending` is None for a prepared folder, which a manifest and READY complete.
    """

    checkpoint: Checkpoint
    layout: LayoutRecord
    shard: RankShard
    groups: tuple[GroupRecord, ...]
    layers: tuple[LayerPlan, ...]
    rest: tuple[PassthroughPlan, ...]
    experts_only: bool
    max_memory: int
    ending: Finalizer | None = None

    @property
    def index(self) -> dict[str, Any]:
        """The index document: every tensor's file."""
        weight_map = {name: layer.file.name for layer in self.layers for name in layer.file.tensors}
        weight_map.update({info.name: item.name for item in self.rest for info in item.tensors})
        total = sum(info.nbytes for layer in self.layers for info in layer.file.tensors.values())
        metadata = {"total_size": total + self.rest_bytes}
        return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}

    @property
    def tensors_in(self) -> int:
        """Expert tensors read."""
        return sum(1 for layer in self.layers for _ in layer.map.tensors)

    @property
    def tensors_out(self) -> int:
        """Expert tensors written."""
        return sum(len(layer.file.tensors) for layer in self.layers)

    @property
    def bytes_in(self) -> int:
        """Bytes of expert tensors read."""
        return sum(layer.bytes_in for layer in self.layers)

    @property
    def bytes_out(self) -> int:
        """Bytes of the converted layers' files."""
        return sum(layer.file.size for layer in self.layers)

    @property
    def rest_bytes(self) -> int:
        """Bytes of the tensors that are no experts."""
        return sum(info.nbytes for item in self.rest for info in item.tensors)

    @property
    def disk_needed(self) -> int:
        """Bytes that the output takes when no file can be linked."""
        extracted = sum(item.file.size for item in self.rest if item.file)
        whole = sum(info.nbytes for item in self.rest if not item.file for info in item.tensors)
        return self.bytes_out + extracted + whole + 16 * MIB

    @property
    def peak_memory(self) -> int:
        """Bytes needed above the program's own at the largest step."""
        return self._beside + self.slots * sum(self.buffers)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of the buffers that a batch of any layer is read into, made in and written from."""
        return tuple(map(max, zip((0, 0, 0), *(layer.buffers for layer in self.layers), strict=True)))

    @property
    def slots(self) -> int:
        """Batches that may be under way at once within `max_memory`."""
        return max(1, min(SLOTS, (self.max_memory - self._beside) // max(1, sum(self.buffers))))

    @property
    def _beside(self) -> int:
        """Bytes held at most beside the buffers."""
        return BASE_MEMORY + max((layer.working for layer in self.layers), default=0)

    def of_portion(self, portion: WorkerPartition) -> ConversionPlan:
        """The same for the layers of one part, and other tensors where they are that part's."""
        rest = self.rest if portion.has_rest else ()
        return replace(self, layers=tuple(portion.share(self.layers)), rest=rest)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same for a conversion to be resumed, by name."""
        infos = sorted((i.name, i.dtype, i.shape, i.file, i.start) for i in self.checkpoint.tensors.values())
        return {
            "moectl": __version__,
            "config": digest_of(self.checkpoint.config),
            "tensor headers": digest_of(infos),
            **conversion_facts(self),
        }


class Conversion(Protocol):
    """A conversion that is planned, or that a manifest records."""

    @property
    def layout(self) -> LayoutRecord: ...
    @property
    def shard(self) -> RankShard: ...
    @property
    def groups(self) -> tuple[GroupRecord, ...]: ...
    @property
    def experts_only(self) -> bool: ...


def conversion_facts(conversion: Conversion) -> dict[str, str]:
    """What tells one conversion of a checkpoint from another, by name."""
    return {
        "format": str(FORMAT_VERSION),
        "layout": conversion.layout.name,
        "layout version": str(conversion.layout.version),
        "rank": str(conversion.shard),
        "experts only": "yes" if conversion.experts_only else "no",
        "layer groups": digest_of(to_json(conversion.groups)),
    }


def digest_of(value: object) -> str:
    """SHA-256 of JSON data, equal for equal data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


RESERVED = "moectl-"
"""Tensor files of a converted folder begin so; no source file may."""


def layer_file(layer: int) -> str:
    """Name of the file that holds a converted layer."""
    return f"{RESERVED}layer-{layer:05d}.safetensors"

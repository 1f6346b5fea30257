"""The plan of a conversion: what is read, what is written, and the sizes of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ... import __version__
from ...checkpoint.checkpoint import Checkpoint
from ...files.records import to_json
from ...files.safetensors_writer import FilePlan
from ...files.tensor_table import TensorInfo
from ...problem.moe_problem import MoEProblem
from ..manifest.manifest_records import (
    FORMAT_VERSION,
    MANIFEST,
    READY,
    GroupRecord,
    LayerRecord,
    LayoutRecord,
    PassthroughRecord,
)
from ..rank_slice import RankShard, RankSlice
from ..sources import LayerMapping
from ..stream.layer_writer import Writer
from ..stream.pipeline import SLOTS
from ..worker_partition import WorkerPartition
from .memory_budget import BASE_MEMORY, MIB, slot_buffers

SMALL_FILES = 16 * MIB
"""Bytes of disk set aside for a conversion's log, manifest, report and copies of small files."""

if TYPE_CHECKING:
    from .source_pin import PinnedSource


@dataclass(frozen=True)
class LayerPlan:
    """One layer: the unit of work, of output files, and of resuming.

    `map` covers only the experts of `rank_slice`, each of them whole, and `whole` all of the layer's.
    `problem` is the rank's, with padded sizes. `batch` is the number of experts converted at once, `working`
    the bytes that this takes in addition to the buffers; `logical_dtypes` names what a tensor's bytes mean
    where its dtype does not say.
    """

    map: LayerMapping
    whole: LayerMapping
    rank_slice: RankSlice
    problem: MoEProblem
    writer: Writer
    file: FilePlan
    batch: int
    working: int
    logical_dtypes: Mapping[str, str]

    @property
    def layer(self) -> int:
        return self.map.layer

    @property
    def bytes_in(self) -> int:
        """Bytes of expert tensors read."""
        return sum(stop - start for _, start, stop in self.map.extents)

    @property
    def buffers(self) -> tuple[int, int, int]:
        """Bytes of one batch as read from the source, in canonical form, and as written."""
        return slot_buffers(self.map, self.writer, self.batch)


@dataclass(frozen=True)
class PassthroughPlan:
    """Passthrough tensors (copied unchanged) of one source file.

    `file` is the safetensors file they are extracted to; None if the whole source file is kept.
    """

    source: str
    tensors: tuple[TensorInfo, ...]
    file: FilePlan | None

    @property
    def name(self) -> str:
        return self.file.name if self.file else self.source


class Finalizer(Protocol):
    """Writes the last files of an output other than a prepared directory.

    `mark` is the file whose presence shows that all tensors have been written; `kinds` has the layers by what
    becomes of their experts; `served` says whether an engine loads the output.
    """

    @property
    def mark(self) -> str: ...
    @property
    def kinds(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def served(self) -> bool: ...

    def check_finished(self, plan: ConversionPlan, folder: Path, out: Path) -> None:
        """Raises UsageError if the finished `out` is not what `plan` makes of the source `folder`."""

    def finish(
        self,
        plan: ConversionPlan,
        source: PinnedSource,
        out: Path,
        layers: Sequence[LayerRecord],
        passthrough: Sequence[PassthroughRecord],
        producer: Mapping[str, str],
    ) -> tuple[str, ...]:
        """Writes the last files. Returns the names of the source's small files that were skipped.

        Raises CheckpointError, before the `mark` is written, if `source` is not what it was.
        """


@dataclass(frozen=True)
class ConversionPlan:
    """Everything `convert` will do, checked before anything is created.

    `finalizer` is None for a prepared directory, which is completed by a manifest and READY. `passthrough`
    is empty for one of several ranks: what they share is written once, above their directories.
    """

    format_version = FORMAT_VERSION

    checkpoint: Checkpoint
    layout: LayoutRecord
    shard: RankShard
    groups: tuple[GroupRecord, ...]
    layers: tuple[LayerPlan, ...]
    passthrough: tuple[PassthroughPlan, ...]
    experts_only: bool
    max_memory: int
    finalizer: Finalizer | None = None

    @property
    def mark(self) -> str:
        """The file that is written last, whose presence shows that everything else is there."""
        if self.finalizer is not None:
            return self.finalizer.mark
        return READY if self.shard.ranks == 1 else MANIFEST

    @property
    def index(self) -> dict[str, Any]:
        """The index document of an output whose every tensor engines are to load."""
        files = {layer.file.name: layer.file.tensors.values() for layer in self.layers}
        return index_document({**files, **{item.name: item.tensors for item in self.passthrough}})

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
    def passthrough_bytes(self) -> int:
        """Bytes of the passthrough tensors."""
        return sum(info.nbytes for item in self.passthrough for info in item.tensors)

    @property
    def disk_needed(self) -> int:
        """Bytes of disk that the output takes at most: if no file can be linked."""
        extracted = sum(item.file.size for item in self.passthrough if item.file)
        whole = sum(info.nbytes for item in self.passthrough if not item.file for info in item.tensors)
        return self.bytes_out + extracted + whole + SMALL_FILES

    @property
    def peak_memory(self) -> int:
        """Bytes needed at most, on top of the process's baseline."""
        return self._fixed_memory + self.slots * sum(self.buffers)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of the read, canonical and write buffers that fit a batch of any layer."""
        return tuple(map(max, zip((0, 0, 0), *(layer.buffers for layer in self.layers), strict=True)))

    @property
    def slots(self) -> int:
        """Batches in flight at once within `max_memory`."""
        return max(1, min(SLOTS, (self.max_memory - self._fixed_memory) // max(1, sum(self.buffers))))

    @property
    def _fixed_memory(self) -> int:
        """Bytes needed at most in addition to the buffers."""
        return BASE_MEMORY + max((layer.working for layer in self.layers), default=0)

    def for_partition(self, partition: WorkerPartition) -> ConversionPlan:
        """This plan restricted to the layers of one worker, and to passthrough tensors if it copies them."""
        passthrough = self.passthrough if partition.has_passthrough else ()
        return replace(self, layers=tuple(partition.select(self.layers)), passthrough=passthrough)

    def fingerprint(self) -> dict[str, str]:
        """Facts that must be equal for a conversion to be resumed, by name."""
        infos = sorted((i.name, i.dtype, i.shape, i.file, i.start) for i in self.checkpoint.tensors.values())
        return {
            "moectl": __version__,
            "config": digest_of(self.checkpoint.config),
            "tensor headers": digest_of(infos),
            **conversion_facts(self),
        }


class Conversion(Protocol):
    """A conversion, either planned or recorded in a manifest."""

    @property
    def format_version(self) -> int: ...
    @property
    def layout(self) -> LayoutRecord: ...
    @property
    def shard(self) -> RankShard: ...
    @property
    def groups(self) -> tuple[GroupRecord, ...]: ...
    @property
    def experts_only(self) -> bool: ...


def conversion_facts(conversion: Conversion) -> dict[str, str]:
    """Facts that distinguish one conversion of a checkpoint from another, by name."""
    return {
        "format": str(conversion.format_version),
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
"""Prefix of tensor files in a converted directory; source files must not have it."""


LAYER_SUFFIX = ".experts"
"""Suffix of the files of converted layers, in the safetensors format.

Loaders of vLLM, SGLang and transformers take what the index names, or else every ``*.safetensors``; some of
vLLM's (``--load-format runai_streamer``) ignore the index. The tensors of a kernel's layout are for none of
them."""


def layer_file(layer: int) -> str:
    """Name of the file that holds a converted layer."""
    return f"{RESERVED}layer-{layer:05d}{LAYER_SUFFIX}"


def index_document(files: Mapping[str, Iterable[TensorInfo]]) -> dict[str, Any]:
    """A safetensors index of `files`, by name: the file of every tensor, and the bytes of all of them."""
    tensors = {info.name: (file, info.nbytes) for file, infos in files.items() for info in infos}
    return {
        "metadata": {"total_size": sum(size for _, size in tensors.values())},
        "weight_map": {name: tensors[name][0] for name in sorted(tensors)},
    }

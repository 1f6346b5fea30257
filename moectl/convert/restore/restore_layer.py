"""Restores source tensors from converted layers, batch by batch, and checks every hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...files.tensor_table import TensorInfo
from ...lazy_torch import torch
from ..manifest.manifest import Manifest
from ..manifest.manifest_records import SourceTensorRecord, group_rank_slice
from ..manifest.progress_log import Meter
from ..plan.memory_budget import CHAIN_COPIES, LARGEST_BATCH
from ..rank_slice import RankSlice, SliceHashes
from ..recipe.recipe import Recipe
from ..sources import TensorMapping
from ..steps.value_steps import Shapes, Tensors
from ..stream.expert_batches import buffer_bytes, buffer_views
from ..stream.source_reader import Digests, FolderReader, as_bytes, spans


@dataclass(frozen=True, slots=True)
class RestoredRun:
    """A run of bytes of a source tensor.

    Attributes:
        name: the tensor's name.
        file: the source file that held it.
        at: offset of the run from the tensor's start, bytes.
        last: whether this is the tensor's last run in this directory.
        data: the bytes; valid until the next run is produced.
    """

    name: str
    file: str
    at: int
    last: bool
    data: memoryview


Sink = Callable[[RestoredRun], None]


def source_name(part: SourceTensorRecord, layer: int, expert: int) -> str:
    """The source tensor's name for a layer and, if the template has ``{expert}``, an expert."""
    return part.template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def source_tensors(manifest: Manifest, layer: int) -> Iterator[tuple[SourceTensorRecord, str, str, str]]:
    """Every source tensor of a layer: its record, name, file and SHA-256."""
    group, record = manifest.group_of(layer), manifest.layer(layer)
    for key, part in group.parts.items():
        hashes = record.source[key]
        for i, (sha256, file) in enumerate(zip(hashes.sha256, hashes.files, strict=True)):
            yield part, source_name(part, layer, group.experts[0] + i), file, sha256


@dataclass(frozen=True)
class LayerRestorer:
    """Inverts the recipe of one layer of a directory and checks every hash on the way.

    Attributes:
        reader: of the converted directory.
        max_memory: bytes that a batch and its temporaries may take; None for a default.
    """

    manifest: Manifest
    layer: int
    reader: FolderReader
    meter: Meter
    max_memory: int | None = None
    _hashes: Digests = field(default_factory=Digests)
    _slices: SliceHashes = field(default_factory=SliceHashes)

    @property
    def label(self) -> str:
        """Prefix of findings: the directory's name if it is one of several ranks', else empty."""
        return f"{self.manifest.folder.name}/" if self.manifest.record.shard.ranks > 1 else ""

    @property
    def experts(self) -> int:
        """The number of experts in the directory."""
        first, last = self.manifest.group_of(self.layer).experts
        return last - first

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe by which the layer is stored."""
        return self.manifest.group_of(self.layer).recipe

    @cached_property
    def rank_slice(self) -> RankSlice:
        """The directory's slice of the layer."""
        return group_rank_slice(self.manifest.record.shard, self.manifest.group_of(self.layer))

    @property
    def batch(self) -> int:
        """Number of experts restored at once."""
        return restore_batch(self._stored, self.recipe.shapes, self.experts, self.max_memory)

    def batches(self, batch: int) -> Iterator[tuple[int, int, Tensors]]:
        """Yields first and last expert (exclusive), and their canonical and kept tensors, `batch` at a time.

        The tensors are valid until the next batch; for a rank that slices experts they are slices.

        Raises:
            CheckpointError: the layer's file is missing, truncated, or does not match the manifest.
        """
        locations, stored = self.manifest.open_layer(self.layer), self._stored
        buffer = torch.empty(buffer_bytes(stored, batch), dtype=torch.uint8)
        for first, last in spans(self.experts, batch):
            views = buffer_views(buffer, stored, last - first)
            for role, t in sorted(views.items(), key=lambda item: locations[item[0]].start):
                self._read(locations[role], as_bytes(t), first, last, self.experts)
            canonical = {**views, **self.recipe.restore(views, last - first)}
            if self.rank_slice.sliced:
                self._slices.take({role: canonical[role] for role in self.recipe.shapes}, first)
            yield first, last, canonical
        for role, info in locations.items():
            if role not in stored:
                self._read(info, memoryview(bytearray(info.nbytes)), 0, 1, 1)

    def findings(self) -> list[str]:
        """Phrases for each tensor that differs from its recorded hash; valid after the last batch.

        Stored tensors are checked against the hashes taken when they were written, slices of experts against
        those taken when the source was sliced.
        """
        record, slice_hashes = self.manifest.layer(self.layer), self._slices.result()
        return [
            f"{record.file}: {name} fails its SHA-256 check"
            for name, sha256 in record.sha256.items()
            if self._hashes[name] != sha256
        ] + [
            f"{record.file}: the restored slice of {role} does not have the SHA-256 of the source's slice"
            for role, sha256 in record.slices.items()
            if role not in self.recipe.lossy and slice_hashes.get(role) != sha256
        ]

    @cached_property
    def _stored(self) -> Shapes:
        """Types of the stored roles with an expert axis; the others are only hashed."""
        per_layer = {name for name, output in self.recipe.outputs.items() if output.per_layer}
        roles = self.manifest.group_of(self.layer).roles
        return {role: record.type for role, record in roles.items() if role not in per_layer}

    def _read(self, info: TensorInfo, view: memoryview, first: int, last: int, experts: int) -> None:
        expert_bytes = info.nbytes // experts
        self.reader.read(info.file, view, info.start + expert_bytes * first)
        self._hashes.update(info.name, view, last=last == experts)
        self.meter.advance(len(view))


def layer_restorers(
    manifests: Sequence[Manifest],
    layer: int,
    readers: Sequence[FolderReader],
    meter: Meter,
    max_memory: int | None = None,
) -> list[tuple[LayerRestorer, ...]]:
    """The restorers of `layer` in all directories, grouped by the ranks that slice the same experts."""
    size = manifests[0].record.shard.tp_size if len(manifests) > 1 else 1
    memory = max_memory if max_memory is None else max_memory // size
    restorers = [
        LayerRestorer(manifest, layer, reader, meter, memory)
        for manifest, reader in zip(manifests, readers, strict=True)
    ]
    return [tuple(restorers[first : first + size]) for first in range(0, len(restorers), size)]


def is_complete(members: Sequence[LayerRestorer]) -> bool:
    """True if `members` together hold whole experts."""
    return len(members) == members[0].rank_slice.shard.tp_size


def restore_layer(members: Sequence[LayerRestorer], sink: Sink = lambda run: None) -> list[str]:
    """Restores a layer's experts from the directories of the ranks that slice them. Returns findings.

    Source tensors go to `sink`, run by run, each tensor's in order, and are checked against the hashes of
    the source's bytes, so that no source is needed. A single directory of several that slice the same
    experts yields no source tensors; only its own hashes are checked.

    Raises:
        CheckpointError: a layer's file is missing, truncated, or does not match the manifest.
    """
    leader = members[0]
    manifest, layer, rank_slice = leader.manifest, leader.layer, leader.rank_slice
    replaced = leader.recipe.lossy
    mappings, hashes = manifest.group_of(layer).mappings, Digests()
    mappings = {key: mapping for key, mapping in mappings.items() if mapping.role not in replaced}
    complete = is_complete(members)
    batch = min(member.batch for member in members)
    for member_batches in zip(*(member.batches(batch) for member in members), strict=True):
        first, last, canonical = member_batches[0]
        if not complete:
            continue
        if rank_slice.sliced:
            slices = [tensors for _, _, tensors in member_batches]
            canonical = rank_slice.join(slices, list(leader.recipe.shapes))
        for run in source_runs(manifest, layer, mappings, canonical, first, last):
            hashes.update(run.name, run.data, last=run.last)
            sink(run)
    findings = [f"{member.label}{text}" for member in members for text in member.findings()]
    if not complete:
        return findings
    return findings + [
        f"{name}: the restored tensor does not have the SHA-256 of the source"
        for part, name, _, sha256 in source_tensors(manifest, layer)
        if part.role not in replaced and hashes[name] != sha256
    ]


def source_runs(
    manifest: Manifest,
    layer: int,
    mappings: Mapping[str, TensorMapping],
    canonical: Tensors,
    first: int,
    last: int,
) -> Iterator[RestoredRun]:
    """The source's bytes of whole experts, from their canonical and kept tensors.

    `first` and `last` are relative to the directory's first expert; each tensor's runs come in order.
    """
    group, record = manifest.group_of(layer), manifest.layer(layer)
    begin, end = group.experts
    for key, mapping in mappings.items():
        part, files = group.parts[key], record.source[key].files
        if mapping.shared and first:
            continue
        data, size = as_bytes(mapping.restored(canonical).contiguous()), mapping.each
        if mapping.shared:
            yield RestoredRun(source_name(part, layer, 0), files[0], 0, True, data[:size])
        elif "{expert}" in part.template:
            for i in range(first, last):
                name = source_name(part, layer, begin + i)
                yield RestoredRun(name, files[i], 0, True, data[(i - first) * size : (i - first + 1) * size])
        else:
            is_last = last == end - begin
            yield RestoredRun(source_name(part, layer, 0), files[0], (begin + first) * size, is_last, data)


def restore_batch(stored: Shapes, canonical: Shapes, experts: int, max_memory: int | None) -> int:
    """Number of experts of a layer that are restored at once within `max_memory` bytes."""
    largest = max(buffer_bytes(stored, 1), buffer_bytes(canonical, 1))
    room = LARGEST_BATCH if max_memory is None else min(LARGEST_BATCH, max_memory // (CHAIN_COPIES + 2))
    return max(1, min(experts, room // max(1, largest)))

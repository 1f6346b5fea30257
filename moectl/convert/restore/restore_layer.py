"""The way back: stored batches to canonical ones to the source's tensors, every hash compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...files.tensor_table import TensorInfo
from ..manifest.manifest import Manifest
from ..manifest.manifest_records import PartRecord, group_mappings, group_recipe, group_share
from ..manifest.progress_log import Meter
from ..plan.memory_budget import CHAIN_COPIES, LARGEST_BATCH
from ..rank_slice import RankShare, SliceHashes
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
        at: where the run begins, bytes from the tensor's start.
        last: whether no more of it follows from this folder.
        data: the bytes; valid until the next run is asked for.
    """

    name: str
    file: str
    at: int
    last: bool
    data: memoryview


Sink = Callable[[RestoredRun], None]


def part_name(part: PartRecord, layer: int, expert: int) -> str:
    """The source tensor's name for a layer and, where the template has it, an expert."""
    return part.template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def part_tensors(manifest: Manifest, layer: int) -> Iterator[tuple[PartRecord, str, str, str]]:
    """Every source tensor of a layer: its part, name, file and SHA-256."""
    group, record = manifest.group_of(layer), manifest.layer(layer)
    for key, part in group.parts.items():
        hashes = record.source[key]
        for i, (sha256, file) in enumerate(zip(hashes.sha256, hashes.files, strict=True)):
            yield part, part_name(part, layer, group.experts[0] + i), file, sha256


@dataclass(frozen=True)
class LayerRestorer:
    """Undoes the recipe of one layer of a folder and compares every hash on the way.

    Attributes:
        reader: of the converted folder.
        max_memory: bytes that a batch may take with everything made from it; None for a default.
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
        """What findings about the folder begin with: its name, where it is one of several ranks'."""
        return f"{self.manifest.folder.name}/" if self.manifest.record.shard.ranks > 1 else ""

    @property
    def experts(self) -> int:
        """How many experts the folder has."""
        first, last = self.manifest.group_of(self.layer).experts
        return last - first

    @cached_property
    def recipe(self) -> Recipe:
        """How the layer is stored."""
        return group_recipe(self.manifest.group_of(self.layer))

    @cached_property
    def share(self) -> RankShare:
        """What the folder has of the layer."""
        return group_share(self.manifest.record.shard, self.manifest.group_of(self.layer))

    @property
    def batch(self) -> int:
        """Experts that are restored at once."""
        return restore_batch(self._stored, self.recipe.shapes, self.experts, self.max_memory)

    def batches(self, batch: int) -> Iterator[tuple[int, int, Tensors]]:
        """Canonical and kept tensors, `batch` experts at a time, with the first and the last (exclusive).

        They are valid until the next ones are asked for; of slices, where the folder holds those.

        Raises:
            CheckpointError: the layer's file is missing, cut, or not what the manifest says.
        """
        places, stored = self.manifest.open_layer(self.layer), self._stored
        buffer = torch.empty(buffer_bytes(stored, batch), dtype=torch.uint8)
        for first, last in spans(self.experts, batch):
            found = buffer_views(buffer, stored, last - first)
            for role, t in sorted(found.items(), key=lambda item: places[item[0]].start):
                self._read(places[role], as_bytes(t), first, last, self.experts)
            canonical = {**found, **self.recipe.restore(found, last - first)}
            if self.share.sliced:
                self._slices.take({role: canonical[role] for role in self.recipe.shapes}, first)
            yield first, last, canonical
        for role, place in places.items():
            if role not in stored:
                self._read(place, memoryview(bytearray(place.nbytes)), 0, 1, 1)

    def findings(self) -> list[str]:
        """What was read and differs from the recorded hashes, in words; after the last batch.

        Stored tensors are compared with the hash taken when they were written, slices of experts with
        that of what was cut.
        """
        record, held = self.manifest.layer(self.layer), self._slices.result()
        return [
            f"{record.file}: {name} does not have the SHA-256 that was written"
            for name, sha256 in record.sha256.items()
            if self._hashes[name] != sha256
        ] + [
            f"{record.file}: the slice of {role} does not come back with the SHA-256 that was cut"
            for role, sha256 in record.slices.items()
            if role not in self.recipe.lossy and held.get(role) != sha256
        ]

    @cached_property
    def _stored(self) -> Shapes:
        """Stored roles with an expert axis; the others are only hashed."""
        whole = {name for name, output in self.recipe.outputs.items() if output.per_layer}
        roles = self.manifest.group_of(self.layer).roles
        return {role: r.type for role, r in roles.items() if role not in whole}

    def _read(self, place: TensorInfo, view: memoryview, first: int, last: int, experts: int) -> None:
        each = place.nbytes // experts
        self.reader.read(place.file, view, place.start + each * first)
        self._hashes.update(place.name, view, last=last == experts)
        self.meter.advance(len(view))


def layer_restorers(
    manifests: Sequence[Manifest],
    layer: int,
    readers: Sequence[FolderReader],
    meter: Meter,
    max_memory: int | None = None,
) -> list[tuple[LayerRestorer, ...]]:
    """One folder's restorer of `layer`, or every rank's in runs of those that slice the same experts."""
    found = zip(manifests, readers, strict=True)
    size = manifests[0].record.shard.tp_size if len(manifests) > 1 else 1
    memory = max_memory if max_memory is None else max_memory // size
    every = [LayerRestorer(manifest, layer, reader, meter, memory) for manifest, reader in found]
    return [tuple(every[first : first + size]) for first in range(0, len(every), size)]


def is_complete(members: Sequence[LayerRestorer]) -> bool:
    """True when `members` have whole experts, by themselves or together."""
    return len(members) == members[0].share.shard.tp_size


def restore_layer(members: Sequence[LayerRestorer], sink: Sink = lambda run: None) -> list[str]:
    """Restores a layer's experts from the folders of the ranks that slice them; what is wrong, in words.

    Whole experts' tensors go to `sink`, run by run, each tensor's in order, and are compared with the
    hash of the source's bytes, so that no source is needed. One folder of several that slice the same
    experts gives no source tensors: its own hashes are all that is compared.

    Raises:
        CheckpointError: a layer's file is missing, cut, or not what the manifest says.
    """
    one = members[0]
    manifest, layer, share = one.manifest, one.layer, one.share
    replaced = one.recipe.lossy
    mappings, hashes = group_mappings(manifest.group_of(layer)), Digests()
    mappings = {key: mapping for key, mapping in mappings.items() if mapping.role not in replaced}
    complete = is_complete(members)
    batch = min(member.batch for member in members)
    for found in zip(*(member.batches(batch) for member in members), strict=True):
        first, last, canonical = found[0]
        if not complete:
            continue
        if share.sliced:
            canonical = share.join([slices for _, _, slices in found], list(one.recipe.shapes))
        for run in source_runs(manifest, layer, mappings, canonical, first, last):
            hashes.update(run.name, run.data, last=run.last)
            sink(run)
    wrong = [f"{member.label}{text}" for member in members for text in member.findings()]
    if not complete:
        return wrong
    return wrong + [
        f"{name} does not come back with the SHA-256 of the source"
        for part, name, _, sha256 in part_tensors(manifest, layer)
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
    """The source's bytes of whole experts, whose canonical and kept tensors `canonical` has.

    `first` and `last` count from the folder's first expert; each tensor's runs come in order.
    """
    group, record = manifest.group_of(layer), manifest.layer(layer)
    begin, end = group.experts
    for key, mapping in mappings.items():
        part, files = group.parts[key], record.source[key].files
        if mapping.shared and first:
            continue
        data, each = as_bytes(mapping.restored(canonical).contiguous()), mapping.each
        if mapping.shared:
            yield RestoredRun(part_name(part, layer, 0), files[0], 0, True, data[:each])
        elif "{expert}" in part.template:
            for i in range(first, last):
                name, run = (
                    part_name(part, layer, begin + i),
                    data[(i - first) * each : (i - first + 1) * each],
                )
                yield RestoredRun(name, files[i], 0, True, run)
        else:
            ends = last == end - begin
            yield RestoredRun(part_name(part, layer, 0), files[0], (begin + first) * each, ends, data)


def restore_batch(stored: Shapes, canonical: Shapes, experts: int, max_memory: int | None) -> int:
    """Experts of a layer that are restored at once."""
    largest = max(buffer_bytes(stored, 1), buffer_bytes(canonical, 1))
    room = LARGEST_BATCH if max_memory is None else min(LARGEST_BATCH, max_memory // (CHAIN_COPIES + 2))
    return max(1, min(experts, room // max(1, largest)))

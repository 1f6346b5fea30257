"""The way back: stored batches to canonical ones to the source's tensors, every hash compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..checkpoint.model import TensorInfo
from .batches import Digests, FolderReader, as_bytes, spans
from .manifest import Manifest
from .manifest_record import PartRecord, group_parts, group_recipe, group_share
from .plan import CHAIN_COPIES, LARGEST_BATCH
from .progress import Meter
from .recipe import Recipe
from .shards import Share, SliceHashes
from .sources import PartForm, carve, carved_bytes
from .values import Shapes, Tensors


@dataclass(frozen=True, slots=True)
class Restored:
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


Sink = Callable[[Restored], None]


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
    """Undoes the recipe of one layer and compares every hash on the way.

    Attributes:
        reader: of the converted folder.
        sink: gets the source's bytes, run by run, each tensor's in order.
        max_memory: bytes that a batch may take with everything made from it; None for a default.
    """

    manifest: Manifest
    layer: int
    reader: FolderReader
    meter: Meter
    sink: Sink = lambda run: None
    max_memory: int | None = None

    @cached_property
    def _recipe(self) -> Recipe:
        return group_recipe(self.manifest.group_of(self.layer))

    @cached_property
    def _forms(self) -> dict[str, PartForm]:
        return group_parts(self.manifest.group_of(self.layer))

    @cached_property
    def _share(self) -> Share:
        return group_share(self.manifest.record.shard, self.manifest.group_of(self.layer))

    @cached_property
    def _slices(self) -> SliceHashes:
        return SliceHashes()

    def canonical(self, stored: Tensors, experts: int) -> dict[str, Tensor]:
        """Canonical and kept tensors of a batch of `experts`; of slices, where the folder holds those."""
        return {**stored, **self._recipe.restore(stored, experts)}

    def run(self) -> list[str]:
        """Restores the layer; what differs from the recorded hashes, in words.

        Stored tensors are compared with the hash taken when they were written, restored ones with
        the hash of the source's bytes, so that no source is needed. A folder that holds slices of
        experts gives no source tensors; its slices are compared with the hashes taken of them.

        Raises:
            CheckpointError: the layer's file is missing, cut, or not what the manifest says.
        """
        record = self.manifest.layer(self.layer)
        places = self.manifest.open_layer(self.layer)
        hashes = Digests()
        stored, experts = self._split()
        batch = restore_batch(stored, self._recipe.shapes, experts, self.max_memory)
        buffer = torch.empty(carved_bytes(stored, batch), dtype=torch.uint8)
        for first, last in spans(experts, batch):
            found = carve(buffer, stored, last - first)
            for role, t in sorted(found.items(), key=lambda item: places[item[0]].start):
                self._read(places[role], as_bytes(t), first, last, experts, hashes)
            self._restore(found, first, last, hashes)
        for role, place in places.items():
            if role not in stored:
                self._read(place, memoryview(bytearray(place.nbytes)), 0, 1, 1, hashes)
        wrong = [
            f"{record.file}: {place.name} does not have the SHA-256 that was written"
            for place in places.values()
            if hashes[place.name] != record.sha256[place.name]
        ]
        if self._share.sliced:
            held = self._slices.result()
            return wrong + [
                f"{record.file}: the slice of {role} does not come back with the SHA-256 that was cut"
                for role, sha256 in record.slices.items()
                if held.get(role) != sha256
            ]
        return wrong + [
            f"{name} does not come back with the SHA-256 of the source"
            for _, name, _, sha256 in part_tensors(self.manifest, self.layer)
            if hashes[name] != sha256
        ]

    def _split(self) -> tuple[Shapes, int]:
        """Stored roles with an expert axis, and the number of experts; the others are only hashed."""
        group = self.manifest.group_of(self.layer)
        whole = {name for name, output in self._recipe.outputs.items() if output.per_layer}
        stored = {role: (r.shape, r.dtype) for role, r in group.roles.items() if role not in whole}
        return stored, group.experts[1] - group.experts[0]

    def _read(
        self, place: TensorInfo, view: memoryview, first: int, last: int, experts: int, hashes: Digests
    ) -> None:
        each = place.nbytes // experts
        self.reader.read(place.file, view, place.start + each * first)
        hashes.update(place.name, view, last=last == experts)
        self.meter.advance(len(view))

    def _restore(self, stored: Tensors, first: int, last: int, hashes: Digests) -> None:
        canonical = self.canonical(stored, last - first)
        if self._share.sliced:
            self._slices.take({role: canonical[role] for role in self._recipe.shapes}, first)
            return
        for run in source_runs(self.manifest, self.layer, self._forms, canonical, first, last):
            hashes.update(run.name, run.data, last=run.last)
            self.sink(run)


def source_runs(
    manifest: Manifest, layer: int, forms: Mapping[str, PartForm], canonical: Tensors, first: int, last: int
) -> Iterator[Restored]:
    """The source's bytes of whole experts, whose canonical and kept tensors `canonical` has.

    `first` and `last` count from the folder's first expert; each tensor's runs come in order.
    """
    group, record = manifest.group_of(layer), manifest.layer(layer)
    begin, end = group.experts
    for key, form in forms.items():
        part, files = group.parts[key], record.source[key].files
        if form.shared and first:
            continue
        data, each = as_bytes(form.stored(canonical)), form.each
        if form.shared:
            yield Restored(part_name(part, layer, 0), files[0], 0, True, data[:each])
        elif "{expert}" in part.template:
            for i in range(first, last):
                name, run = (
                    part_name(part, layer, begin + i),
                    data[(i - first) * each : (i - first + 1) * each],
                )
                yield Restored(name, files[i], 0, True, run)
        else:
            ends = last == end - begin
            yield Restored(part_name(part, layer, 0), files[0], (begin + first) * each, ends, data)


def restore_batch(stored: Shapes, canonical: Shapes, experts: int, max_memory: int | None) -> int:
    """Experts of a layer that are restored at once."""
    largest = max(carved_bytes(stored, 1), carved_bytes(canonical, 1))
    room = LARGEST_BATCH if max_memory is None else min(LARGEST_BATCH, max_memory // (CHAIN_COPIES + 2))
    return max(1, min(experts, room // max(1, largest)))

"""The way back: stored batches to canonical ones to the source's tensors, every hash compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..checkpoint.model import TensorInfo
from .batches import Digests, FolderReader, as_bytes, spans
from .manifest import Manifest
from .manifest_record import PartRecord, group_parts, group_recipe
from .plan import CHAIN_COPIES, LARGEST_BATCH
from .progress import Meter
from .recipe import Recipe
from .sources import PartForm, carve, carved_bytes
from .values import Shapes, Tensors


@dataclass(frozen=True, slots=True)
class Restored:
    """A run of bytes of a source tensor.

    Attributes:
        name: the tensor's name.
        file: the source file that held it.
        at: where the run begins, bytes from the tensor's start.
        last: whether it ends with the tensor.
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

    def run(self) -> list[str]:
        """Restores the layer; what differs from the recorded hashes, in words.

        Stored tensors are compared with the hash taken when they were written, restored ones with
        the hash of the source's bytes, so that no source is needed.

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
        canonical: dict[str, Tensor] = {**stored, **self._recipe.restore(stored, last - first)}
        group, record = self.manifest.group_of(self.layer), self.manifest.layer(self.layer)
        for key, form in self._forms.items():
            part, files = group.parts[key], record.source[key].files
            data = as_bytes(form.stored(canonical))
            if form.shared:
                runs = [(part_name(part, self.layer, 0), files[0], 0, True, data[: form.each])][: first == 0]
            elif "{expert}" in part.template:
                runs = [
                    (
                        part_name(part, self.layer, group.experts[0] + number),
                        files[number],
                        0,
                        True,
                        data[(number - first) * form.each : (number - first + 1) * form.each],
                    )
                    for number in range(first, last)
                ]
            else:
                runs = [
                    (
                        part_name(part, self.layer, 0),
                        files[0],
                        first * form.each,
                        last == group.experts[1] - group.experts[0],
                        data,
                    )
                ]
            for name, file, at, ends, view in runs:
                hashes.update(name, view, last=ends)
                self.sink(Restored(name, file, at, ends, view))


def restore_batch(stored: Shapes, canonical: Shapes, experts: int, max_memory: int | None) -> int:
    """Experts of a layer that are restored at once."""
    largest = max(carved_bytes(stored, 1), carved_bytes(canonical, 1))
    room = LARGEST_BATCH if max_memory is None else min(LARGEST_BATCH, max_memory // (CHAIN_COPIES + 2))
    return max(1, min(experts, room // max(1, largest)))

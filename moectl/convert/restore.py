"""The way back: stored batches to canonical ones to the source's tensors, every hash compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..checkpoint.model import TensorInfo
from .batches import Digests, FolderReader, as_bytes, as_tensor, spans, undo_chain
from .layout import Chain
from .manifest import Manifest
from .manifest_record import PartRecord, RoleRecord
from .plan import CHAIN_COPIES, LARGEST_BATCH
from .progress import Meter
from .safetensors_file import nbytes


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
    """Undoes the chains of one layer and compares every hash on the way.

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

    def run(self) -> list[str]:
        """Restores the layer; what differs from the recorded hashes, in words.

        Stored tensors are compared with the hash taken when they were written, restored ones with
        the hash of the source's bytes, so that no source is needed.

        Raises:
            CheckpointError: the layer's file is missing, cut, or not what the manifest says.
        """
        group, record = self.manifest.group_of(self.layer), self.manifest.layer(self.layer)
        places = self.manifest.open_layer(self.layer)
        hashes = Digests()
        wrong: list[str] = []
        for role, item in group.roles.items():
            place = places[role]
            self._role(role, item, place, hashes)
            if hashes[place.name] != record.sha256[role]:
                wrong.append(f"{record.file}: {place.name} does not have the SHA-256 that was written")
        return wrong + [
            f"{name} does not come back with the SHA-256 of the source"
            for _, name, _, sha256 in part_tensors(self.manifest, self.layer)
            if hashes[name] != sha256
        ]

    def _role(self, role: str, item: RoleRecord, place: TensorInfo, hashes: Digests) -> None:
        chain = Chain.from_json(item.chain)
        experts = item.shape[0]
        each = place.nbytes // experts
        batch = restore_batch(item, self.max_memory)
        buffer = torch.empty(each * batch, dtype=torch.uint8)
        for first, last in spans(experts, batch):
            view = buffer.numpy().data[: each * (last - first)]
            self.reader.read(place.file, view, place.start + each * first)
            hashes.update(place.name, view, last=last == experts)
            stored = as_tensor(buffer, item.stored_dtype, (last - first, *item.stored_shape[1:]))
            shape = (last - first, *item.shape[1:])
            canonical = undo_chain(chain, stored, shape, item.dtype)
            for run in self._runs(role, item, as_bytes(canonical), first, last):
                hashes.update(run.name, run.data, last=run.last)
                self.sink(run)
            self.meter.advance(len(view))

    def _runs(
        self, role: str, item: RoleRecord, data: memoryview, first: int, last: int
    ) -> Iterator[Restored]:
        """A canonical batch cut into runs of the source's tensors."""
        group, record = self.manifest.group_of(self.layer), self.manifest.layer(self.layer)
        each = len(data) // (last - first)
        row = each // (item.shape[1] if len(item.shape) > 1 else 1)
        for key, part in group.parts.items():
            if part.role != role:
                continue
            files = record.source[key].files
            if "{expert}" not in part.template:
                name = part_name(part, self.layer, 0)
                yield Restored(name, files[0], first * each, last == item.shape[0], data)
                continue
            for number in range(first, last):
                at = (number - first) * each
                view = data[at + part.rows[0] * row : at + part.rows[1] * row]
                name = part_name(part, self.layer, group.experts[0] + number)
                yield Restored(name, files[number], 0, True, view)


def restore_batch(item: RoleRecord, max_memory: int | None) -> int:
    """Experts of a role that are restored at once."""
    experts = item.shape[0]
    largest = max(nbytes(item.dtype, item.shape), nbytes(item.stored_dtype, item.stored_shape)) // experts
    room = LARGEST_BATCH if max_memory is None else min(LARGEST_BATCH, max_memory // (CHAIN_COPIES + 2))
    return max(1, min(experts, room // max(1, largest)))

"""Batches of a mapped layer's experts: read from files, then converted to canonical form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorInfo
from ...lazy_torch import Tensor, torch
from ...torch_dtypes import TORCH_DTYPES
from ..recipe.chain import BLOCK_BYTES
from ..sources.tensor_mapping import LayerMapping
from ..steps.value_steps import Shapes
from .file_transfers import Transfer, flat, transfer
from .source_reader import FolderReader, as_bytes

Read = Callable[[TensorInfo, int, memoryview], None]
"""Fills a buffer with a tensor's bytes, starting at an offset within the tensor."""

ALIGN = 256
"""Alignment of the tensors in a buffer, in bytes."""


def buffer_views(buffer: Tensor, shapes: Shapes, experts: int) -> dict[str, Tensor]:
    """Tensors of `shapes` for `experts` experts, packed into a uint8 `buffer`, each aligned to `ALIGN`."""
    views: dict[str, Tensor] = {}
    offset = 0
    for role, tensor_type in shapes.items():
        dtype, shape = tensor_type.with_first_axis(experts)
        size = nbytes(dtype, shape)
        views[role] = buffer[offset : offset + size].view(TORCH_DTYPES[dtype]).reshape(shape)
        offset += -(-size // ALIGN) * ALIGN
    return views


def buffer_bytes(shapes: Shapes, experts: int) -> int:
    """Size in bytes of the buffer that `buffer_views` needs."""
    sizes = (nbytes(*tensor_type.with_first_axis(experts)) for tensor_type in shapes.values())
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


class ExpertBatches:
    """Reads batches of a layer's experts and converts them to canonical form.

    A pipeline runs the two steps in different threads: `read` fills stored tensors, `convert` makes canonical
    roles of them. `canonical` and `load` do both, in newly allocated buffers.

    Args:
        layer: the mapped layer.
        roles: the canonical roles to produce; None for all of them and the kept tensors.
    """

    def __init__(self, layer: LayerMapping, roles: frozenset[str] | None = None) -> None:
        self.layer = layer
        self._mapped = layer.filling(roles)
        selected = {*layer.shapes, *layer.read_shapes} if roles is None else set(roles)
        selected |= {mapped.mapping.side for mapped in self._mapped}
        self._read_shapes, self._made_shapes = (
            {role: tensor_type for role, tensor_type in shapes.items() if role in selected}
            for shapes in (layer.read_shapes, layer.made_shapes)
        )

    def read_bytes(self, experts: int) -> int:
        """Size in bytes of the buffer that `read` fills."""
        return buffer_bytes(self._read_shapes, experts)

    def made_bytes(self, experts: int) -> int:
        """Size in bytes of the buffer that `convert` fills."""
        return buffer_bytes(self._made_shapes, experts)

    def stored(self, buffer: Tensor, experts: int) -> dict[str, Tensor]:
        """Views of a buffer of `read_bytes` as the tensors that `read` fills (`LayerMapping.read_shapes`)."""
        return buffer_views(buffer, self._read_shapes, experts)

    def read(self, first: int, last: int, read: Read, stored: Mapping[str, Tensor]) -> None:
        """Fills `stored` with experts `first` to `last` (exclusive), reading in file order."""
        views = {role: as_bytes(t) for role, t in stored.items()}
        reads = self._reads(first, last)
        for role, at, info, offset, size in sorted(reads, key=lambda r: (r[2].file, r[2].start + r[3])):
            read(info, offset, views[role][at : at + size])

    def transfers(self, first: int, last: int, stored: Mapping[str, Tensor]) -> list[Transfer]:
        """The transfers that fill `stored`, on any device, with experts `first` to `last` (exclusive)."""
        targets = {role: flat(t) for role, t in stored.items()}
        return [
            Transfer(info.file, info.start + offset, size, targets[role], at)
            for role, at, info, offset, size in sorted(self._reads(first, last), key=lambda r: r[:2])
        ]

    def _reads(self, first: int, last: int) -> Iterator[tuple[str, int, TensorInfo, int, int]]:
        """What experts `first` to `last` are read from: the role that is filled, the offset in its batch, the
        tensor, the offset in it, and the number of bytes."""
        for mapped in self._mapped:
            mapping, each = mapped.mapping, mapped.mapping.each
            role, expert_bytes, skipped = mapping.side, each, 0
            if mapping.direct:
                role, tensor_type = mapping.role, self.layer.shapes[mapping.role].with_first_axis(1)
                expert_bytes = nbytes(*tensor_type)
                skipped = mapping.rows[0] * (expert_bytes // tensor_type.shape[1])
            for info, offset, size, expert in mapped.run(first, last):
                at = (expert - first) * expert_bytes + skipped
                if expert_bytes == each:
                    yield role, at, info, offset, size
                    continue
                for i in range(size // each):
                    yield role, at + i * expert_bytes, info, offset + i * each, each

    def convert(self, stored: Mapping[str, Tensor], buffer: Tensor) -> dict[str, Tensor]:
        """Canonical and kept tensors (see `LayerMapping.batch_shapes`) of the tensors that `read` has filled.

        Roles that need conversion are written to `buffer`, of `made_bytes`, on the same device as `stored`.
        """
        experts = len(next(iter(stored.values())))
        return self._convert(stored, buffer_views(buffer, self._made_shapes, experts))

    def _convert(self, stored: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch = {role: t for role, t in {**stored, **outputs}.items() if role in self.layer.batch_shapes}
        for mapped in self._mapped:
            mapping = mapped.mapping
            if not mapping.role or mapping.direct:
                continue
            raw = stored[mapping.side]
            target = batch[mapping.role][:, mapping.rows[0] : mapping.rows[1]]
            block = len(raw) if raw.is_cuda else max(1, BLOCK_BYTES // max(1, mapping.each))
            for at in range(0, len(raw), block):
                rows = target[at : at + block]
                rows.copy_(mapping.canonical(raw[at : at + block]).reshape(rows.shape))
        return batch

    def load(self, first: int, last: int, read: Read) -> dict[str, Tensor]:
        """Canonical and kept tensors of experts `first` to `last` (exclusive), newly allocated."""
        experts = last - first
        sizes = self.read_bytes(experts), self.made_bytes(experts)
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        stored = self.stored(buffer, experts)
        self.read(first, last, read, stored)
        return self.convert(stored, buffer[sizes[0] :])

    def canonical(
        self, experts: Sequence[int] | Tensor, reader: FolderReader, device: torch.device
    ) -> dict[str, Tensor]:
        """Canonical tensors ``[len(experts), ...]`` of any `experts`, read and converted on `device`."""
        ids = list(map(int, experts))
        batch = {
            role: torch.empty((len(ids), *shape[1:]), dtype=TORCH_DTYPES[dtype], device=device)
            for role, (dtype, shape) in self.layer.shapes.items()
        }
        others = {role: kind for role, kind in self._read_shapes.items() if role not in batch}
        buffer = torch.empty(buffer_bytes(others, len(ids)), dtype=torch.uint8, device=device)
        stored = {role: t for role, t in batch.items() if role in self._read_shapes}
        stored |= buffer_views(buffer, others, len(ids))
        transfers: list[Transfer] = []
        for first, last in _runs(ids):
            rows = {role: t[first:last] for role, t in stored.items()}
            transfers += self.transfers(ids[first], ids[last - 1] + 1, rows)
        transfer(reader, transfers, device)
        self._convert(stored, {role: batch[role] for role in self._made_shapes})
        return batch


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Index ranges, first and last (exclusive), of the runs of consecutive numbers in `ids`."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, i
            first = i

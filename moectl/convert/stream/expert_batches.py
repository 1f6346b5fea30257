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
from .source_reader import as_bytes

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
        reads: list[tuple[str, int, TensorInfo, int, memoryview]] = []
        for mapped in self._mapped:
            mapping = mapped.mapping
            rows_of = slice(*mapping.rows)
            target = stored[mapping.role][:, rows_of] if mapping.direct else stored[mapping.side]
            for info, offset, _, expert in mapped.run(first, last):
                if mapped.per_expert or mapping.shared:
                    rows = [target[expert - first]]
                else:
                    rows = [target] if target.is_contiguous() else list(target)
                for i, row in enumerate(rows):
                    start = offset + i * mapping.each
                    reads.append((info.file, info.start + start, info, start, as_bytes(row)))
        for _, _, info, offset, view in sorted(reads, key=lambda item: item[:2]):
            read(info, offset, view)

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

    def canonical(self, experts: Sequence[int] | Tensor, read: Read) -> dict[str, Tensor]:
        """Canonical tensors ``[len(experts), ...]`` of any `experts`; consecutive ids are read together."""
        ids = list(map(int, experts))
        batch = {
            role: torch.empty((len(ids), *shape[1:]), dtype=TORCH_DTYPES[dtype])
            for role, (dtype, shape) in self.layer.shapes.items()
        }
        others = {role: kind for role, kind in self._read_shapes.items() if role not in batch}
        for first, last in _runs(ids):
            rows = {role: t[first:last] for role, t in batch.items()}
            buffer = torch.empty(buffer_bytes(others, last - first), dtype=torch.uint8)
            stored = {role: rows[role] for role in self._read_shapes if role in rows}
            stored |= buffer_views(buffer, others, last - first)
            self.read(ids[first], ids[last - 1] + 1, read, stored)
            self._convert(stored, {role: rows[role] for role in self._made_shapes})
        return batch


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Index ranges, first and last (exclusive), of the runs of consecutive numbers in `ids`."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, i
            first = i

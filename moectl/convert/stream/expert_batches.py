"""A mapped layer's experts, a batch at a time: read from files, then made canonical."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorInfo
from ...torch_dtypes import TORCH_DTYPES
from ..recipe.chain import BLOCK_BYTES
from ..sources.tensor_mapping import LayerMapping
from ..steps.value_steps import Shapes
from .source_reader import as_bytes

Read = Callable[[TensorInfo, int, memoryview], None]
"""Fills a buffer with a tensor's bytes from an offset in it."""

ALIGN = 256


def buffer_views(buffer: Tensor, shapes: Shapes, experts: int) -> dict[str, Tensor]:
    """Tensors of `shapes` for `experts`, one after the other in a uint8 `buffer`, each aligned."""
    views: dict[str, Tensor] = {}
    at = 0
    for role, each in shapes.items():
        dtype, shape = each.with_first_axis(experts)
        size = nbytes(dtype, shape)
        views[role] = buffer[at : at + size].view(TORCH_DTYPES[dtype]).reshape(shape)
        at += -(-size // ALIGN) * ALIGN
    return views


def buffer_bytes(shapes: Shapes, experts: int) -> int:
    """Bytes of the buffer that `buffer_views` needs."""
    sizes = (nbytes(*each.with_first_axis(experts)) for each in shapes.values())
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


class ExpertBatches:
    """Batches of a layer's experts, read into and made in buffers of the caller's or of their own.

    A batch is made in two steps, which a pipeline runs in different threads: `read` fills the tensors that
    are stored, `convert` makes canonical roles of them. `canonical` and `load` do both.

    Args:
        layer: the mapped layer.
        roles: canonical roles that are wanted; all of them, and kept tensors, for None.
    """

    def __init__(self, layer: LayerMapping, roles: frozenset[str] | None = None) -> None:
        self.layer = layer
        self._mapped = layer.filling(roles)
        wanted = {*layer.shapes, *layer.read_shapes} if roles is None else set(roles)
        wanted |= {each.mapping.side for each in self._mapped}
        self._read_shapes, self._made_shapes = (
            {role: form for role, form in shapes.items() if role in wanted}
            for shapes in (layer.read_shapes, layer.made_shapes)
        )

    def read_bytes(self, experts: int) -> int:
        """Bytes of a buffer for what `read` fills."""
        return buffer_bytes(self._read_shapes, experts)

    def made_bytes(self, experts: int) -> int:
        """Bytes of a buffer for what `convert` makes."""
        return buffer_bytes(self._made_shapes, experts)

    def stored(self, buffer: Tensor, experts: int) -> dict[str, Tensor]:
        """The tensors that `read` fills, in a buffer of `read_bytes`: see `LayerMapping.read_shapes`."""
        return buffer_views(buffer, self._read_shapes, experts)

    def read(self, first: int, last: int, read: Read, stored: Mapping[str, Tensor]) -> None:
        """Fills `stored` with experts `first` to `last` (exclusive).

        Bytes are asked for in the order in which they lie in the files.
        """
        wanted: list[tuple[str, int, TensorInfo, int, memoryview]] = []
        for mapped in self._mapped:
            mapping = mapped.mapping
            rows_of = slice(*mapping.rows)
            target = stored[mapping.role][:, rows_of] if mapping.direct else stored[mapping.side]
            for info, at, _, expert in mapped.run(first, last):
                if mapped.per_expert or mapping.shared:
                    rows = [target[expert - first]]
                else:
                    rows = [target] if target.is_contiguous() else list(target)
                for i, row in enumerate(rows):
                    start = at + i * mapping.each
                    wanted.append((info.file, info.start + start, info, start, as_bytes(row)))
        for _, _, info, at, view in sorted(wanted, key=lambda item: item[:2]):
            read(info, at, view)

    def convert(self, stored: Mapping[str, Tensor], buffer: Tensor) -> dict[str, Tensor]:
        """Canonical and kept tensors (see `LayerMapping.batch_shapes`) of what `read` has filled.

        Roles that are not stored as they are lie in `buffer`, of `made_bytes`, on the device of both.
        """
        experts = len(next(iter(stored.values())))
        return self._convert(stored, buffer_views(buffer, self._made_shapes, experts))

    def _convert(self, stored: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch = {role: t for role, t in {**stored, **made}.items() if role in self.layer.batch_shapes}
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
        """Canonical and kept tensors of experts `first` to `last` (exclusive), in buffers of their own."""
        experts = last - first
        sizes = self.read_bytes(experts), self.made_bytes(experts)
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        stored = self.stored(buffer, experts)
        self.read(first, last, read, stored)
        return self.convert(stored, buffer[sizes[0] :])

    def canonical(self, experts: Sequence[int] | Tensor, read: Read) -> dict[str, Tensor]:
        """The canonical tensors ``[len(experts), ...]`` of any `experts`; neighbours are read together."""
        ids = list(map(int, experts))
        batch = {
            role: torch.empty((len(ids), *shape[1:]), dtype=TORCH_DTYPES[dtype])
            for role, (dtype, shape) in self.layer.shapes.items()
        }
        others = {role: form for role, form in self._read_shapes.items() if role not in batch}
        for first, last in _runs(ids):
            rows = {role: t[first:last] for role, t in batch.items()}
            buffer = torch.empty(buffer_bytes(others, last - first), dtype=torch.uint8)
            stored = {role: rows[role] for role in self._read_shapes if role in rows}
            stored |= buffer_views(buffer, others, last - first)
            self.read(ids[first], ids[last - 1] + 1, read, stored)
            self._convert(stored, {role: rows[role] for role in self._made_shapes})
        return batch


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Places of `ids` cut where an id does not follow the one before."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, i
            first = i

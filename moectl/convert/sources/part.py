"""Stored tensors and the canonical rows that they hold, both ways, a batch of experts at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorInfo, TensorType
from ...problem import MoEProblem
from ...torch_dtypes import TORCH_DTYPES
from ..chain import BLOCK_BYTES, Chain
from ..recipe import SIDE
from ..transforms import Shape, View
from ..values import Shapes, Value
from .extras import check_extra

STORED = SIDE + "stored."
"""Roles that begin so are stored tensors as they were: what the canonical form does not give back."""


@dataclass(frozen=True)
class Part:
    """One kind of stored tensor and its place in a canonical role.

    Attributes:
        stored: its role as `ExpertNames.experts` and the table of storages spell it.
        role: the canonical role that it fills rows of; ``""`` for a tensor that carries no weights.
        half: 0 or 1 for the first or second half of the role's rows, None for all of them.
        chain: moving steps from stored tensors, experts first, to canonical rows.
        values: value steps after the chain; where one is not exact, the stored tensor is kept aside.
    """

    stored: str
    role: str
    half: int | None = None
    chain: Chain = field(default_factory=Chain)
    values: tuple[Value, ...] = ()

    @property
    def kept(self) -> bool:
        """True when its bytes are kept aside for the way back."""
        return not self.role or not all(value.exact and not value.reads for value in self.values)

    @property
    def side(self) -> str:
        """The role under which it is kept aside."""
        return STORED + self.stored

    def form(self, dtype: str, shape: Shape) -> TensorType:
        """Shape and dtype of the canonical rows of stored tensors, axes as the steps leave them."""
        found = self.chain.stored_type(dtype, shape)
        for value in self.values:
            found = value.output_type(*found)
        return found

    @property
    def direct(self) -> bool:
        """True when its bytes are canonical rows as they are."""
        return bool(self.role) and not self.values and all(isinstance(s, View) for s in self.chain.steps)


@dataclass(frozen=True)
class PartForm:
    """A part with its sizes.

    Attributes:
        dtype, shape: of one expert's stored tensor, without the expert axis; one-byte dtypes are U8.
        rows: first and last row (exclusive) of the canonical role that it fills.
        shared: one tensor holds for every expert.
    """

    part: Part
    dtype: str
    shape: Shape
    rows: tuple[int, int]
    shared: bool = False

    @property
    def type(self) -> TensorType:
        """One expert's stored tensor."""
        return TensorType(self.dtype, self.shape)

    @property
    def each(self) -> int:
        """Bytes of one expert's stored tensor."""
        return nbytes(self.dtype, self.shape)

    def of_experts(self, experts: int) -> TensorType:
        """The stored tensors of so many experts in one."""
        return TensorType(self.dtype, (experts, *self.shape))

    def canonical(self, raw: Tensor) -> Tensor:
        """Canonical rows of stored tensors ``[e, *shape]``; axes may be split otherwise than the role's."""
        t = self.part.chain.apply(raw) if self.part.chain.steps else raw
        for value in self.part.values:
            t = value.apply(t, {}, {})
        return t

    def stored(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Stored tensors ``[e, *shape]`` of the experts whose canonical and kept tensors `batch` holds."""
        if self.part.kept:
            return batch[self.part.side]
        return self.packed(batch[self.part.role][:, self.rows[0] : self.rows[1]])

    def packed(self, rows: Tensor) -> Tensor:
        """Stored tensors ``[e, *shape]`` whose canonical rows are `rows`.

        Where a value step is not exact, numbers near those that `canonical` had.
        """
        shape = (len(rows), *self.shape)
        types = [self.part.chain.stored_type(self.dtype, shape)]
        for value in self.part.values:
            types.append(value.output_type(*types[-1]))
        t = rows.reshape(types[-1].shape)
        for value, before in zip(reversed(self.part.values), reversed(types[:-1]), strict=True):
            t = value.undo(t, *before, {})
        return self.part.chain.undo(t.contiguous(), self.dtype, shape) if self.part.chain.steps else t


@dataclass(frozen=True)
class PartMap:
    """A part and the tensors of one layer: one an expert, or one for all.

    `first` is the expert that is called 0 here, of those that one tensor holds.
    """

    form: PartForm
    tensors: tuple[TensorInfo, ...]
    per_expert: bool
    first: int = 0

    @property
    def part(self) -> Part:
        return self.form.part

    def run(self, first: int, last: int) -> Iterator[tuple[TensorInfo, int, int, int]]:
        """Where the stored bytes of experts `first` to `last` are: tensor, offset in it, bytes, expert.

        One run where a tensor holds several experts.
        """
        each = self.form.each
        if self.per_expert:
            for expert in range(first, last):
                yield self.tensors[expert], 0, each, expert
        elif self.form.shared:
            for expert in range(first, last):
                yield self.tensors[0], 0, each, expert
        else:
            yield self.tensors[0], (self.first + first) * each, (last - first) * each, first

    def extents(self, experts: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """The bytes of each tensor that `experts` are read from: first and last (exclusive)."""
        each, shared = self.form.each, self.per_expert or self.form.shared
        for info in self.tensors:
            yield (info, 0, each) if shared else (info, self.first * each, (self.first + experts) * each)

    def of_experts(self, first: int, last: int) -> PartMap:
        """The same for experts `first` to `last` (exclusive) alone."""
        tensors = self.tensors[first:last] if self.per_expert else self.tensors
        return replace(self, tensors=tensors, first=0 if self.per_expert else self.first + first)


@dataclass(frozen=True)
class LayerMap:
    """One layer's expert tensors. `prefix` begins the names of its converted tensors.

    `shapes` has the canonical roles for all experts; `zeros_less_one` as in `Source`.
    """

    layer: int
    prefix: str
    parts: tuple[PartMap, ...]
    shapes: Shapes
    zeros_less_one: bool = False

    def check(self, part: Part, problem: MoEProblem, values: Tensor) -> str:
        """What is wrong with one expert's values of a tensor that carries no weights; empty when right."""
        return check_extra(part.stored, problem, values, self.zeros_less_one)

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return next(iter(self.shapes.values())).shape[0]

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """Every tensor of the checkpoint that this layer consumes."""
        return (info for part in self.parts for info in part.tensors)

    @property
    def extents(self) -> Iterator[tuple[TensorInfo, int, int]]:
        """The bytes that are read of every tensor: first and last (exclusive)."""
        return (extent for part in self.parts for extent in part.extents(self.experts))

    def of_experts(self, first: int, last: int) -> LayerMap:
        """The same for experts `first` to `last` (exclusive) alone."""
        parts = tuple(part.of_experts(first, last) for part in self.parts)
        shapes = {role: kind.with_first_axis(last - first) for role, kind in self.shapes.items()}
        return replace(self, parts=parts, shapes=shapes)

    @property
    def kept(self) -> Shapes:
        """Shape and dtype of stored tensors kept aside, by role, for all experts."""
        return {part.part.side: part.form.of_experts(self.experts) for part in self.parts if part.part.kept}

    @property
    def batch_shapes(self) -> Shapes:
        """What `read_batch` fills: canonical roles and kept tensors, for all experts."""
        return {**self.shapes, **self.kept}

    @property
    def read_shapes(self) -> Shapes:
        """What `read_stored` fills, for all experts: roles that are stored as they are, in whole or in
        part, and the other stored tensors by `Part.side`."""
        direct = {part.part.role for part in self.parts if part.part.direct}
        sides = {
            part.part.side: part.form.of_experts(self.experts) for part in self.parts if not part.part.direct
        }
        return {role: form for role, form in self.shapes.items() if role in direct} | sides

    @property
    def made_shapes(self) -> Shapes:
        """Canonical roles that are made of stored tensors by steps, for all experts."""
        held = self.read_shapes
        return {role: form for role, form in self.shapes.items() if role not in held}

    def parts_of(self, roles: frozenset[str] | None) -> list[PartMap]:
        """The parts that fill `roles`; all for None."""
        return [part for part in self.parts if roles is None or part.part.role in roles]

    @property
    def raw_bytes(self) -> int:
        """Bytes of one expert's stored tensors that are not canonical rows as they are."""
        return sum(part.form.each for part in self.parts if not part.part.direct)


Read = Callable[[TensorInfo, int, memoryview], None]
"""Fills a buffer with a tensor's bytes from an offset in it."""


def carve(buffer: Tensor, shapes: Shapes, experts: int) -> dict[str, Tensor]:
    """Tensors of `shapes` for `experts`, one after the other in a uint8 `buffer`, each aligned."""
    found: dict[str, Tensor] = {}
    at = 0
    for role, each in shapes.items():
        dtype, shape = each.with_first_axis(experts)
        size = nbytes(dtype, shape)
        found[role] = buffer[at : at + size].view(TORCH_DTYPES[dtype]).reshape(shape)
        at += -(-size // ALIGN) * ALIGN
    return found


def carved_bytes(shapes: Shapes, experts: int) -> int:
    """Bytes of the buffer that `carve` needs."""
    sizes = (nbytes(*each.with_first_axis(experts)) for each in shapes.values())
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


ALIGN = 256


def view_of(t: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, nothing copied."""
    view: memoryview = t.reshape(-1).view(torch.uint8).numpy().data
    return view


def read_stored(
    layer: LayerMap,
    first: int,
    last: int,
    read: Read,
    into: Mapping[str, Tensor],
    only: frozenset[str] | None = None,
) -> None:
    """Fills `into` (see `LayerMap.read_shapes`) with experts `first` to `last` of a layer, as stored.

    Bytes are asked for in the order in which they lie in the files. `only` limits the canonical roles
    that are read.
    """
    wanted: list[tuple[str, int, TensorInfo, int, memoryview]] = []
    for mapped in layer.parts_of(only):
        form, part = mapped.form, mapped.part
        target = into[part.role][:, form.rows[0] : form.rows[1]] if part.direct else into[part.side]
        for info, at, _, expert in mapped.run(first, last):
            one = mapped.per_expert or form.shared
            rows = [target[expert - first]] if one else [target] if target.is_contiguous() else list(target)
            for i, row in enumerate(rows):
                start = at + i * form.each
                wanted.append((info.file, info.start + start, info, start, view_of(row)))
    for _, _, info, at, view in sorted(wanted, key=lambda item: item[:2]):
        read(info, at, view)


def canonical_batch(
    layer: LayerMap,
    stored: Mapping[str, Tensor],
    made: Mapping[str, Tensor],
    only: frozenset[str] | None = None,
) -> dict[str, Tensor]:
    """Canonical and kept tensors (see `LayerMap.batch_shapes`) of what `read_stored` has filled.

    Roles that `stored` does not hold are made in those of `made`, on the device of both.
    """
    batch = {role: t for role, t in {**stored, **made}.items() if role in layer.batch_shapes}
    for mapped in layer.parts_of(only):
        form, part = mapped.form, mapped.part
        if not part.role or part.direct:
            continue
        raw, target = stored[part.side], batch[part.role][:, form.rows[0] : form.rows[1]]
        block = len(raw) if raw.is_cuda else max(1, BLOCK_BYTES // max(1, form.each))
        for at in range(0, len(raw), block):
            place = target[at : at + block]
            place.copy_(form.canonical(raw[at : at + block]).reshape(place.shape))
    return batch


def read_batch(layer: LayerMap, first: int, last: int, read: Read, into: Mapping[str, Tensor]) -> None:
    """Fills `into` (see `LayerMap.batch_shapes`) with experts `first` to `last` of a layer."""
    shapes = {role: form for role, form in layer.read_shapes.items() if role not in into}
    buffer = torch.empty(carved_bytes(shapes, last - first), dtype=torch.uint8)
    stored = {role: t for role, t in into.items() if role in layer.read_shapes}
    stored |= carve(buffer, shapes, last - first)
    read_stored(layer, first, last, read, stored)
    canonical_batch(layer, stored, {role: into[role] for role in layer.made_shapes})

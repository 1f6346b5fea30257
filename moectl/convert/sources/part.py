"""Stored tensors and the canonical rows that they hold, both ways, a batch of experts at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...checkpoint.model import TensorInfo
from ...problem import MoEProblem
from ..chain import Chain
from ..recipe import SIDE
from ..safetensors_file import TORCH_DTYPES, nbytes
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

    def form(self, shape: Shape, dtype: str) -> tuple[Shape, str]:
        """Shape and dtype of the canonical rows of stored tensors, axes as the steps leave them."""
        found = self.chain.storage_shape(shape, dtype)
        for value in self.values:
            found = value.shape(*found)
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
    def each(self) -> int:
        """Bytes of one expert's stored tensor."""
        return nbytes(self.dtype, self.shape)

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
        forms = [self.part.chain.storage_shape(shape, self.dtype)]
        for value in self.part.values:
            forms.append(value.shape(*forms[-1]))
        t = rows.reshape(forms[-1][0])
        for value, (before, dtype) in zip(reversed(self.part.values), reversed(forms[:-1]), strict=True):
            t = value.undo(t, before, dtype, {})
        return self.part.chain.undo(t.contiguous(), shape, self.dtype) if self.part.chain.steps else t


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
        return next(iter(self.shapes.values()))[0][0]

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
        shapes = {role: ((last - first, *shape[1:]), dtype) for role, (shape, dtype) in self.shapes.items()}
        return replace(self, parts=parts, shapes=shapes)

    @property
    def kept(self) -> Shapes:
        """Shape and dtype of stored tensors kept aside, by role, for all experts."""
        return {
            part.part.side: ((self.experts, *part.form.shape), part.form.dtype)
            for part in self.parts
            if part.part.kept
        }

    @property
    def batch_shapes(self) -> Shapes:
        """What `read_batch` fills: canonical roles and kept tensors, for all experts."""
        return {**self.shapes, **self.kept}

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
    for role, (shape, dtype) in shapes.items():
        form = (experts, *shape[1:])
        size = nbytes(dtype, form)
        found[role] = buffer[at : at + size].view(TORCH_DTYPES[dtype]).reshape(form)
        at += -(-size // ALIGN) * ALIGN
    return found


def carved_bytes(shapes: Shapes, experts: int) -> int:
    """Bytes of the buffer that `carve` needs."""
    sizes = (nbytes(dtype, (experts, *shape[1:])) for shape, dtype in shapes.values())
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


ALIGN = 256


def view_of(t: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, nothing copied."""
    view: memoryview = t.reshape(-1).view(torch.uint8).numpy().data
    return view


def read_batch(
    layer: LayerMap,
    first: int,
    last: int,
    read: Read,
    into: Mapping[str, Tensor],
    only: frozenset[str] | None = None,
) -> None:
    """Fills `into` (see `LayerMap.batch_shapes`) with experts `first` to `last` of a layer.

    Bytes are asked for in the order in which they lie in the files. `only` limits the canonical roles
    that are read.
    """
    parts = [p for p in layer.parts if only is None or p.part.role in only]
    raw: dict[str, Tensor] = {}
    wanted: list[tuple[str, int, TensorInfo, int, memoryview]] = []
    for mapped in parts:
        form, part = mapped.form, mapped.part
        if part.direct:
            target = into[part.role][:, form.rows[0] : form.rows[1]]
        else:
            shape = (last - first, *form.shape)
            kept = part.kept and part.side in into
            target = into[part.side] if kept else torch.empty(shape, dtype=TORCH_DTYPES[form.dtype])
            raw[part.stored] = target
        for info, at, _, expert in mapped.run(first, last):
            one = mapped.per_expert or form.shared
            rows = [target[expert - first]] if one else [target] if target.is_contiguous() else list(target)
            for i, row in enumerate(rows):
                start = at + i * form.each
                wanted.append((info.file, info.start + start, info, start, view_of(row)))
    for _, _, info, at, view in sorted(wanted, key=lambda item: item[:2]):
        read(info, at, view)
    for mapped in parts:
        form, part = mapped.form, mapped.part
        if part.role and not part.direct:
            place = into[part.role][:, form.rows[0] : form.rows[1]]
            place.copy_(form.canonical(raw[part.stored]).reshape(place.shape))

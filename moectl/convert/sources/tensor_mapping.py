"""Stored tensors mapped to rows of canonical roles, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorInfo, TensorType
from ...problem.moe_problem import MoEProblem
from ..recipe.chain import Chain
from ..recipe.recipe import SIDE
from ..steps.transforms import DtypeView, Shape
from ..steps.value_steps import Shapes, ValueStep
from .packings import check_extra

STORED = SIDE + "stored."
"""Roles that begin so are stored tensors as they were: what the canonical form does not give back."""


@dataclass(frozen=True)
class TensorMapping:
    """How one kind of stored tensor becomes rows of a canonical role, and the stored tensor again.

    Attributes:
        stored: its role as `ExpertNames.experts` and the storages spell it.
        role: the canonical role that it fills rows of; ``""`` for a tensor that carries no weights.
        dtype, shape: of one expert's stored tensor, without the expert axis; one-byte dtypes are U8.
        chain: moving steps from stored tensors, experts first, to canonical rows.
        values: value steps after the chain; where one is not exact, the stored tensor is kept aside.
        rows: first and last row (exclusive) of the canonical role that it fills.
        shared: one tensor holds for every expert.
    """

    stored: str
    role: str
    dtype: str
    shape: Shape
    chain: Chain = field(default_factory=Chain)
    values: tuple[ValueStep, ...] = ()
    rows: tuple[int, int] = (0, 0)
    shared: bool = False

    @property
    def each(self) -> int:
        """Bytes of one expert's stored tensor."""
        return nbytes(self.dtype, self.shape)

    @property
    def kept(self) -> bool:
        """True when its bytes are kept aside, as canonical rows do not give them back."""
        return not self.role or not all(value.exact and not value.reads for value in self.values)

    @property
    def side(self) -> str:
        """The role under which it is kept aside."""
        return STORED + self.stored

    @property
    def direct(self) -> bool:
        """True when its bytes are canonical rows as they are."""
        return bool(self.role) and not self.values and all(isinstance(s, DtypeView) for s in self.chain.steps)

    @property
    def type(self) -> TensorType:
        """One expert's stored tensor."""
        return TensorType(self.dtype, self.shape)

    def of_experts(self, experts: int) -> TensorType:
        """The stored tensors of `experts` experts in one tensor."""
        return TensorType(self.dtype, (experts, *self.shape))

    def canonical_type(self) -> TensorType:
        """One expert's canonical rows, experts first, axes as the steps leave them."""
        return self._types((1, *self.shape))[-1]

    def _types(self, shape: Shape) -> list[TensorType]:
        """What stored tensors of `shape` are after the chain and after each value step."""
        types = [self.chain.stored_type(self.dtype, shape)]
        for value in self.values:
            types.append(value.output_type(*types[-1]))
        return types

    def canonical(self, raw: Tensor) -> Tensor:
        """Canonical rows of stored tensors ``[e, *shape]``; axes may be split otherwise than the role's."""
        t = self.chain.apply(raw) if self.chain.steps else raw
        for value in self.values:
            t = value.apply(t, {}, {})
        return t

    def restored(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Stored tensors ``[e, *shape]`` of the experts whose canonical and kept tensors `batch` holds."""
        if self.kept:
            return batch[self.side]
        return self.packed(batch[self.role][:, self.rows[0] : self.rows[1]])

    def packed(self, rows: Tensor) -> Tensor:
        """Stored tensors ``[e, *shape]`` whose canonical rows are `rows`.

        Where a value step is not exact, numbers near those that `canonical` had.
        """
        shape = (len(rows), *self.shape)
        types = self._types(shape)
        t = rows.reshape(types[-1].shape)
        for value, before in zip(reversed(self.values), reversed(types[:-1]), strict=True):
            t = value.undo(t, *before, {})
        return self.chain.undo(t.contiguous(), self.dtype, shape) if self.chain.steps else t


@dataclass(frozen=True)
class MappedTensors:
    """A mapping and the tensors of one layer that it is of: one an expert, or one for all.

    `first` is the expert that is called 0 here, of those that one tensor holds.
    """

    mapping: TensorMapping
    tensors: tuple[TensorInfo, ...]
    per_expert: bool
    first: int = 0

    def run(self, first: int, last: int) -> Iterator[tuple[TensorInfo, int, int, int]]:
        """Where the stored bytes of experts `first` to `last` are: tensor, offset in it, bytes, expert.

        One run where a tensor holds several experts.
        """
        each = self.mapping.each
        if self.per_expert:
            for expert in range(first, last):
                yield self.tensors[expert], 0, each, expert
        elif self.mapping.shared:
            for expert in range(first, last):
                yield self.tensors[0], 0, each, expert
        else:
            yield self.tensors[0], (self.first + first) * each, (last - first) * each, first

    def extents(self, experts: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """The bytes of each tensor that `experts` are read from: first and last (exclusive)."""
        each, whole = self.mapping.each, self.per_expert or self.mapping.shared
        for info in self.tensors:
            yield (info, 0, each) if whole else (info, self.first * each, (self.first + experts) * each)

    def of_experts(self, first: int, last: int) -> MappedTensors:
        """The same for experts `first` to `last` (exclusive) alone."""
        tensors = self.tensors[first:last] if self.per_expert else self.tensors
        return replace(self, tensors=tensors, first=0 if self.per_expert else self.first + first)


@dataclass(frozen=True)
class LayerMapping:
    """One layer's expert tensors, mapped to canonical roles.

    Attributes:
        layer: its number.
        prefix: what the names of its converted tensors begin with.
        mapped: the tensors, by kind.
        shapes: the canonical roles, for all experts.
        zeros_less_one: stored zero points are one less than the zero points (GPTQ's first version).
    """

    layer: int
    prefix: str
    mapped: tuple[MappedTensors, ...]
    shapes: Shapes
    zeros_less_one: bool = False

    def check(self, mapping: TensorMapping, problem: MoEProblem, values: Tensor) -> str:
        """What is wrong with one expert's values of a tensor that carries no weights; empty when right."""
        return check_extra(mapping.stored, problem, values, self.zeros_less_one)

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return next(iter(self.shapes.values())).shape[0]

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """Every tensor of the checkpoint that this layer consumes."""
        return (info for each in self.mapped for info in each.tensors)

    @property
    def extents(self) -> Iterator[tuple[TensorInfo, int, int]]:
        """The bytes that are read of every tensor: first and last (exclusive)."""
        return (extent for each in self.mapped for extent in each.extents(self.experts))

    def of_experts(self, first: int, last: int) -> LayerMapping:
        """The same for experts `first` to `last` (exclusive) alone."""
        mapped = tuple(each.of_experts(first, last) for each in self.mapped)
        shapes = {role: kind.with_first_axis(last - first) for role, kind in self.shapes.items()}
        return replace(self, mapped=mapped, shapes=shapes)

    def filling(self, roles: frozenset[str] | None) -> list[MappedTensors]:
        """The tensors that fill `roles`; all for None."""
        return [each for each in self.mapped if roles is None or each.mapping.role in roles]

    @property
    def kept(self) -> Shapes:
        """Shape and dtype of stored tensors kept aside, by role, for all experts."""
        return self._stored_types(lambda mapping: mapping.kept)

    @property
    def batch_shapes(self) -> Shapes:
        """What a batch of experts holds: canonical roles and kept tensors, for all experts."""
        return {**self.shapes, **self.kept}

    @property
    def read_shapes(self) -> Shapes:
        """What is read from files, for all experts: roles that are stored as they are, in whole or in
        part, and the other stored tensors by `TensorMapping.side`."""
        direct = {each.mapping.role for each in self.mapped if each.mapping.direct}
        others = self._stored_types(lambda mapping: not mapping.direct)
        return {role: form for role, form in self.shapes.items() if role in direct} | others

    @property
    def made_shapes(self) -> Shapes:
        """Canonical roles that are made of stored tensors by steps, for all experts."""
        held = self.read_shapes
        return {role: form for role, form in self.shapes.items() if role not in held}

    def _stored_types(self, chosen: Callable[[TensorMapping], bool]) -> dict[str, TensorType]:
        """Shape and dtype of stored tensors by `TensorMapping.side`, for all experts."""
        mappings = (each.mapping for each in self.mapped)
        return {m.side: m.of_experts(self.experts) for m in mappings if chosen(m)}

    @property
    def raw_bytes(self) -> int:
        """Bytes of one expert's stored tensors that are not canonical rows as they are."""
        return sum(each.mapping.each for each in self.mapped if not each.mapping.direct)

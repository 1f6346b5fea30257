"""Mappings between stored tensors and the rows of canonical roles, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorInfo, TensorType
from ...lazy_torch import Tensor
from ...problem.moe_problem import MoEProblem
from ..recipe.chain import Chain
from ..recipe.recipe import SIDE
from ..steps.transforms import DtypeView, Shape
from ..steps.value_steps import Shapes, ValueStep
from .packings import check_extra

STORED = SIDE + "stored."
"""Prefix of the roles of unchanged stored tensors, kept since canonical roles do not restore them."""


@dataclass(frozen=True)
class TensorMapping:
    """How one kind of stored tensor becomes rows of a canonical role, and is restored from them.

    Attributes:
        stored: its role as `ExpertNames.experts` and the storages spell it.
        role: the canonical role whose rows it fills; ``""`` for a tensor without weights.
        dtype, shape: of one expert's stored tensor, without the expert axis; one-byte dtypes are U8.
        chain: steps from stored tensors, experts first, to canonical rows.
        values: value steps after the chain; if one is not exact, the stored tensor is kept.
        rows: first and last row (exclusive) of the canonical role that it fills.
        shared: all experts share one tensor.
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
        """True when its bytes are kept, since canonical rows do not restore them."""
        return not self.role or not all(value.exact and not value.reads for value in self.values)

    @property
    def side(self) -> str:
        """The role under which it is kept."""
        return STORED + self.stored

    @property
    def direct(self) -> bool:
        """True when its bytes are canonical rows without a change."""
        return bool(self.role) and not self.values and all(isinstance(s, DtypeView) for s in self.chain.steps)

    @property
    def type(self) -> TensorType:
        """Dtype and shape of one expert's stored tensor."""
        return TensorType(self.dtype, self.shape)

    def of_experts(self, experts: int) -> TensorType:
        """Dtype and shape of the stored tensors of `experts` experts in one tensor."""
        return TensorType(self.dtype, (experts, *self.shape))

    def canonical_type(self) -> TensorType:
        """Dtype and shape of one expert's canonical rows, experts first, with the axes of the last step."""
        return self._types((1, *self.shape))[-1]

    def _types(self, shape: Shape) -> list[TensorType]:
        """Types of stored tensors of `shape` after the chain and after each value step."""
        types = [self.chain.stored_type(self.dtype, shape)]
        for value in self.values:
            types.append(value.output_type(*types[-1]))
        return types

    def canonical(self, raw: Tensor) -> Tensor:
        """Canonical rows of stored tensors ``[e, *shape]``; their axes may differ from the role's."""
        t = self.chain.apply(raw) if self.chain.steps else raw
        for value in self.values:
            t = value.apply(t, {}, {})
        return t

    def restored(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Stored tensors ``[e, *shape]`` of a batch of experts, from its canonical and kept tensors."""
        if self.kept:
            return batch[self.side]
        return self.packed(batch[self.role][:, self.rows[0] : self.rows[1]])

    def packed(self, rows: Tensor) -> Tensor:
        """Stored tensors ``[e, *shape]`` whose canonical rows are `rows`; the inverse of `canonical`.

        If a value step is not exact, the numbers are approximate.
        """
        shape = (len(rows), *self.shape)
        types = self._types(shape)
        t = rows.reshape(types[-1].shape)
        for value, before in zip(reversed(self.values), reversed(types[:-1]), strict=True):
            t = value.undo(t, *before, {})
        return self.chain.undo(t.contiguous(), self.dtype, shape) if self.chain.steps else t


@dataclass(frozen=True)
class MappedTensors:
    """A mapping and the tensors of one layer that it applies to: one per expert, or one for all.

    `first` is the number, within a tensor of all experts, of the expert that is 0 here.
    """

    mapping: TensorMapping
    tensors: tuple[TensorInfo, ...]
    per_expert: bool
    first: int = 0

    def run(self, first: int, last: int) -> Iterator[tuple[TensorInfo, int, int, int]]:
        """Runs of the stored bytes of experts `first` to `last`: tensor, offset in it, bytes, first expert.

        A tensor of all experts gives a single run.
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
        """The byte range, first and last (exclusive), that `experts` are read from in each tensor."""
        each, whole = self.mapping.each, self.per_expert or self.mapping.shared
        for info in self.tensors:
            yield (info, 0, each) if whole else (info, self.first * each, (self.first + experts) * each)

    def of_experts(self, first: int, last: int) -> MappedTensors:
        """The same restricted to experts `first` to `last` (exclusive)."""
        tensors = self.tensors[first:last] if self.per_expert else self.tensors
        return replace(self, tensors=tensors, first=0 if self.per_expert else self.first + first)


@dataclass(frozen=True)
class LayerMapping:
    """One layer's expert tensors, mapped to canonical roles.

    Attributes:
        layer: its number.
        prefix: prefix of the names of its converted tensors.
        mapped: the tensors by kind.
        shapes: the canonical roles, for all experts.
        zeros_less_one: zero points are stored minus one (the first version of GPTQ's format).
    """

    layer: int
    prefix: str
    mapped: tuple[MappedTensors, ...]
    shapes: Shapes
    zeros_less_one: bool = False

    def check(self, mapping: TensorMapping, problem: MoEProblem, values: Tensor) -> str:
        """What is wrong with one expert's values of a tensor without weights; empty if correct."""
        return check_extra(mapping.stored, problem, values, self.zeros_less_one)

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return next(iter(self.shapes.values())).shape[0]

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """Every checkpoint tensor that this layer is read from."""
        return (info for each in self.mapped for info in each.tensors)

    @property
    def extents(self) -> Iterator[tuple[TensorInfo, int, int]]:
        """The byte range, first and last (exclusive), that is read of every tensor."""
        return (extent for each in self.mapped for extent in each.extents(self.experts))

    def of_experts(self, first: int, last: int) -> LayerMapping:
        """The same restricted to experts `first` to `last` (exclusive)."""
        mapped = tuple(each.of_experts(first, last) for each in self.mapped)
        shapes = {role: kind.with_first_axis(last - first) for role, kind in self.shapes.items()}
        return replace(self, mapped=mapped, shapes=shapes)

    def filling(self, roles: frozenset[str] | None) -> list[MappedTensors]:
        """The tensors that fill `roles`; all tensors for None."""
        return [each for each in self.mapped if roles is None or each.mapping.role in roles]

    @property
    def kept(self) -> Shapes:
        """Dtype and shape of the stored tensors that are kept, by role, for all experts."""
        return self._stored_types(lambda mapping: mapping.kept)

    @property
    def batch_shapes(self) -> Shapes:
        """Tensors of a batch of experts: canonical roles and kept tensors, for all experts."""
        return {**self.shapes, **self.kept}

    @property
    def read_shapes(self) -> Shapes:
        """Tensors read from files, for all experts: roles stored in canonical form, in whole or in part,
        and the other stored tensors by `TensorMapping.side`."""
        direct = {each.mapping.role for each in self.mapped if each.mapping.direct}
        others = self._stored_types(lambda mapping: not mapping.direct)
        return {role: kind for role, kind in self.shapes.items() if role in direct} | others

    @property
    def made_shapes(self) -> Shapes:
        """Canonical roles that steps compute from stored tensors, for all experts."""
        read = self.read_shapes
        return {role: kind for role, kind in self.shapes.items() if role not in read}

    def _stored_types(self, chosen: Callable[[TensorMapping], bool]) -> dict[str, TensorType]:
        """Dtype and shape of stored tensors by `TensorMapping.side`, for all experts."""
        mappings = (each.mapping for each in self.mapped)
        return {m.side: m.of_experts(self.experts) for m in mappings if chosen(m)}

    @property
    def raw_bytes(self) -> int:
        """Bytes of one expert's stored tensors that are not in canonical form."""
        return sum(each.mapping.each for each in self.mapped if not each.mapping.direct)

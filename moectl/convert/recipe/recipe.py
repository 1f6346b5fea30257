"""Recipes: a layer's canonical tensors converted to its stored ones, and restored from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...errors import CheckpointError
from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor
from ..steps import recode as recode  # registers value steps that manifests name
from ..steps import rescale as rescale  # registers value steps that manifests name
from ..steps.transforms import Shape
from ..steps.value_steps import (
    ExpertStatistic,
    Shapes,
    Statistics,
    Tensors,
    ValueStep,
    apply_in_place,
    undo_in_place,
    update_statistics,
    value_from_json,
    value_to_json,
)
from . import weight_sums as weight_sums  # registers value steps that manifests name
from .chain import Chain

SIDE = "source."
"""Prefix of the roles of stored tensors that are unchanged canonical ones, kept for an exact restore."""


@dataclass(frozen=True)
class StoredOutput:
    """One stored tensor: the canonical role that it is made from, value steps in order, then the chain.

    A `per_layer` tensor is the same for all experts: it is stored once, without the expert axis, as the
    first expert's.
    """

    role: str
    values: tuple[ValueStep, ...] = ()
    chain: Chain = field(default_factory=Chain)
    per_layer: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The canonical roles that it reads, `role` first."""
        return tuple(dict.fromkeys((self.role, *(r for value in self.values for r in value.reads))))

    @property
    def exact(self) -> bool:
        """True when its canonical role can be restored from it."""
        return not self.per_layer and all(value.exact for value in self.values)

    @property
    def lossy(self) -> bool:
        """True when weights are replaced with others and the originals are not kept."""
        return any(value.lossy for value in self.values)

    def steps(self, dtype: str, shape: Shape) -> tuple[TensorType, ...]:
        """Dtype and shape before every value step and after the last."""
        types = [TensorType(dtype, shape)]
        for value in self.values:
            types.append(value.output_type(*types[-1]))
        return tuple(types)

    def stored(self, dtype: str, shape: Shape) -> TensorType:
        """Stored dtype and shape, for a canonical role of `shape` and `dtype`."""
        dtype, shape = self.chain.stored_type(*self.steps(dtype, shape)[-1])
        return TensorType(dtype, shape[1:] if self.per_layer else shape)

    def changed(
        self, batch: Tensors, statistics: Statistics, *, lean: bool = False, spare: Collection[str] = ()
    ) -> Tensor:
        """Its role of a batch of experts after the value steps; CheckpointError if one refuses a number.

        With `lean` steps that can change some rows at a time, and its role in place if it is in `spare`.
        """
        t, own = batch[self.role], self.role in spare
        for value in self.values:
            if lean and value.by_rows:
                t = t if own else t.clone()
                apply_in_place(value, t, batch, statistics)
            else:
                t = value.apply(t, batch, statistics)
            own = own or value.by_rows
        return t

    def apply(
        self,
        batch: Tensors,
        statistics: Statistics,
        out: Tensor | None = None,
        *,
        lean: bool = False,
        spare: Collection[str] = (),
    ) -> Tensor:
        """The stored tensor of a batch of experts, written to `out` if given.

        `lean` as in `Chain.apply` and `changed`, `spare` as in `changed`.
        """
        t = self.changed(batch, statistics, lean=lean, spare=spare)
        if self.per_layer:
            of_layer = self.chain.apply(t[:1])[0]
            return of_layer if out is None else out.copy_(of_layer)
        if self.chain.steps:
            return self.chain.apply(t, out, lean=lean)
        return t if out is None else out.copy_(t)

    def undo(
        self, stored: Tensor, dtype: str, shape: Shape, others: Tensors, *, lean: bool = False
    ) -> Tensor:
        """The canonical role, of `shape` and `dtype`, of a batch of experts; only for `exact` outputs."""
        types = self.steps(dtype, shape)
        t = self.chain.undo(stored, *types[-1], lean=lean) if self.chain.steps else stored
        own = bool(self.chain.steps)
        for value, before in zip(reversed(self.values), reversed(types[:-1]), strict=True):
            if lean and own and value.by_rows:
                undo_in_place(value, t, before.dtype, others)
            else:
                t = value.undo(t, *before, others)
        return t

    def to_json(self) -> dict[str, Any]:
        """As JSON data, enough to restore tensors without this version of the layout."""
        return {
            "role": self.role,
            "values": [value_to_json(value) for value in self.values],
            "chain": self.chain.to_json(),
            "per_layer": self.per_layer,
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> StoredOutput:
        """The output that untrusted `data` describes; CheckpointError when it describes none."""
        fields = {"role": str, "values": list, "chain": list, "per_layer": bool}
        if not isinstance(data, Mapping) or set(data) != set(fields):
            raise CheckpointError(f"{where} must be an object of {', '.join(fields)}.")
        for name, kind in fields.items():
            if not isinstance(data[name], kind):
                raise CheckpointError(f"{where}.{name} must be of type {kind.__name__}.")
        values = tuple(value_from_json(item, f"{where}.values[{i}]") for i, item in enumerate(data["values"]))
        return cls(data["role"], values, Chain.from_json(data["chain"]), data["per_layer"])


@dataclass(frozen=True)
class Recipe:
    """How the canonical tensors of `shapes` are stored.

    Attributes:
        shapes: canonical roles, for all experts of the layer.
        outputs: stored tensors by their role.
    """

    shapes: Shapes
    outputs: Mapping[str, StoredOutput]

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Canonical roles that no output restores; they are stored unchanged, as ``source.ROLE``."""
        return tuple(role for role in self.shapes if role not in self._restored_from)

    @cached_property
    def lossy(self) -> tuple[str, ...]:
        """Canonical roles that are restored with other numbers than they had."""
        replaced = {output.role for output in self.outputs.values() if output.lossy}
        return tuple(role for role in self.shapes if role in replaced)

    @cached_property
    def _restored_from(self) -> Mapping[str, str]:
        """The output that restores each canonical role, ordered so that the roles it reads come first."""
        order: dict[str, str] = {}
        exact = {name: output for name, output in self.outputs.items() if output.exact}
        needed = {output.role for output in exact.values()}
        available = {role for role in self.shapes if role not in needed}
        while True:
            ready = {
                output.role: name
                for name, output in exact.items()
                if output.role not in order and set(output.reads[1:]) <= available
            }
            if not ready:
                return order
            order |= ready
            available |= set(ready)

    @staticmethod
    def side(role: str) -> str:
        """The role under which a canonical one is kept."""
        return SIDE + role

    @cached_property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        """The statistics of the layer that are needed before its first batch is converted."""
        every = (f for output in self.outputs.values() for value in output.values for f in value.statistics)
        return tuple(dict.fromkeys(every))

    @cached_property
    def stored(self) -> Shapes:
        """Shape and dtype of every stored tensor by role, ``source.*`` included."""
        outputs = {name: output.stored(*self.shapes[output.role]) for name, output in self.outputs.items()}
        return outputs | {self.side(role): self.shapes[role] for role in self.kept}

    def check(self) -> None:
        """CheckpointError when an output reads a role that is missing, or the shapes do not fit its steps."""
        for name, output in self.outputs.items():
            absent = [role for role in output.reads if role not in self.shapes]
            if absent:
                raise CheckpointError(
                    f"{name} is made of {', '.join(absent)}, which the layer does not have."
                )
        assert self.stored

    def update_statistics(self, batch: Tensors, previous: Statistics) -> dict[ExpertStatistic, Tensor]:
        """The statistics of all batches so far, `batch` included."""
        return update_statistics(self.statistics, batch, previous)

    def store(
        self, batch: Tensors, statistics: Statistics, out: Tensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a batch of experts, one at a time, written to those of `out` if given."""
        for name, output in self.outputs.items():
            yield name, output.apply(batch, statistics, None if out is None else out[name])
        for role in self.kept:
            yield self.side(role), batch[role]

    def restored_with(self, roles: Iterable[str]) -> frozenset[str]:
        """`roles` and every canonical role that has to be restored before them."""
        found, new = frozenset[str](), frozenset(roles)
        while new - found:
            found |= new
            sources = (self.outputs[self._restored_from[r]] for r in found if r in self._restored_from)
            new = frozenset(read for output in sources for read in output.reads)
        return found

    def restore(
        self, stored: Tensors, experts: int, roles: Iterable[str] | None = None, *, lean: bool = False
    ) -> dict[str, Tensor]:
        """The canonical tensors of a batch of `experts` from its `stored` tensors.

        Those of `lossy` roles are the weights that replaced the original ones. With `roles`, only these and
        the ones that they are restored with; `stored` need not have more. `lean` as in `Chain.apply`.
        """
        wanted = frozenset(self.shapes) if roles is None else self.restored_with(roles)
        canonical = {role: stored[self.side(role)] for role in self.kept if role in wanted}
        for role, name in self._restored_from.items():
            if role in wanted:
                batch_type = self.shapes[role].with_first_axis(experts)
                canonical[role] = self.outputs[name].undo(stored[name], *batch_type, canonical, lean=lean)
        return canonical

    def source_of(self, role: str) -> str:
        """The stored role that canonical `role` is restored from."""
        return self._restored_from.get(role) or self.side(role)

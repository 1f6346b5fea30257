"""A recipe: a layer's canonical tensors to its stored ones, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from ...files.tensor_table import TensorType
from ..steps import rescale as rescale  # registers value steps that a manifest may name
from ..steps.transforms import Shape
from ..steps.value_steps import (
    ExpertStatistic,
    Facts,
    Shapes,
    Tensors,
    ValueStep,
    take_facts,
    value_from_json,
    value_to_json,
)
from . import weight_sums as weight_sums  # registers value steps that a manifest may name
from .chain import Chain

SIDE = "source."
"""Stored tensors whose role begins so are canonical ones as they were, kept for the exact way back."""


@dataclass(frozen=True)
class StoredOutput:
    """One stored tensor: the canonical role that it is made of, value steps in order, then the chain.

    `per_layer` is for a tensor that is the same for all experts and is stored once, without their axis:
    what the first expert gives.
    """

    role: str
    values: tuple[ValueStep, ...] = ()
    chain: Chain = field(default_factory=Chain)
    per_layer: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """Canonical roles that it needs, its own first."""
        return tuple(dict.fromkeys((self.role, *(r for value in self.values for r in value.reads))))

    @property
    def exact(self) -> bool:
        """True when its canonical role comes back from it."""
        return not self.per_layer and all(value.exact for value in self.values)

    @property
    def lossy(self) -> bool:
        """True when weights are replaced by others and their source is not kept."""
        return any(value.lossy for value in self.values)

    def steps(self, dtype: str, shape: Shape) -> tuple[TensorType, ...]:
        """Shape and dtype before every value step and after the last."""
        seen = [TensorType(dtype, shape)]
        for value in self.values:
            seen.append(value.output_type(*seen[-1]))
        return tuple(seen)

    def stored(self, dtype: str, shape: Shape) -> TensorType:
        """Shape and dtype as stored, for a canonical role of `shape` and `dtype`."""
        dtype, shape = self.chain.stored_type(*self.steps(dtype, shape)[-1])
        return TensorType(dtype, shape[1:] if self.per_layer else shape)

    def apply(self, batch: Tensors, facts: Facts, out: Tensor | None = None) -> Tensor:
        """The stored tensor of a batch of experts, in `out` where given."""
        t = batch[self.role]
        for value in self.values:
            t = value.apply(t, batch, facts)
        if self.per_layer:
            found = self.chain.apply(t[:1])[0]
            return found if out is None else out.copy_(found)
        if self.chain.steps:
            return self.chain.apply(t, out)
        return t if out is None else out.copy_(t)

    def undo(self, stored: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        """The canonical role of `shape` and `dtype` that a batch of experts is stored of; needs `exact`."""
        at = self.steps(dtype, shape)
        t = self.chain.undo(stored, *at[-1]) if self.chain.steps else stored
        for value, before in zip(reversed(self.values), reversed(at[:-1]), strict=True):
            t = value.undo(t, *before, others)
        return t

    def to_json(self) -> dict[str, Any]:
        """As JSON data, enough to go back without this version of the layout."""
        return {
            "role": self.role,
            "values": [value_to_json(value) for value in self.values],
            "chain": self.chain.to_json(),
            "per_layer": self.per_layer,
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> StoredOutput:
        """The output that untrusted `data` describes; CheckpointError when it describes none."""
        wanted = {"role": str, "values": list, "chain": list, "per_layer": bool}
        if not isinstance(data, Mapping) or set(data) != set(wanted):
            raise CheckpointError(f"{where} must be an object of {', '.join(wanted)}.")
        for name, kind in wanted.items():
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
        """Canonical roles that no output gives back; they are stored as they are, as ``source.ROLE``."""
        return tuple(role for role in self.shapes if role not in self._back)

    @cached_property
    def lossy(self) -> tuple[str, ...]:
        """Canonical roles that come back as other numbers than they were."""
        replaced = {output.role for output in self.outputs.values() if output.lossy}
        return tuple(role for role in self.shapes if role in replaced)

    @cached_property
    def _back(self) -> Mapping[str, str]:
        """The output that gives each canonical role back, in an order in which all it reads is there."""
        back: dict[str, str] = {}
        exact = {name: output for name, output in self.outputs.items() if output.exact}
        needed = {output.role for output in exact.values()}
        known = {role for role in self.shapes if role not in needed}
        while True:
            found = {
                output.role: name
                for name, output in exact.items()
                if output.role not in back and set(output.reads[1:]) <= known
            }
            if not found:
                return back
            back |= found
            known |= set(found)

    @staticmethod
    def side(role: str) -> str:
        """Under which role a canonical one is kept."""
        return SIDE + role

    @cached_property
    def facts(self) -> tuple[ExpertStatistic, ...]:
        """What must be known of the layer before its first batch."""
        every = (f for output in self.outputs.values() for value in output.values for f in value.facts)
        return tuple(dict.fromkeys(every))

    @cached_property
    def stored(self) -> Shapes:
        """Shape and dtype of every stored tensor by role, ``source.*`` included."""
        found = {name: output.stored(*self.shapes[output.role]) for name, output in self.outputs.items()}
        return found | {self.side(role): self.shapes[role] for role in self.kept}

    def check(self) -> None:
        """CheckpointError when an output reads what is not there, or the shapes do not fit its steps."""
        for name, output in self.outputs.items():
            absent = [role for role in output.reads if role not in self.shapes]
            if absent:
                raise CheckpointError(
                    f"{name} is made of {', '.join(absent)}, which the layer does not have."
                )
        assert self.stored

    def look(self, batch: Tensors, before: Facts) -> dict[ExpertStatistic, Tensor]:
        """The facts of all batches so far, `batch` included."""
        return take_facts(self.facts, batch, before)

    def store(self, batch: Tensors, facts: Facts, out: Tensors | None = None) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a batch of experts, one after the other, in those of `out` where given."""
        for name, output in self.outputs.items():
            yield name, output.apply(batch, facts, None if out is None else out[name])
        for role in self.kept:
            yield self.side(role), batch[role]

    def restore(self, stored: Tensors, experts: int) -> dict[str, Tensor]:
        """The canonical tensors of a batch of `experts` that is stored as `stored`.

        Those of `lossy` roles are what the weights were replaced by.
        """
        canonical = {role: stored[self.side(role)] for role in self.kept}
        for role, name in self._back.items():
            wanted = self.shapes[role].with_first_axis(experts)
            canonical[role] = self.outputs[name].undo(stored[name], *wanted, canonical)
        return canonical

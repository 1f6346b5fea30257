"""What a layer's canonical batches are written as: the seam between reading and every kind of output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ...files.safetensors_writer import TensorSpec, nbytes
from ..recipe.chain import BLOCK_BYTES
from ..recipe.recipe import Recipe
from ..sources import LayerMapping, output_name
from ..steps.value_steps import ExpertStatistic, Shapes, Statistics, Tensors
from .expert_batches import buffer_bytes, buffer_views
from .source_reader import Piece


class Writer(Protocol):
    """Turns the canonical batches of one layer into pieces of its file's tensors.

    Batches come in order of experts, all roles of `LayerMapping.batch_shapes` at once. The pieces of one
    tensor come in order of their bytes.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the layer's file."""

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        """The statistics of all experts that are needed before the first batch."""

    def buffer_bytes(self, experts: int) -> int:
        """Bytes of the buffer that `store` needs for a batch of `experts`."""

    def block_bytes(self, experts: int) -> int:
        """Bytes of the largest tensor that is worked on at once; what a step makes of it is its multiple."""

    def update_statistics(self, batch: Tensors, before: Statistics) -> dict[ExpertStatistic, Tensor]:
        """The statistics of all batches so far."""

    def store(self, batch: Tensors, first: int, statistics: Statistics, buffer: Tensor) -> Iterator[Piece]:
        """The pieces of a batch whose first expert is `first`, all of them in `buffer`."""

    def done(self, folder: Path) -> None:
        """All batches of the layer are in its file in `folder`, which is not yet known as finished."""


@dataclass(frozen=True)
class PreparedWriter:
    """One tensor per role of a recipe, all experts in it, and those that are kept for the way back.

    Attributes:
        recipe: of the layer.
        kept: stored tensors kept aside, by role.
        prefix: what the tensors' names begin with.
    """

    recipe: Recipe
    kept: Shapes
    prefix: str

    def on(self, prefix: str) -> PreparedWriter:
        """The same for another layer."""
        return replace(self, prefix=prefix)

    @property
    def roles(self) -> Shapes:
        """Shape and dtype of every stored tensor by role."""
        return {**self.recipe.stored, **self.kept}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(output_name(self.prefix, role), dtype, shape)
            for role, (dtype, shape) in self.roles.items()
        )

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        return self.recipe.statistics

    @property
    def _made(self) -> Shapes:
        """Stored tensors with experts first, which are made in the buffer of a batch."""
        whole = {name for name, output in self.recipe.outputs.items() if output.per_layer}
        return {role: form for role, form in self.roles.items() if role not in whole}

    def buffer_bytes(self, experts: int) -> int:
        return buffer_bytes(self._made, experts)

    def block_bytes(self, experts: int) -> int:
        return max(self._block(experts) * each for each in self._each())

    def _each(self) -> list[int]:
        """Bytes of one expert in every tensor, canonical or stored."""
        every = [*self.recipe.shapes.values(), *self._made.values()]
        return [nbytes(*each.with_first_axis(1)) for each in every]

    def _block(self, experts: int) -> int:
        """Experts that are worked on at once."""
        return max(1, min(experts, BLOCK_BYTES // max(1, *self._each())))

    def update_statistics(self, batch: Tensors, before: Statistics) -> dict[ExpertStatistic, Tensor]:
        return self.recipe.update_statistics(batch, before)

    def store(self, batch: Tensors, first: int, statistics: Statistics, buffer: Tensor) -> Iterator[Piece]:
        experts = len(next(iter(batch.values())))
        made = buffer_views(buffer, self._made, experts)
        for name, output in self.recipe.outputs.items():
            if output.per_layer:
                if first == 0:
                    yield Piece(output_name(self.prefix, name), 0, output.apply(cut(batch, 0, 1), statistics))
                continue
            # A chain cuts its input by itself; a value step takes what it is given.
            step = self._block(experts) if output.values and not buffer.is_cuda else experts
            for at in range(0, experts, step):
                stop = min(at + step, experts)
                output.apply(cut(batch, at, stop), statistics, made[name][at:stop])
            yield self._piece(name, made[name], first)
        # Copied, since all pieces must lie in the buffer.
        for role, t in (
            *((self.recipe.side(r), batch[r]) for r in self.recipe.kept),
            *((r, batch[r]) for r in self.kept),
        ):
            yield self._piece(role, made[role].copy_(t), first)

    def done(self, folder: Path) -> None:
        """Nothing more to write."""

    def _piece(self, role: str, data: Tensor, first: int) -> Piece:
        each = data.numel() * data.element_size() // max(len(data), 1)
        return Piece(output_name(self.prefix, role), first * each, data)


def cut(batch: Tensors, first: int, last: int) -> Mapping[str, Tensor]:
    """Experts `first` to `last` of a batch."""
    return {role: t[first:last] for role, t in batch.items()}


def prepared_writer(layer: LayerMapping, recipe: Recipe) -> PreparedWriter:
    """The `PreparedWriter` of a mapped layer."""
    return PreparedWriter(recipe, layer.kept, layer.prefix)

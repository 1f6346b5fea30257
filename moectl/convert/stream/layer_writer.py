"""Writers turn a layer's canonical batches into the tensors of its output file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...files.access import Access
from ...files.safetensors_writer import TensorSpec, nbytes
from ...lazy_torch import Tensor
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
        """Statistics over all experts that must be known before the first batch is stored."""

    def buffer_bytes(self, experts: int) -> int:
        """Size in bytes of the buffer that `store` needs for a batch of `experts`."""

    def block_bytes(self, experts: int) -> int:
        """Bytes of the largest tensor processed at once, to estimate the memory of temporaries."""

    def update_statistics(self, batch: Tensors, before: Statistics) -> dict[ExpertStatistic, Tensor]:
        """The statistics `before`, updated with a batch."""

    def store(self, batch: Tensors, first: int, statistics: Statistics, buffer: Tensor) -> Iterator[Piece]:
        """The pieces of a batch whose first expert is `first`, all of them in `buffer`."""

    def done(self, folder: Path, access: Access) -> None:
        """Called when the layer's file in `folder` is complete, before it is logged as finished.

        Files beside it are written with `access`.
        """


@dataclass(frozen=True)
class PreparedWriter:
    """Writes one tensor per role of a recipe, and the tensors kept for restoring the source.

    Attributes:
        recipe: the layer's recipe.
        kept: types of the source tensors that are kept unchanged, by role.
        prefix: prefix of the tensors' names.
    """

    recipe: Recipe
    kept: Shapes
    prefix: str

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
    def _batched(self) -> Shapes:
        """Types of the stored tensors with an expert axis, which are written to the buffer of a batch."""
        per_layer = {name for name, output in self.recipe.outputs.items() if output.per_layer}
        return {role: tensor_type for role, tensor_type in self.roles.items() if role not in per_layer}

    def buffer_bytes(self, experts: int) -> int:
        return buffer_bytes(self._batched, experts)

    def block_bytes(self, experts: int) -> int:
        return self._block(experts) * max(self._expert_bytes())

    def _expert_bytes(self) -> list[int]:
        """Bytes of one expert in each tensor, canonical or stored."""
        types = [*self.recipe.shapes.values(), *self._batched.values()]
        return [nbytes(*tensor_type.with_first_axis(1)) for tensor_type in types]

    def _block(self, experts: int) -> int:
        """Experts processed at once."""
        return max(1, min(experts, BLOCK_BYTES // max(1, *self._expert_bytes())))

    def update_statistics(self, batch: Tensors, before: Statistics) -> dict[ExpertStatistic, Tensor]:
        return self.recipe.update_statistics(batch, before)

    def store(self, batch: Tensors, first: int, statistics: Statistics, buffer: Tensor) -> Iterator[Piece]:
        experts = len(next(iter(batch.values())))
        stored = buffer_views(buffer, self._batched, experts)
        for name, output in self.recipe.outputs.items():
            if output.per_layer:
                if first == 0:
                    data = output.apply(slice_experts(batch, 0, 1), statistics)
                    yield Piece(output_name(self.prefix, name), 0, data)
                continue
            # A chain splits its input into blocks itself; a value step does not.
            step = self._block(experts) if output.values and not buffer.is_cuda else experts
            for at in range(0, experts, step):
                stop = min(at + step, experts)
                output.apply(slice_experts(batch, at, stop), statistics, stored[name][at:stop])
            yield self._piece(name, stored[name], first)
        # Copied, since all pieces must be in the buffer.
        for role, t in (
            *((self.recipe.side(r), batch[r]) for r in self.recipe.kept),
            *((r, batch[r]) for r in self.kept),
        ):
            yield self._piece(role, stored[role].copy_(t), first)

    def done(self, folder: Path, access: Access) -> None:
        """Does nothing: a prepared layer has no other files."""

    def _piece(self, role: str, data: Tensor, first: int) -> Piece:
        expert_bytes = data.numel() * data.element_size() // max(len(data), 1)
        return Piece(output_name(self.prefix, role), first * expert_bytes, data)


def slice_experts(batch: Tensors, first: int, last: int) -> Mapping[str, Tensor]:
    """Experts `first` to `last` (exclusive) of a batch."""
    return {role: t[first:last] for role, t in batch.items()}


def prepared_writer(layer: LayerMapping, recipe: Recipe) -> PreparedWriter:
    """The `PreparedWriter` of a mapped layer."""
    return PreparedWriter(recipe, layer.kept, layer.prefix)

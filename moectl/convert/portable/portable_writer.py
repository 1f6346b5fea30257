"""Writes the batches of a layer in another format, as tensors of an ordinary checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...files.access import Access
from ...files.safetensors_writer import TensorSpec, nbytes
from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor
from ..plan.memory_budget import CHAIN_COPIES
from ..recipe.chain import BLOCK_BYTES, Chain
from ..steps.transforms import Step
from ..steps.value_steps import ExpertStatistic, Shapes, Statistics, Tensors
from ..stream.expert_batches import buffer_bytes, buffer_views
from ..stream.layer_writer import slice_experts
from ..stream.source_reader import Piece
from .cost import Cost
from .format_changes import ExpertMatrix, FormatChange
from .report_fragments import write_part
from .slots import Slot


@dataclass(frozen=True)
class MatrixChange:
    """How one matrix of every expert changes.

    Attributes:
        change: from the source's format to the output's.
        halves: number of equal parts of its rows with separate blocks.
        weights: number of weights of one expert.
        title: its name in the report; empty for its role.
    """

    change: FormatChange
    halves: int
    weights: int
    title: str = ""


@dataclass(frozen=True)
class PortableWriter:
    """A `Writer` of one tensor per expert and matrix part, or one for all experts, as each slot defines.

    Attributes:
        shapes: types of the canonical roles in the new format, for all experts.
        slots: the stored tensors.
        matrices: changes of the matrices by role.
        order: steps that first put a role's rows into the order of the output.
        label: the layer's name in the report.
    """

    shapes: Shapes
    slots: tuple[Slot, ...]
    matrices: Mapping[str, MatrixChange]
    order: Mapping[str, tuple[Step, ...]]
    label: str
    # Costs of the batches so far; not part of the writer's identity.
    _costs: dict[str, Cost] = field(default_factory=dict, compare=False, repr=False)

    @property
    def experts(self) -> int:
        return next(iter(self.shapes.values())).shape[0]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, slot.dtype, shape) for slot in self.slots for name, shape in self._tensors(slot)
        )

    def _tensors(self, slot: Slot) -> Iterator[tuple[str, tuple[int, ...]]]:
        if slot.fused:
            yield slot.template, (self.experts, *slot.shape)
            return
        for expert in range(self.experts):
            yield slot.template.replace("{expert}", str(expert)), slot.shape

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        return ()

    @property
    def _stored_shapes(self) -> Shapes:
        return {slot.template: TensorType(slot.dtype, (self.experts, *slot.shape)) for slot in self.slots}

    def buffer_bytes(self, experts: int) -> int:
        return buffer_bytes(self._stored_shapes, experts)

    def block_bytes(self, experts: int) -> int:
        return math.ceil(self._block(experts) * self._expert_memory / CHAIN_COPIES)

    @property
    def _expert_memory(self) -> float:
        """Working memory in bytes for changing one expert."""
        return max(matrix.change.working_bytes * matrix.weights for matrix in self.matrices.values())

    def _block(self, experts: int) -> int:
        """Experts processed at once."""
        return max(1, min(experts, int(BLOCK_BYTES // max(1.0, self._expert_memory))))

    def update_statistics(self, batch: Tensors, before: Statistics) -> dict[ExpertStatistic, Tensor]:
        return {}

    def store(self, batch: Tensors, first: int, statistics: Statistics, buffer: Tensor) -> Iterator[Piece]:
        if first == 0:
            self._costs.clear()
        experts = len(next(iter(batch.values())))
        stored = buffer_views(buffer, self._stored_shapes, experts)
        block = self._block(experts)
        for at in range(0, experts, block):
            stop = min(at + block, experts)
            changed = self._change(slice_experts(batch, at, stop), first + at)
            for slot in self.slots:
                target = stored[slot.template][at:stop]
                target.copy_(slot.stored(changed, stop - at).view(target.dtype))
        for slot in self.slots:
            yield from _pieces(slot, stored[slot.template], first)

    def _change(self, batch: Tensors, first: int) -> dict[str, Tensor]:
        """The new canonical roles of a batch whose first expert is `first`."""
        for role, steps in self.order.items():
            if role in batch and steps:
                batch = {**batch, role: Chain(steps).apply(batch[role])}
        changed = {role: t for role, t in batch.items() if role in self.shapes}
        for role, matrix in self.matrices.items():
            roles, cost = matrix.change.apply(batch, ExpertMatrix(role, matrix.halves, first))
            changed.update(roles)
            cost = self._with_reciprocal_loss(role, cost, roles)
            title = matrix.title or role
            self._costs[title] = self._costs[title].merge(cost) if title in self._costs else cost
        return changed

    def _with_reciprocal_loss(self, role: str, cost: Cost, roles: Tensors) -> Cost:
        """`cost` less the units that lose a bit because the container stores the reciprocal of a scale."""
        name = f"{role}_global"
        if cost.report is not None or name not in roles:
            return cost
        units_per_scale = cost.count // roles[name].numel()
        for slot in self.slots:
            if slot.divisor and slot.role == name:
                scales = roles[name][:, slot.rows[0] : slot.rows[1]]
                inexact = int((scales.reciprocal().reciprocal() != scales).sum())
                cost = replace(cost, exact=cost.exact - inexact * units_per_scale)
        return cost

    def done(self, folder: Path, access: Access) -> None:
        costs = {role: cost.to_json() for role, cost in self._costs.items()}
        write_part(folder, self.label, costs, access)


def _pieces(slot: Slot, data: Tensor, first: int) -> Iterator[Piece]:
    if slot.fused:
        yield Piece(slot.template, first * nbytes(slot.dtype, slot.shape), data)
        return
    for i, expert_data in enumerate(data):
        yield Piece(slot.template.replace("{expert}", str(first + i)), 0, expert_data)

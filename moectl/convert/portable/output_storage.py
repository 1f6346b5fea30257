"""The storage of a layer's experts in an output: one tensor per expert, or fused tensors as in gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from ...checkpoint.checkpoint import LayerGroup
from ...checkpoint.tensors.storage import FUSED_TRANSPOSED, GPT_OSS, PROJECTIONS, UNGATED_PROJECTIONS, Storage
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import WeightFormat
from ..sources import output_prefix
from ..steps.value_steps import Shapes
from .slots import Slot, container_format, slots


@dataclass(frozen=True)
class OutputStorage:
    """The storage of a group's experts in the output.

    Attributes:
        name: the output's `MoEProblem.storage`.
        storage: the tensors.
        prefix: prefix of their names, with ``{layer}`` and, if each expert has its own, ``{expert}``.
    """

    name: str
    storage: Storage
    prefix: str

    @property
    def concatenated(self) -> bool:
        """True if gate rows come before up rows; False if they alternate."""
        return not self.storage.fused

    @property
    def modules(self) -> tuple[str, ...]:
        """Templates of the modules' names in a quantization config; none for fused tensors."""
        if self.storage.fused:
            return ()
        return tuple(self.prefix + name for name in self.storage.arrangement.matrices.values())

    def slots(self, layer: int, problem: MoEProblem, shapes: Shapes) -> tuple[Slot, ...]:
        """The stored tensors of one layer; `problem` and `shapes` are the output's."""
        return tuple(slots(self.storage, problem, self.prefix.replace("{layer}", str(layer)), shapes))


def output_storage(group: LayerGroup, container: str, weight: WeightFormat, native: bool) -> OutputStorage:
    """How the output stores the experts of `group` in `container`, as readers of the model expect them.

    With `native`, a gpt-oss model keeps its fused tensors; otherwise every expert has its own tensors, named
    as in the source, or as in most models if the source fuses them. Raises UsageError if the container cannot
    hold `weight`.
    """
    assert group.storage is not None, "experts are converted only if their tensors are listed"
    first, arrangement = next(iter(group.names.experts.values())), group.storage.arrangement
    if native and group.problem.model_type == "gpt_oss" and weight.name in ("mxfp4", "bf16"):
        prefix = output_prefix(first)
        if weight.name == "mxfp4":
            return OutputStorage(GPT_OSS.format.storages[0], GPT_OSS, prefix)
        return OutputStorage(container, FUSED_TRANSPOSED.of(container_format(container, weight)), prefix)
    form = container_format(container, weight)
    head = output_prefix(first) if arrangement.fused else first.partition("{expert}.")[0]
    if arrangement.fused or "w13" in arrangement.matrices:
        arrangement = PROJECTIONS if group.problem.activation.gated else UNGATED_PROJECTIONS
    return OutputStorage(container, arrangement.of(form), head + "{expert}.")

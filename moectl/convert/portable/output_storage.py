"""The storage of a layer's experts in an output: the names under which readers look for them.

Experts come out one by one unless their family's loaders know no such names: `QUANTIZED` lists these. 16-bit
experts that the source fuses stay fused under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...checkpoint.checkpoint import LayerGroup
from ...checkpoint.tensors.storage import (
    FUSED_APART,
    FUSED_TRANSPOSED,
    GPT_OSS,
    PROJECTIONS,
    UNGATED_PROJECTIONS,
    Arrangement,
    Storage,
)
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import WeightFormat
from ..canonical import INTERLEAVED
from ..steps.value_steps import Shapes
from .slots import Slot, container_format, slots

QUANTIZED: Mapping[str, Arrangement | None] = {
    # Their fused modules are not called experts; engines also map experts.N.gate_proj.
    "granitemoe": PROJECTIONS,
    "step3p": PROJECTIONS,
    # vLLM slices fused tensors itself, and has no names of single experts.
    "step3": FUSED_APART,
    # vLLM has names of 16-bit and per-tensor FP8 experts alone, all in one axis.
    "dbrx": None,
}
"""Arrangement of quantized experts by the beginning of `MoEProblem.model_type`, the first that matches; None
where no reader has names for them. Other families store fused experts in a module called experts."""

SUFFIXED = frozenset(("compressed-tensors", "modelopt", "fp8"))
"""Storages whose tensors' suffixes begin with ``weight``, as vLLM's names of fused Step-3 experts do."""


@dataclass(frozen=True)
class OutputStorage:
    """The storage of a group's experts in the output.

    Attributes:
        name: the output's `MoEProblem.storage`.
        storage: the tensors.
        prefix: prefix of their names, with ``{layer}`` and, if each expert has its own, ``{expert}``.
        concatenated: True if gate rows come before up rows; False if they alternate.
    """

    name: str
    storage: Storage
    prefix: str
    concatenated: bool = True

    @property
    def modules(self) -> tuple[str, ...]:
        """Templates of the experts' modules in a quantization config; none for gpt-oss."""
        if not self.concatenated:
            return ()
        prefix = experts_module(self.prefix) + "{expert}." if self.storage.fused else self.prefix
        return tuple(prefix + name for name in self.storage.arrangement.matrices.values())

    def slots(self, layer: int, problem: MoEProblem, shapes: Shapes) -> tuple[Slot, ...]:
        """The stored tensors of one layer; `problem` and `shapes` are the output's."""
        return tuple(slots(self.storage, problem, self.prefix.replace("{layer}", str(layer)), shapes))


def output_storage(group: LayerGroup, container: str, weight: WeightFormat, native: bool) -> OutputStorage:
    """How the output stores the experts of `group` in `container`, as readers of the model expect them.

    With `native`, a gpt-oss model keeps its fused tensors. Raises UsageError if the container cannot hold
    `weight`, or no reader has names for the family's experts in it.
    """
    assert group.storage is not None, "experts are converted only if their tensors are listed"
    arrangement, model_type = group.storage.arrangement, group.problem.model_type
    prefix = module_prefix(group)
    if native and model_type == "gpt_oss" and weight.name in ("mxfp4", "bf16"):
        return _gpt_oss(group.problem, container, weight, prefix)
    form = container_format(container, weight)
    if not arrangement.fused:
        if "w13" in arrangement.matrices:
            arrangement = _projections(group.problem)
        return OutputStorage(container, arrangement.of(form), prefix + "{expert}.")
    if weight.name == "bf16" and arrangement.name not in ("fused_blocks", "flat"):
        concatenated = group.problem.rows != INTERLEAVED
        return OutputStorage(container, arrangement.of(form), prefix, concatenated)
    family = next((name for name in QUANTIZED if model_type.startswith(name)), "")
    chosen = QUANTIZED[family] if family else PROJECTIONS
    known = family or prefix.endswith("experts.")
    if not known or chosen is None or (chosen.fused and container not in SUFFIXED):
        raise UsageError(
            f"no engine has names for experts of {model_type or 'an unknown model type'} that are stored as "
            f"{next(iter(group.names.experts.values()))} and converted to {weight} in {container}.",
            reason="An output under other names would load in none.",
            hint="Choose another --to or --container, or a checkpoint that stores each expert by itself.",
        )
    if chosen.fused:
        return OutputStorage(container, chosen.of(form), prefix)
    return OutputStorage(
        container, _projections(group.problem).of(form), experts_module(prefix) + "{expert}."
    )


def module_prefix(group: LayerGroup) -> str:
    """The common beginning of the experts' names, with ``{layer}``, up to the expert or the matrix.

    Example: ``model.layers.{layer}.mlp.experts.``; Granite's is ``model.layers.{layer}.block_sparse_moe.``
    """
    assert group.storage is not None
    role, template = next(iter(group.names.experts.items()))
    if not group.storage.fused:
        return template.partition("{expert}")[0]
    leaves = (leaf for leaf, stored in group.storage.tensors.items() if stored.role == role)
    return template.removesuffix(next(leaf for leaf in leaves if template.endswith(leaf)))


def experts_module(prefix: str) -> str:
    """`prefix`, or the module ``experts`` below it if that is not called so."""
    return prefix if prefix.endswith("experts.") else f"{prefix}experts."


def _projections(problem: MoEProblem) -> Arrangement:
    return PROJECTIONS if problem.activation.gated else UNGATED_PROJECTIONS


def _gpt_oss(problem: MoEProblem, container: str, weight: WeightFormat, prefix: str) -> OutputStorage:
    """The fused tensors of gpt-oss, whose gate and up rows alternate."""
    if problem.rows != INTERLEAVED:
        raise UsageError(
            "the fused tensors of gpt-oss alternate gate and up rows, but this checkpoint stores them apart.",
            hint="Convert from the original gpt-oss checkpoint.",
        )
    if weight.name == "mxfp4":
        return OutputStorage(GPT_OSS.format.storages[0], GPT_OSS, prefix, concatenated=False)
    form = container_format(container, weight)
    return OutputStorage(container, FUSED_TRANSPOSED.of(form), prefix, concatenated=False)

"""An opened checkpoint: config, tensors by name, and groups of equal MoE layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..files.tensor_table import TensorInfo, TensorTable
from ..problem.layer_ranges import layers_of
from ..problem.model_shape import BlockedMatrix, ModelShape
from ..problem.moe_problem import MoEProblem
from ..problem.other_weights import OtherWeights, sum_weights
from ..problem.schemes import Scheme
from .config.model_shape import model_shape
from .tensors.storage import Storage


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint was found: `kind` is folder, config, cache, hub or catalogue.

    `note` tells why an earlier step of the search was skipped, and what is incomplete: weights missing from
    a cache or directory, tensors that the catalogue does not list.
    """

    kind: str
    name: str
    revision: str | None = None
    path: Path | None = None
    note: str = ""


@dataclass(frozen=True)
class ExpertNames:
    """Name templates of one layer group's tensors, by role.

    Attributes:
        experts: templates with ``{layer}`` and, for per-expert tensors, ``{expert}``. Matrices are ``w13``
            (gate and up fused) or ``w1`` (gate, or the first matrix of experts without one) and ``w3``
            (up), and ``w2`` (down). Suffixes: ``_scale``, ``_global`` (scale of the scales), ``_input``
            (activation scale), ``_prequant`` (activation smoothing), ``_zero``, ``_order``, ``_shape``,
            ``_bias``.
        router: ``weight`` (``packed`` for a quantized router), ``bias``, ``correction_bias``, ``hash``
            (expert ids by token id), ``expert_scale``, ``input_scale``.
        shared: the matrices of the shared experts, and their ``gate``.
        latent: the projections ``in`` and ``out`` of experts with a different hidden size than the model,
            and the ``norm`` between them.
    """

    experts: Mapping[str, str]
    router: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    latent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerGroup:
    """MoE layers with the same problem, tensor names and storage.

    Attributes:
        layers: layer indices.
        problem: their common MoE problem.
        names: tensor name templates.
        sources: source of each field of `problem`: ``config:KEY``, ``config:no KEY``, ``header:TENSOR``,
            ``family:NAME`` (a rule of the architecture), ``asked`` (a command-line option) or ``assumed``.
        notes: sentences for the user.
        shared_dtype: safetensors dtype of the shared experts' weights, which may differ from the routed.
        storage: storage of the experts' tensors; None when only a config was read.
        declared: number formats as the config has them, where tensors have others; else None.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    names: ExpertNames
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    shared_dtype: str = ""
    storage: Storage | None = None
    declared: Scheme | None = None

    def __repr__(self) -> str:
        problem = self.problem
        return (
            f"LayerGroup({layers_of(self.layers)}: {problem.experts} experts, top-{problem.top_k}, "
            f"{problem.dims.hidden} x {problem.dims.intermediate}, {problem.scheme})"
        )

    @property
    def details(self) -> dict[str, str]:
        """What only tensors tell: ``arrangement`` of the experts and ``shared_dtype``, where known."""
        arrangement = self.storage.arrangement.name if self.storage else ""
        details = {"arrangement": arrangement, "shared_dtype": self.shared_dtype}
        return {name: value for name, value in details.items() if value}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config, checked tensor headers and MoE layer groups; no weights.

    `folder` is None when the weights are not on this machine (config only, Hub, catalogue). `quantization` is
    the parsed quantization config from the separate `quantization_file`, if there is one; `blocked` are the
    matrices of that name in `model`.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    groups: tuple[LayerGroup, ...]
    origin: Origin
    folder: Path | None = None
    quantization: Mapping[str, Any] | None = None
    quantization_file: str = ""
    blocked: tuple[BlockedMatrix, ...] = ()

    def __repr__(self) -> str:
        lines = [f"Checkpoint({self.origin.name} ({self.origin.kind}), {len(self.tensors)} tensors)"]
        return "\n".join([*lines, *(f"  {group}" for group in self.groups)])

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings to read before using the weights, without repeats, such as errors in the config."""
        return tuple(dict.fromkeys(note for group in self.groups for note in group.notes))

    @property
    def model(self) -> ModelShape:
        """Sizes of the model outside its experts."""
        return replace(model_shape(self.config), blocked=self.blocked)

    @cached_property
    def other_weights(self) -> OtherWeights | None:
        """All weights that are no routed experts: from the headers, else computed from the config.

        A built-in model lists the tensors of its MoE layers only. None when the config does not tell them.
        """
        from .config.other_weights import estimated_weights  # which matches names with groups' layers

        model, tensors = self.model, self.tensors
        if self.origin.kind == "catalogue" or not tensors:
            stored = {group.problem.scheme.weight.name for group in self.groups}
            return estimated_weights(self.config, self.quantization, self.quantization_file, stored)
        layers = model.layers or 1 + max(layer for group in self.groups for layer in group.layers)
        experts = {
            template.format(layer=layer, expert=expert)
            for group in self.groups
            for template in group.names.experts.values()
            if "experts." not in template
            for layer in group.layers
            for expert in range(group.problem.experts if "{expert}" in template else 1)
        }
        if isinstance(tensors, TensorTable):
            ends = zip(tensors.starts, tensors.ends, strict=True)
            sizes: Iterable[tuple[str, int]] = zip(
                tensors.names, (end - start for start, end in ends), strict=True
            )
        else:
            sizes = ((name, info.nbytes) for name, info in tensors.items())
        others = ((name, size) for name, size in sizes if ".experts." not in name and name not in experts)
        return sum_weights(others, layers, model.kv_heads, "headers")

    def group_of(self, layer: int | None) -> LayerGroup:
        """The group with `layer`; the first group for None. KeyError when no group has it."""
        if layer is None:
            return self.groups[0]
        for group in self.groups:
            if layer in group.layers:
                return group
        raise KeyError(layer)

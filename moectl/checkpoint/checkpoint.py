"""What a checkpoint is, once read: tensors by name, and groups of equal MoE layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files.tensor_table import TensorInfo
from ..problem.moe_problem import MoEProblem
from .tensors.storage import Storage


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint was found: `kind` is folder, config, cache, hub or catalogue.

    `note` says why an earlier place of the search was passed over, and what is not all there: weights
    that a cache or folder lacks, tensors that the catalogue does not list.
    """

    kind: str
    name: str
    revision: str | None = None
    path: Path | None = None
    note: str = ""


@dataclass(frozen=True)
class ExpertNames:
    """Name templates of one layer group's tensors, by role.

    `experts` maps a role to a template with ``{layer}`` and, for per-expert tensors, ``{expert}``.
    Matrices: ``w13`` (gate and up in one) or ``w1`` (gate, or the only one of experts without a gate) and
    ``w3`` (up); ``w2`` (down). Each also with ``_scale``, ``_global`` (the scale of its scales),
    ``_input`` (activations' scale), ``_prequant`` (smoothing of activations), ``_zero``, ``_order``,
    ``_shape``, ``_bias``.
    `router` has ``weight`` and where present ``bias``, ``correction_bias``, ``hash`` (expert ids by token
    id), ``expert_scale``, ``input_scale``; ``packed`` stands for the weight of a quantized router.
    `shared` has the shared experts' matrices likewise and their ``gate``; `latent` the projections
    ``in`` and ``out`` of experts with a hidden size of their own, and the ``norm`` between.
    """

    experts: Mapping[str, str]
    router: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    latent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose MoE is the same problem. `sources` says where each field of it comes from:
    ``config:KEY``, ``config:no KEY``, ``header:TENSOR``, ``family:NAME`` (a rule of the architecture),
    ``asked`` (an option of the command line) or ``assumed``. `storage` is how the experts' tensors are
    stored, None when only a config was read. `shared_dtype` is the safetensors dtype of the shared experts'
    weights, which may be stored unlike the routed ones.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    names: ExpertNames
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    shared_dtype: str = ""
    storage: Storage | None = None

    @property
    def details(self) -> dict[str, str]:
        """What only tensors tell: ``arrangement`` of the experts and ``shared_dtype``, where known."""
        arrangement = self.storage.arrangement.name if self.storage else ""
        details = {"arrangement": arrangement, "shared_dtype": self.shared_dtype}
        return {name: value for name, value in details.items() if value}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config, checked tensor headers and MoE layer groups; no weights.

    `folder` is None when the tensors' data are not on this machine (config only, Hub, catalogue).
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    groups: tuple[LayerGroup, ...]
    origin: Origin
    folder: Path | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know before the weights are used, each once: where the config is wrong, ..."""
        return tuple(dict.fromkeys(note for group in self.groups for note in group.notes))

    def group_of(self, layer: int | None) -> LayerGroup:
        """The group that holds `layer`; the first group for None. KeyError when no group has it."""
        if layer is None:
            return self.groups[0]
        for group in self.groups:
            if layer in group.layers:
                return group
        raise KeyError(layer)

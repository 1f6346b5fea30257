"""What a checkpoint is, once read: tensors by name, and groups of equal MoE layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..problem import MoEProblem


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a safetensors header states it, already checked against its file.

    `dtype` is the safetensors spelling (``U8``, ``BF16``, ``F8_E8M0``, ...); `start` and `end` are
    byte offsets in `file`, which is relative to the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


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
    Fused roles: ``w13``, ``w2`` and with ``_scale``, ``_bias`` appended; unfused ones: ``w1`` (gate),
    ``w3`` (up), ``w2`` (down), each also with ``_scale``, ``_shape``, ``_bias``, ``_zero``.
    `router` has ``weight`` and where present ``bias`` and ``correction_bias``; `shared` the shared
    experts' ``w1``, ``w3``, ``w2``.
    """

    experts: Mapping[str, str]
    router: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose MoE is the same problem. `sources` says where each field of it comes from:
    ``config:KEY``, ``header:TENSOR``, ``family:NAME`` (a rule of the architecture) or ``assumed``.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    names: ExpertNames
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()


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

    def group_of(self, layer: int | None) -> LayerGroup:
        """The group that holds `layer`; the first group for None. KeyError when no group has it."""
        if layer is None:
            return self.groups[0]
        for group in self.groups:
            if layer in group.layers:
                return group
        raise KeyError(layer)

"""The experts of a model that another library builds, by the numbers of their layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import open_checkpoint
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.source.catalogue import weights_missing
from ..checkpoint.source.open_checkpoint import MANIFEST
from ..convert.sources import output_name
from ..errors import CheckpointError, UsageError
from ..files.strict_json import parse_json_object
from ..kernels.prepared_layer import PreparedMoE
from ..layer.layer_source import CheckpointLayers, ConvertedLayers, LayerSource
from ..run.layer_variants import in_dtype
from ..run.run_machine import choose_backends, this_machine

SOURCE_CONFIG = "source.config.json"
"""File of a converted directory: config.json as it was published."""

QUANTIZED_NAMES = re.compile(r"(_packed|_scale|_scale_inv|_scale_2|scales|_blocks|qweight|qzeros|g_idx)$")
"""Ends of the names of tensors that belong to quantized matrices."""


@dataclass(frozen=True)
class ModelExperts:
    """The MoE layers of a published checkpoint or a converted directory, as a model's builder sees them.

    Attributes:
        source: the layers.
        published: the ``quantization_config`` that the checkpoint was published with; empty without one.
        expert_names: regular expressions of the full names of the experts' tensors in its files.
        others_quantized: whether other tensors than experts are quantized, and need another loader.
    """

    source: LayerSource
    published: dict[str, Any]
    expert_names: tuple[str, ...]
    others_quantized: bool

    @cached_property
    def layers(self) -> frozenset[int]:
        """Numbers of the layers whose experts are here."""
        return frozenset(self.source.layers())

    def prepared(self, layer: int, device: torch.device, dtype: str, backend: str = "") -> PreparedMoE:
        """The experts of `layer` on `device`, for tokens of `dtype` (``bf16`` or ``fp16``).

        `backend` is a name of ``moectl list backends``; if empty, the fastest that supports the layer here.
        Raises NoBackend if none does, and what reading the layer raises.
        """
        experts = in_dtype(self.source.layer(layer), dtype)
        if experts.problem.routing.weight_on_input:
            raise UsageError(
                f"layer {layer} applies router weights to its input, which this model's experts do outside",
                hint="leave these experts to the library itself",
            )
        machine = replace(this_machine(device.type), torch=device)
        names = [backend] if backend else []
        choice = choose_backends(experts.problem, machine, names, experts.layout).require()
        return experts.prepared(choice.names[0], device)


def open_experts(name: str | Path, *, offline: bool = True) -> ModelExperts:
    """The experts of `name`: a converted directory, a checkpoint's directory, or a Hub id in the local cache.

    Raises:
        CheckpointError: it has no MoE layers, is damaged, or has tensors of a kind that is not supported.
        Unavailable: its weights are not on this machine.
    """
    folder = Path(name)
    return _converted(folder) if (folder / MANIFEST).exists() else _published(str(name), offline)


def _converted(folder: Path) -> ModelExperts:
    source = ConvertedLayers(folder)
    names = sorted(
        {
            _pattern(output_name(group.prefix, role))
            for group in source.manifest.record.groups
            for role in group.roles
        }
    )
    config = parse_json_object((folder / SOURCE_CONFIG).read_bytes(), SOURCE_CONFIG)
    return ModelExperts(
        source, quantization_of(config), tuple(names), _quantized(source.manifest.passthrough)
    )


def _published(name: str, offline: bool) -> ModelExperts:
    checkpoint = open_checkpoint(name, offline=offline)
    if checkpoint.folder is None:
        raise weights_missing(checkpoint.origin.name)
    if not checkpoint.groups:
        raise CheckpointError(f"{name} has no MoE layers", hint="load it without moectl")
    names = tuple(sorted(set(_expert_names(checkpoint))))
    known = re.compile("|".join(names))
    others = (tensor for tensor in checkpoint.tensors if not known.fullmatch(tensor))
    return ModelExperts(
        CheckpointLayers(checkpoint), quantization_of(checkpoint.config), names, _quantized(others)
    )


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` of a config.json or of the text model in it; empty without one."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        if found := place.get("quantization_config"):
            return dict(found)
    return {}


def _expert_names(checkpoint: Checkpoint) -> Iterable[str]:
    for group in checkpoint.groups:
        for template in group.names.experts.values():
            yield _pattern(template)


def _pattern(template: str) -> str:
    escaped = re.escape(template)
    return escaped.replace(re.escape("{layer}"), r"\d+").replace(re.escape("{expert}"), r"\d+")


def _quantized(names: Iterable[str]) -> bool:
    return any(QUANTIZED_NAMES.search(name) for name in names)

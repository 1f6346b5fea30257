"""Groups of equal MoE layers, from a config and, where there are any, checked tensor headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import CheckpointError
from ..files.tensor_table import TensorInfo
from ..ranges import ranges
from .declared import declared_layers
from .found import find_layers
from .model import LayerGroup
from .reading import read_layer
from .stated import Stated


def layer_groups(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo] | None,
    *,
    quantization: Mapping[str, Any] | None = None,
    quantization_file: str = "",
    stated: Stated = Stated(),
) -> tuple[LayerGroup, ...]:
    """The MoE layers of a checkpoint, grouped by equal problem and names, in layer order.

    Args:
        config: config.json's object.
        tensors: every tensor by name; None when only the config is known. Headers win over the
            config where they disagree, with a note.
        quantization: the quantization config, where it stands in a file of its own, `quantization_file`.
        stated: what the user states of activation and routing, before everything else.

    Raises:
        CheckpointError: no MoE layer, an expert or tensor missing, a wrong dtype or shape, or a
            family, method or name that is not understood.
    """
    declared = declared_layers(config, quantization, quantization_file, stated)
    if tensors is None:
        return declared.groups()
    layers, extra = find_layers(tensors, declared.layers)
    if not layers:
        raise CheckpointError(
            "the tensors hold no Mixture-of-Experts layer.",
            reason="Expected names such as model.layers.0.mlp.experts.gate_up_proj_blocks.",
            hint="Give the checkpoint of a Mixture-of-Experts model.",
        )
    groups: list[LayerGroup] = []
    for layer in layers:
        found = read_layer(layer, declared, stated)
        for at, group in enumerate(groups):
            if (group.problem, group.names) == (found.problem, found.names):
                groups[at] = replace(group, layers=(*group.layers, layer.index))
                break
        else:
            groups.append(found)
    notes = declared.notes + _layer_notes(
        {layer.index for layer in layers}, set(declared.group.layers), extra
    )
    return tuple(replace(group, notes=group.notes + notes) for group in groups)


def _layer_notes(found: set[int], declared: set[int], extra: set[str]) -> tuple[str, ...]:
    notes = []
    if found - declared:
        notes.append(f"layers {ranges(found - declared)} have experts, which the config does not say")
    if declared - found:
        notes.append(f"layers {ranges(declared - found)} have no experts, though the config says so")
    if extra:
        notes.append(f"not read, as they are not the main model's: experts of {', '.join(sorted(extra))}")
    return tuple(notes)

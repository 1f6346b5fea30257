"""What the static scales of a layer's activations can hold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.activation import activate
from ..kernels.layer_inputs import LayerInputs
from ..kernels.tolerance import DECLARED
from ..layer.experts import ExpertLayer
from ..problem.number_formats import NUMBER_FORMATS
from .layer_variants import experts_on


def quantizes_activations(accumulation: str) -> bool:
    """Whether a backend with this `accumulation` (`tolerance_for`) quantizes what enters the GEMMs."""
    return accumulation == DECLARED or accumulation in NUMBER_FORMATS


def beyond_static_scales(layer: ExpertLayer, inputs: LayerInputs, device: torch.device) -> str:
    """Why `inputs` are out of the range of the stored scales of activations; empty if they are within it.

    A static scale was measured on a model's own activations: codes of much larger ones saturate, of much
    smaller ones are zeros, in every kernel. Layers that store no such scales have no limits. Ids are those of
    the layer, or -1.
    """
    problem, number = layer.problem, layer.problem.scheme.act.number
    if not number.input_largest or not len(inputs.x):
        return ""
    x, weights = inputs.x.to(device).float(), inputs.weights.to(device).float()
    ids = layer.local_ids(inputs.ids).to(device)
    expert_of = experts_on(layer, device)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        scales = {
            role: tensor.float().amax().item()
            for role, tensor in layer.canonical([expert]).items()
            if role in ("w13_input", "w2_input")
        }
        if not scales:
            return ""
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        tokens = x[token] * weights[token, slot].unsqueeze(1) if problem.routing.weight_on_input else x[token]
        dense = expert_of(expert)
        first = tokens @ dense.w13.float().T
        if dense.w13_bias is not None:
            first += dense.w13_bias.float()
        entering = {"w13": tokens, "w2": activate(first, problem.activation, problem.rows)}
        for matrix, values in entering.items():
            if why := _beyond(values, scales.get(f"{matrix}_input", 0.0), layer):
                return f"the activations that enter {matrix} of expert {expert} {why}"
    return ""


def _beyond(values: Tensor, scale: float, layer: ExpertLayer) -> str:
    """How `values` are out of the range of a scale; empty if they are not, or if it is 0: not stored."""
    number = layer.problem.scheme.act.number
    largest, rms = float(values.abs().max()), float(values.square().mean().sqrt())
    if scale and largest > number.input_largest * scale:
        limit = number.input_largest * scale
        clipped = int((values.abs() > limit).sum())
        return (
            f"reach {largest:.3g}, and its static scale holds up to {limit:.3g}: "
            f"{clipped} of {values.numel()} values clip"
        )
    if scale and 0 < rms < number.input_smallest * scale:
        smallest = number.input_smallest * scale
        return f"have an RMS of {rms:.3g}, and its static scale resolves those from {smallest:.3g} on"
    return ""

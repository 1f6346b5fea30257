"""Storage formats: stored tensors to canonical roles and back."""

from __future__ import annotations

from .expert_batches import ExpertBatches, Read, buffer_bytes, buffer_views
from .map_layer import map_layer, output_name, output_prefix
from .tensor_mapping import LayerMapping, MappedTensors, TensorMapping

__all__ = [
    "ExpertBatches",
    "LayerMapping",
    "MappedTensors",
    "Read",
    "TensorMapping",
    "buffer_bytes",
    "buffer_views",
    "map_layer",
    "output_name",
    "output_prefix",
]

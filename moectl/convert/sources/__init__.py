"""Checkpoint storage: stored tensors mapped to canonical roles, and restored from them."""

from __future__ import annotations

from .map_layer import map_layer, output_name, output_prefix
from .tensor_mapping import LayerMapping, MappedTensors, TensorMapping

__all__ = [
    "LayerMapping",
    "MappedTensors",
    "TensorMapping",
    "map_layer",
    "output_name",
    "output_prefix",
]

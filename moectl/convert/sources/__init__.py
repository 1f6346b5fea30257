"""Storage formats: stored tensors to canonical roles and back."""

from __future__ import annotations

from .part import (
    LayerMap,
    Part,
    PartForm,
    PartMap,
    canonical_batch,
    carve,
    carved_bytes,
    read_batch,
    read_stored,
    view_of,
)
from .source import Source, map_layer, output_name, output_prefix, source_for

__all__ = [
    "LayerMap",
    "Part",
    "PartForm",
    "PartMap",
    "Source",
    "canonical_batch",
    "carve",
    "carved_bytes",
    "map_layer",
    "output_name",
    "output_prefix",
    "read_batch",
    "read_stored",
    "source_for",
    "view_of",
]

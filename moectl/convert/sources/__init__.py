"""Storage formats: stored tensors to canonical roles and back."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import UsageError
from .compressed_tensors import PACK_QUANTIZED
from .gpt_oss import GPT_OSS
from .part import (
    LayerMap,
    Part,
    PartForm,
    PartMap,
    carve,
    carved_bytes,
    read_batch,
    view_of,
)
from .source import Source, map_layer, output_name, output_prefix

SOURCES: Mapping[str, Source] = {source.name: source for source in (GPT_OSS, PACK_QUANTIZED)}


def source_named(storage: str) -> Source:
    """The `Source` of a `MoEProblem.storage`; UsageError when experts stored so cannot be converted."""
    if storage not in SOURCES:
        raise UsageError(
            f"experts stored as {storage} cannot be converted or run, only explained; "
            f"convertible are {', '.join(sorted(SOURCES))}."
        )
    return SOURCES[storage]


__all__ = [
    "SOURCES",
    "LayerMap",
    "Part",
    "PartForm",
    "PartMap",
    "Source",
    "carve",
    "carved_bytes",
    "map_layer",
    "output_name",
    "output_prefix",
    "read_batch",
    "source_named",
    "view_of",
]

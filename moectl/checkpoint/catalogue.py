"""Published models by name, from data files: their config and the schema of one MoE layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import CheckpointError, UsageError
from .declared import declared_layers
from .header import DTYPE_BITS
from .model import TensorInfo
from .storage import Extent, format_sizes, parse_shape
from .strict_json import parse_json_object, shown

MOE_ONLY = "the catalogue lists the MoE tensors only"
"""What is true of every entry: attention, dense layers and embeddings are left out."""

_INSTALL = "Install moectl again."


@dataclass(frozen=True)
class Schema:
    """One tensor of every MoE layer: a name with ``{layer}`` and maybe ``{expert}``, its dtype and shape."""

    name: str
    dtype: str
    shape: tuple[Extent, ...]

    def names(self, layer: int, experts: int) -> Iterator[str]:
        """The tensor's name in `layer`, once or for each expert."""
        before, found, after = self.name.replace("{layer}", str(layer)).partition("{expert}")
        if not found:
            yield before
            return
        for expert in range(experts):
            yield f"{before}{expert}{after}"


@dataclass(frozen=True)
class Entry:
    """A published model: its config, its MoE tensors' schema, and where these facts come from.

    `note` says what a reader of these facts must know besides, such as that a sibling's stand in.
    """

    name: str
    config: Mapping[str, Any]
    tensors: tuple[Schema, ...]
    provenance: str
    revision: str | None = None
    note: str = ""

    def sizes(self, config: Mapping[str, Any] | None = None) -> dict[str, int]:
        """The symbols in shapes, as `config` (default: the published one) gives them.

        Raises CheckpointError when the config is not understood.
        """
        problem = declared_layers(config or self.config).group.problem
        return {
            "experts": problem.experts,
            "hidden": problem.dims.hidden,
            "intermediate": problem.dims.intermediate,
            "shared": problem.shared_experts * problem.dims.intermediate,
            **format_sizes(problem.scheme),
        }

    def listing(self, config: Mapping[str, Any] | None = None) -> dict[str, TensorInfo]:
        """Every MoE tensor of the checkpoint, layer by layer, with no file and offsets from 0.

        `config` is the published one unless given, as in `sizes`.
        """
        sizes, layers = self.sizes(config), declared_layers(config or self.config).group.layers
        shapes = [tuple(axis.value(sizes) for axis in schema.shape) for schema in self.tensors]
        found: dict[str, TensorInfo] = {}
        for layer in layers:
            for schema, shape in zip(self.tensors, shapes, strict=True):
                nbytes = math.prod(shape) * DTYPE_BITS[schema.dtype] // 8
                for name in schema.names(layer, sizes["experts"]):
                    found[name] = TensorInfo(name, schema.dtype, shape, "", 0, nbytes)
        return found


@cache
def catalogue() -> Mapping[str, Entry]:
    """Every built-in model by its published name.

    Raises CheckpointError when a data file of the package is damaged.
    """
    entries = {}
    for item in sorted(files("moectl").joinpath("data/catalogue").iterdir(), key=lambda item: item.name):
        if item.name.endswith(".json"):
            entry = _entry(parse_json_object(item.read_bytes(), f"catalogue {item.name}"), item.name)
            entries[entry.name] = entry
    return entries


def find_entry(name: str) -> Entry | None:
    """The built-in model called `name`, in any case, with or without its organization; or None."""
    wanted = name.casefold()
    for known, entry in catalogue().items():
        if wanted in (known.casefold(), known.casefold().split("/")[-1]):
            return entry
    return None


def built_in(name: str) -> Entry:
    """The built-in model called `name`; UsageError with the known names when there is none."""
    entry = find_entry(name)
    if entry is None:
        raise UsageError(
            f"{shown(name)} is no built-in model.", hint=f"Built in are {', '.join(catalogue())}."
        )
    return entry


def _entry(document: Mapping[str, Any], file: str) -> Entry:
    try:
        tensors = tuple(
            Schema(row["name"], row["dtype"], parse_shape(row["shape"])) for row in document["tensors"]
        )
        entry = Entry(
            document["name"],
            document["config"],
            tensors,
            document["provenance"],
            document["revision"],
            "; ".join(part for part in (MOE_ONLY, document["note"]) if part),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"catalogue {file} is damaged: {error}.", hint=_INSTALL) from error
    unknown = {schema.dtype for schema in tensors} - DTYPE_BITS.keys()
    if unknown:
        raise CheckpointError(f"catalogue {file}: unknown dtype {', '.join(sorted(unknown))}.", hint=_INSTALL)
    return entry

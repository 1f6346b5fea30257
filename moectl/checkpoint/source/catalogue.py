"""Published models by name, from data files: their config and the schema of their MoE layers.

A file holds one model, so that reading one does not read the others; `scripts/catalogue` writes them.
"""

from __future__ import annotations

import difflib
import gzip
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import repeat
from typing import Any

from ...dtypes import DTYPE_BITS
from ...errors import CheckpointError, UsageError
from ...files.strict_json import parse_json_object, shown
from ...files.tensor_table import TensorTable, TensorType
from ...problem.layer_ranges import ranges
from ..config.declared_layers import declared_layers
from ..tensors.shapes import AxisSize, parse_shape
from ..tensors.storage import format_sizes

MOE_ONLY = "the catalogue lists the MoE tensors only"
"""What is true of every entry: attention, dense layers and embeddings are left out."""

SUFFIXES = (".json", ".json.gz")
"""Endings of data files; the second is for configs that name every expert."""

LIST_MODELS = "`moectl list models` prints all built-in models."
"""Where to find the name that was meant."""

_INSTALL = "Install moectl again."


@dataclass(frozen=True)
class TensorSchema:
    """One tensor of MoE layers: a name with ``{layer}`` and maybe ``{expert}``, its dtype and shape.

    `layers` are those that have it; None: every MoE layer of the model. A name without ``{layer}`` is
    that of a single tensor, or of one for each expert.
    """

    name: str
    dtype: str
    shape: tuple[AxisSize, ...]
    layers: tuple[int, ...] | None = None

    def names(self, layer: int, experts: int) -> Iterator[str]:
        """The tensor's name in `layer`, once or for each expert."""
        before, found, after = self.name.replace("{layer}", str(layer)).partition("{expert}")
        if not found:
            yield before
            return
        for expert in range(experts):
            yield f"{before}{expert}{after}"


@dataclass(frozen=True)
class CatalogueEntry:
    """A published model: its config, its MoE tensors' schema, and where these facts come from.

    Attributes:
        documents: the quantization files beside config.json, by name.
        layers: the main model's MoE layers.
        experts: routed experts of a layer.
        provenance: what config and tensors were taken from, and how sure they are.
        revision: the commit that they were taken at, where it is known.
        note: what a reader of these facts must know besides, such as that a sibling's stand in.
    """

    name: str
    config: Mapping[str, Any]
    tensors: tuple[TensorSchema, ...]
    layers: tuple[int, ...]
    experts: int
    provenance: str
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    revision: str | None = None
    note: str = ""

    @property
    def resizable(self) -> bool:
        """True when shapes are in the model's sizes, so that `listing` can give others than the published."""
        return any(axis.symbol for schema in self.tensors for axis in schema.shape)

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

    def listing(self, config: Mapping[str, Any] | None = None) -> TensorTable:
        """Every MoE tensor of the checkpoint, layer by layer, with no file and offsets from 0.

        `config` is the published one unless given, as in `sizes`; with one, the entry must be resizable.
        """
        sizes = self.sizes(config) if self.resizable else {}
        layers, experts = self.layers, self.experts
        if config is not None:
            layers, experts = declared_layers(config).group.layers, sizes["experts"]
        rows: dict[int, list[TensorSchema]] = {}
        for schema in self.tensors:
            own = layers if schema.layers is None else schema.layers if config is None else ()
            for layer in own if "{layer}" in schema.name else (-1,):
                rows.setdefault(layer, []).append(schema)
        shapes = {schema: tuple(axis.value(sizes) for axis in schema.shape) for schema in self.tensors}
        names: list[str] = []
        types: list[TensorType] = []
        for layer in (*sorted(rows.keys() - {-1}), *(rows.keys() & {-1})):
            for schema in rows[layer]:
                names += schema.names(layer, experts)
                types += repeat(TensorType(schema.dtype, shapes[schema]), len(names) - len(types))
        return _without_files(names, types)


def _without_files(names: list[str], types: list[TensorType]) -> TensorTable:
    """A table of these tensors, each at the start of no file."""
    known = {each: kind for kind, each in enumerate(dict.fromkeys(types))}
    sizes = [math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in known]
    kinds = list(map(known.__getitem__, types))
    starts = array("q", bytes(8 * len(names)))
    return TensorTable(
        names, list(known), kinds, starts, array("q", map(sizes.__getitem__, kinds)), [""], [0]
    )


@cache
def _data_files() -> Mapping[str, str]:
    """The file of every built-in model, by its published name."""
    found = {}
    for item in sorted(files("moectl").joinpath("data/catalogue").iterdir(), key=lambda item: item.name):
        for suffix in SUFFIXES:
            if item.name.endswith(suffix):
                found[item.name.removesuffix(suffix).replace("--", "/", 1)] = item.name
    return found


def model_names() -> tuple[str, ...]:
    """The published names of the built-in models, sorted; reads none of them."""
    return tuple(sorted(_data_files(), key=str.casefold))


@cache
def read_entry(name: str) -> CatalogueEntry:
    """The built-in model of exactly this name. KeyError for another, CheckpointError for a damaged file."""
    file = _data_files()[name]
    data = files("moectl").joinpath(f"data/catalogue/{file}").read_bytes()
    return _entry(parse_json_object(gzip.decompress(data) if file.endswith(".gz") else data, file), file)


def find_entry(name: str) -> CatalogueEntry | None:
    """The built-in model called `name`, in any case, with or without its organization; or None."""
    wanted = name.casefold()
    for known in model_names():
        if wanted in (known.casefold(), known.casefold().split("/")[-1]):
            return read_entry(known)
    return None


def near_names(name: str) -> list[str]:
    """At most three built-in models whose names, with or without the organization, resemble `name`."""
    wanted = name.casefold().rstrip("/")
    spelled = {form: known for known in model_names() for form in _spellings(known)}
    near = difflib.get_close_matches(wanted, spelled, n=6, cutoff=0.6)
    near += [form for form in spelled if len(wanted) > 3 and wanted.split("/")[-1] in form]
    return list(dict.fromkeys(spelled[form] for form in near))[:3]


def _spellings(known: str) -> tuple[str, str]:
    return known.casefold(), known.casefold().split("/")[-1]


def suggestion(name: str) -> str:
    """What to say to someone who meant a built-in model by `name`: whole sentences."""
    near = near_names(name)
    names = " or ".join(part for part in (", ".join(near[:-1]), *near[-1:]) if part)
    return f"Did you mean {names}? {LIST_MODELS}" if near else LIST_MODELS


def built_in(name: str) -> CatalogueEntry:
    """The built-in model called `name`; UsageError with the nearest names when there is none."""
    entry = find_entry(name)
    if entry is None:
        raise UsageError(f"no built-in model is called {shown(name)}", hint=suggestion(name))
    return entry


def parse_layers(text: str) -> tuple[int, ...]:
    """The numbers that ``"0-2,5"`` spells; ValueError when it is no such list."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(found)


def spell_layers(layers: Iterable[int]) -> str:
    """The text that `parse_layers` reads back."""
    return ranges(layers).replace(" ", "")


def _entry(document: Mapping[str, Any], file: str) -> CatalogueEntry:
    try:
        tensors = tuple(
            TensorSchema(
                row["name"],
                row["dtype"],
                parse_shape(row["shape"]),
                parse_layers(row["layers"]) if "layers" in row else None,
            )
            for row in document["tensors"]
        )
        entry = CatalogueEntry(
            document["name"],
            document["config"],
            tensors,
            parse_layers(document["layers"]),
            document["experts"],
            document["provenance"],
            document["documents"],
            document["revision"],
            "; ".join(part for part in (MOE_ONLY, document["note"]) if part),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"catalogue {file} is damaged: {error}.", hint=_INSTALL) from error
    unknown = {schema.dtype for schema in tensors} - DTYPE_BITS.keys()
    if unknown:
        raise CheckpointError(f"catalogue {file}: unknown dtype {', '.join(sorted(unknown))}.", hint=_INSTALL)
    return entry

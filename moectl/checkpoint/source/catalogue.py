"""Built-in published models: their config and the schema of their MoE tensors, one data file per model.

The files are written by `scripts/catalogue`.
"""

from __future__ import annotations

import difflib
import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...dtypes import DTYPE_BITS
from ...errors import CheckpointError, Unavailable, UsageError
from ...files.strict_json import parse_json_object, shown
from ...files.tensor_runs import TensorRun, TensorRuns
from ...files.tensor_table import TensorType
from ...problem.layer_ranges import ranges
from ..config.declared_layers import declared_layers
from ..tensors.shapes import AxisSize, parse_shape
from ..tensors.storage import format_sizes

MOE_ONLY = "the catalogue lists the MoE tensors only"
"""Note on every entry: attention, dense layers and embeddings are left out."""

SUFFIXES = (".json", ".json.gz")
"""Suffixes of data files; large ones, whose configs name every expert, are compressed."""

LIST_MODELS = "`moectl list models` prints all built-in models."
"""Hint for unknown model names."""

_INSTALL = "Install moectl again."


@dataclass(frozen=True)
class TensorSchema:
    """One tensor of MoE layers: a name template with ``{layer}`` and ``{expert}``, its dtype and shape.

    `layers` are the layers that have it; None for every MoE layer. A name without ``{layer}`` is a single
    tensor, or one per expert.
    """

    name: str
    dtype: str
    shape: tuple[AxisSize, ...]
    layers: tuple[int, ...] | None = None

    def run(self, layer: int, experts: int, shape: tuple[int, ...]) -> TensorRun:
        """The tensor in `layer`, once or for each expert."""
        before, placeholder, after = self.name.replace("{layer}", str(layer)).partition("{expert}")
        return TensorRun(TensorType(self.dtype, shape), before, after, experts if placeholder else None)


@dataclass(frozen=True, eq=False)
class CatalogueEntry:
    """A published model: its config, the schema of its MoE tensors, and their provenance.

    An entry equals only itself, so what follows from it can be cached; `read_entry` always gives the same.

    Attributes:
        documents: separate quantization config files, by name.
        layers: the main model's MoE layers.
        experts: number of routed experts per layer.
        provenance: sources of config and tensors, and how reliable they are.
        revision: the commit that they were taken from, if known.
        note: caveats for the user, for example that some data come from a sibling model.
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
        """True when the shapes are symbolic, so that `listing` can use other than the published sizes."""
        return any(axis.symbol for schema in self.tensors for axis in schema.shape)

    def sizes(self, config: Mapping[str, Any] | None = None) -> dict[str, int]:
        """Values of the shape symbols for `config`, by default the published one.

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

    def listing(self, config: Mapping[str, Any] | None = None) -> TensorRuns:
        """Every MoE tensor of the checkpoint, layer by layer, without files and with offsets of 0.

        `config` replaces the published config; the entry must then be resizable.
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
        return TensorRuns(
            schema.run(layer, experts, shapes[schema])
            for layer in (*sorted(rows.keys() - {-1}), *(rows.keys() & {-1}))
            for schema in rows[layer]
        )


@cache
def _data_files() -> Mapping[str, str]:
    """The data file of every built-in model, by published name."""
    file_names = {}
    for item in sorted(files("moectl").joinpath("data/catalogue").iterdir(), key=lambda item: item.name):
        for suffix in SUFFIXES:
            if item.name.endswith(suffix):
                file_names[item.name.removesuffix(suffix).replace("--", "/", 1)] = item.name
    return file_names


def model_names() -> tuple[str, ...]:
    """The names of the built-in models, sorted; no file is read.

    Example:
        >>> "openai/gpt-oss-20b" in model_names()
        True
    """
    return tuple(sorted(_data_files(), key=str.casefold))


@cache
def read_entry(name: str) -> CatalogueEntry:
    """The built-in model with exactly this name. KeyError if unknown, CheckpointError for a damaged file."""
    file = _data_files()[name]
    data = files("moectl").joinpath(f"data/catalogue/{file}").read_bytes()
    return _entry(parse_json_object(gzip.decompress(data) if file.endswith(".gz") else data, file), file)


SHORT_NAMES: Mapping[str, str] = {
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "kimi-k2": "moonshotai/Kimi-K2-Thinking",
    "qwen3-30b": "RedHatAI/Qwen3-30B-A3B-quantized.w4a16",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "qwen3-235b": "Qwen/Qwen3-235B-A22B",
    "qwen3.5-35b": "Qwen/Qwen3.5-35B-A3B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
}
"""Built-in models by the names of their rows in benchmarks; every command takes these, too."""


def short_name(model: str) -> str:
    """The name in `SHORT_NAMES` of a built-in model, or its own without the organization."""
    return next((short for short, name in SHORT_NAMES.items() if name == model), model.split("/")[-1])


def find_entry(name: str) -> CatalogueEntry | None:
    """The built-in model `name`, ignoring case; None if unknown.

    Its name is taken with or without the organization, or as in `SHORT_NAMES`.
    """
    lowered = SHORT_NAMES.get(name.casefold(), name).casefold()
    for model in model_names():
        if lowered in (model.casefold(), model.casefold().split("/")[-1]):
            return read_entry(model)
    return None


def near_names(name: str) -> list[str]:
    """Up to three built-in models with names similar to `name`, with or without the organization."""
    lowered = name.casefold().rstrip("/")
    by_spelling = {spelling: model for model in model_names() for spelling in _spellings(model)}
    by_spelling |= {short: model for short, model in SHORT_NAMES.items() if short not in by_spelling}
    near = difflib.get_close_matches(lowered, by_spelling, n=6, cutoff=0.6)
    near += [spelling for spelling in by_spelling if len(lowered) > 3 and lowered.split("/")[-1] in spelling]
    return list(dict.fromkeys(by_spelling[spelling] for spelling in near))[:3]


def _spellings(model: str) -> tuple[str, str]:
    return model.casefold(), model.casefold().split("/")[-1]


def suggestion(name: str) -> str:
    """A hint for an unknown model `name`: the nearest names, or how to list them all."""
    near = near_names(name)
    names = " or ".join(part for part in (", ".join(near[:-1]), *near[-1:]) if part)
    return f"Did you mean {names}? {LIST_MODELS}" if near else LIST_MODELS


def built_in(name: str) -> CatalogueEntry:
    """The built-in model `name`; UsageError with the nearest names if there is none.

    Example:
        >>> entry = built_in("gpt-oss-20b")
        >>> entry.name, entry.experts, len(entry.layers)
        ('openai/gpt-oss-20b', 32, 24)
    """
    entry = find_entry(name)
    if entry is None:
        raise UsageError(f"no built-in model is called {shown(name)}", hint=suggestion(name))
    return entry


def weights_missing(name: str) -> Unavailable:
    """The error for a checkpoint `name` of which only config or headers are on this machine."""
    if Path(name).exists():
        return Unavailable(
            f"the weights of {name} are not on this machine", hint="put its *.safetensors files there, too"
        )
    entry = find_entry(name)
    instead = f"   (or, with random weights: moectl bench --model {short_name(entry.name)})" if entry else ""
    return Unavailable(f"the weights of {name} are not on this machine", hint=f"hf download {name}{instead}")


def parse_layers(text: str) -> tuple[int, ...]:
    """The numbers in a list such as ``"0-2,5"``; ValueError for anything else."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        layers.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(layers)


def spell_layers(layers: Iterable[int]) -> str:
    """The inverse of `parse_layers`."""
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

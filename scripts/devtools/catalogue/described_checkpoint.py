"""A checkpoint as a folder that describes it: its configs, and the tensors of one MoE layer.

Such a folder holds ``config.json``, where the format has one ``hf_quant_config.json`` or
``quantize_config.json``, ``tensors.json`` (below) and maybe ``source.md``, whose text says how sure the
copy is. ``tensors.json`` is an object: ``tensors`` lists objects with name, dtype and shape, the expert's
index spelled ``{e}``; ``num_experts``; ``layer_shown``, which begins with the name of the layer listed;
``provenance`` names a row of `TENSOR_SOURCES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moectl.checkpoint.config.fields import KEYS, ConfigFields
from moectl.checkpoint.config.moe_layers import layer_count, moe_layers
from moectl.checkpoint.source.catalogue import CatalogueEntry, TensorSchema, spell_layers
from moectl.checkpoint.source.shards import CONFIG, QUANTIZATION_FILES, read_document
from moectl.checkpoint.tensors.shapes import AxisSize, parse_shape
from moectl.dtypes import DTYPE_BITS
from moectl.errors import CheckpointError
from moectl.files.strict_json import shown

from .extra_layers import extra_schemas

TENSORS = "tensors.json"
SOURCE = "source.md"

TENSOR_SOURCES: Mapping[str, str] = {
    "header": "a public listing of the published headers",
    "header-of-sibling": "a public listing of a sibling's headers",
    "names-attested+shape-arithmetic": "names from public code, the rest computed",
    "inferred": "inferred from architecture and format",
}
"""What ``provenance`` means."""

UNSURE: Mapping[str, str] = {
    "header-of-sibling": "its tensors are a sibling's",
    "names-attested+shape-arithmetic": "its tensors' names are attested, their shapes and dtypes computed",
    "inferred": "its tensors are inferred, not listed from its headers",
}
"""What to say of sources of tensors that are not the published headers."""

_LAYER = re.compile(r"(?P<before>(?:\w+\.)*(?:layers|blocks)\.)(?P<layer>\d+)(?P<after>\..+)", re.ASCII)
_COPY = re.compile(r"^config\.json: \*\*(?P<copy>.+)\*\*", re.MULTILINE)

_GATE, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
SYMBOLIC: Mapping[str, str] = {
    "experts.gate_up_proj_blocks": "experts 2*intermediate hidden/32 16",
    "experts.gate_up_proj_scales": "experts 2*intermediate hidden/32",
    "experts.gate_up_proj_bias": "experts 2*intermediate",
    "experts.down_proj_blocks": "experts hidden intermediate/32 16",
    "experts.down_proj_scales": "experts hidden intermediate/32",
    "experts.down_proj_bias": "experts hidden",
    **{f"experts.{{expert}}.{name}.weight_packed": "intermediate hidden/pack" for name in _GATE},
    **{f"experts.{{expert}}.{name}.weight_scale": "intermediate hidden/group" for name in _GATE},
    **{f"experts.{{expert}}.{name}.weight_packed": "hidden intermediate/pack" for name in _DOWN},
    **{f"experts.{{expert}}.{name}.weight_scale": "hidden intermediate/group" for name in _DOWN},
    **{f"experts.{{expert}}.{name}.weight_shape": "2" for name in (*_GATE, *_DOWN)},
    "router.weight": "experts hidden",
    "router.bias": "experts",
    "gate.weight": "experts hidden",
    "gate.e_score_correction_bias": "experts",
    **{f"shared_experts.{name}.weight": "shared hidden" for name in _GATE},
    **{f"shared_experts.{name}.weight": "hidden shared" for name in _DOWN},
}
"""Shapes in the model's sizes, by the end of a name, of formats whose weights can be made at any size."""


@dataclass(frozen=True)
class _Row:
    """One tensor as listed: its template, the layer that it was listed for (None: none) and the rest."""

    name: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]


def read_described(folder: Path, name: str) -> CatalogueEntry:
    """The model that `folder` describes, as `name`.

    Raises CheckpointError when a file is missing, damaged, or says what cannot be.
    """
    config, listed = read_document(folder, CONFIG), read_document(folder, TENSORS)
    if config is None or listed is None:
        raise CheckpointError(
            f"{folder} has no {CONFIG if config is None else TENSORS}.",
            hint="Give a folder with config.json and the tensors.json of one MoE layer.",
        )
    where, fields = str(folder / TENSORS), ConfigFields(config)
    experts = listed.get("num_experts")
    if isinstance(experts, bool) or not isinstance(experts, int) or not 0 < experts < 1 << 16:
        raise _wrong(where, "num_experts", experts)
    tensors = listed.get("tensors")
    if not isinstance(tensors, list) or not tensors:
        raise _wrong(where, "tensors", tensors)
    rows = [_row(item, where) for item in tensors]
    found = _Described(
        rows,
        _shown_layer(listed, where),
        moe_layers(fields, layer_count(fields)),
        fields,
    )
    source = listed.get("provenance")
    source = source if isinstance(source, str) else ""
    copy = _copy_of(folder)
    notes = [f"its config is {copy}"] if copy.startswith("partial") else []
    notes += [UNSURE[source]] if source in UNSURE else []
    notes += found.notes
    entry = CatalogueEntry(
        name,
        config,
        tuple(found.schemas),
        found.layers,
        experts,
        f"config: a public copy, {copy}; tensors: {TENSOR_SOURCES.get(source, 'not stated')}",
        {file: known for file in QUANTIZATION_FILES if (known := read_document(folder, file)) is not None},
        note="; ".join(notes),
    )
    extra, said = extra_schemas(entry)
    entry = replace(entry, tensors=entry.tensors + tuple(extra), note="; ".join([*notes, *said]))
    return _symbolic(entry)


def _copy_of(folder: Path) -> str:
    """How whole the config's copy is, in the words of the folder's source.md."""
    path = folder / SOURCE
    match = _COPY.search(path.read_text()) if path.is_file() else None
    return match["copy"] if match else "completeness not stated"


def _wrong(where: str, what: str, got: object) -> CheckpointError:
    return CheckpointError(f"{where}: {what} cannot be {shown(got)}.", hint="Correct it there.")


def _row(item: object, where: str) -> _Row:
    """A listed tensor, its name with ``{layer}`` and ``{expert}`` in place of numbers."""
    if not isinstance(item, dict):
        raise _wrong(where, "a tensor", item)
    name, dtype, shape = item.get("name"), item.get("dtype"), item.get("shape")
    if not isinstance(name, str) or not name.isprintable() or {"{", "}"} & set(name.replace("{e}", "")):
        raise _wrong(where, "a tensor's name", name)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _wrong(where, f"the dtype of {shown(name)}", dtype)
    if not isinstance(shape, list) or any(
        isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 32 for size in shape
    ):
        raise _wrong(where, f"the shape of {shown(name)}", shape)
    name = name.replace("{e}", "{expert}")
    match = _LAYER.fullmatch(name)
    if match is None:
        return _Row(name, None, dtype, tuple(shape))
    return _Row(f"{match['before']}{{layer}}{match['after']}", int(match["layer"]), dtype, tuple(shape))


def _shown_layer(listed: Mapping[str, Any], where: str) -> int:
    """The number of the layer whose tensors are listed."""
    text = listed.get("layer_shown")
    match = re.match(r"[\w.]*?(\d+)(?=\W|$)", text, re.ASCII) if isinstance(text, str) else None
    if match is None:
        raise _wrong(where, "layer_shown", text)
    return int(match[1])


@dataclass
class _Described:
    """The tensors of every MoE layer, repeated from those that are listed; `notes` says what was derived."""

    rows: list[_Row]
    shown: int
    layers: tuple[int, ...]
    fields: ConfigFields

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.schemas: list[TensorSchema] = []
        self.hashed = self.fields.integer("layers", ("num_hash_layers",), 0, low=0)
        others = {row.layer for row in self.rows if _is_expert(row) and row.layer != self.shown}
        usual = tuple(layer for layer in self.layers if layer not in others)
        for row in self.rows:
            if row.layer == self.shown:
                self._add(row, usual if others and _is_expert(row) else None)
            elif row.layer in self.layers:
                self._add(row, tuple(range(self.hashed)) if row.layer < self.hashed else (row.layer,))
        self._complete_other_layers(others)
        self._complete_hashed()

    def _add(self, row: _Row, layers: tuple[int, ...] | None) -> None:
        shape = tuple(AxisSize("", size) for size in row.shape)
        self.schemas.append(TensorSchema(row.name, row.dtype, shape, layers))

    def _complete_other_layers(self, others: set[int | None]) -> None:
        """The second matrix of a layer of another precision, where only the first is listed."""
        names = {(row.name, row.layer) for row in self.rows}
        for row in self.rows:
            second = row.name.replace("gate_up_proj", "down_proj")
            if row.layer is None or row.layer not in others:
                continue
            if second == row.name or (second, row.layer) in names or len(row.shape) != 3:
                continue
            experts, double, hidden = row.shape
            self._add(_Row(second, row.layer, row.dtype, (experts, hidden, double // 2)), (row.layer,))
            self.notes.append(f"the down projection of layer {row.layer} is derived from its sizes")

    def _complete_hashed(self) -> None:
        """Of models whose first layers look experts up by token: the table there, the bias elsewhere."""
        if not self.hashed:
            return
        scored = tuple(layer for layer in self.layers if layer >= self.hashed)
        self.schemas = [
            replace(schema, layers=scored) if schema.name.endswith(".gate.bias") else schema
            for schema in self.schemas
        ]
        block = self.schemas[0].name.partition("experts.")[0]
        known = {schema.name for schema in self.schemas}
        vocabulary = self.fields.integer("vocabulary", ("vocab_size",))
        top_k = self.fields.integer("top_k", KEYS["top_k"])
        experts = self.fields.integer("experts", KEYS["experts"])
        hidden = self.fields.integer("hidden", KEYS["hidden"])
        router = (
            TensorSchema(f"{block}gate.weight", "BF16", _numbers(experts, hidden)),
            TensorSchema(f"{block}gate.bias", "F32", _numbers(experts), scored),
            TensorSchema(
                f"{block}gate.tid2eid", "I64", _numbers(vocabulary, top_k), tuple(range(self.hashed))
            ),
        )
        derived = [schema for schema in router if schema.name not in known]
        self.schemas += derived
        if derived:
            names = ", ".join(schema.name.removeprefix(block) for schema in derived)
            self.notes.append(f"{names} are derived from the config")


def _numbers(*sizes: int) -> tuple[AxisSize, ...]:
    return tuple(AxisSize("", size) for size in sizes)


def _is_expert(row: _Row) -> bool:
    return row.layer is not None and ".experts." in row.name


def _symbolic(entry: CatalogueEntry) -> CatalogueEntry:
    """The entry with shapes in the model's sizes, where `SYMBOLIC` has all and they come out as listed."""
    schemas = []
    for schema in entry.tensors:
        shape = next((shape for end, shape in SYMBOLIC.items() if schema.name.endswith("." + end)), None)
        if shape is None:
            return entry
        schemas.append(replace(schema, shape=parse_shape(shape)))
    found = replace(entry, tensors=tuple(schemas))
    try:
        same = found.listing() == entry.listing()
    except CheckpointError:
        return entry
    return found if same else entry


def entry_document(entry: CatalogueEntry) -> dict[str, Any]:
    """The JSON object of an entry's data file, which `catalogue.read_entry` reads back."""
    return {
        "name": entry.name,
        "revision": entry.revision,
        "provenance": entry.provenance,
        "note": entry.note,
        "layers": spell_layers(entry.layers),
        "experts": entry.experts,
        "documents": entry.documents,
        "config": entry.config,
        "tensors": [_row_document(schema) for schema in entry.tensors],
    }


def _row_document(schema: TensorSchema) -> dict[str, str]:
    row = {
        "name": schema.name,
        "dtype": schema.dtype,
        "shape": " ".join(map(str, schema.shape)),
    }
    if schema.layers is not None:
        row["layers"] = spell_layers(schema.layers)
    return row

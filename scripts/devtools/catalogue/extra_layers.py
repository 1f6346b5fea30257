"""Tensors of multi-token prediction layers, which configs count separately, derived from the main model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moectl.checkpoint.config.declared_layers import DeclaredLayers, declared_layers
from moectl.checkpoint.config.fields import ConfigFields
from moectl.checkpoint.config.moe_layers import layer_count
from moectl.checkpoint.source.catalogue import CatalogueEntry, TensorSchema
from moectl.checkpoint.source.shards import separate_quantization
from moectl.checkpoint.tensors.shapes import AxisSize


@dataclass(frozen=True)
class _ExtraLayersRule:
    """The key that counts such layers, the prefix of the main model's names, and the prefix of theirs.

    `spelled` has ``{past}`` for the number past the last layer, ``{at}`` for the number from 0.
    """

    key: str
    main: str
    spelled: str


RULES: tuple[_ExtraLayersRule, ...] = (
    _ExtraLayersRule("num_nextn_predict_layers", "model.layers.{layer}.", "model.layers.{past}."),
    _ExtraLayersRule("num_nextn_predict_layers", "layers.{layer}.", "mtp.{at}."),
    _ExtraLayersRule("mtp_num_hidden_layers", "model.language_model.layers.{layer}.", "mtp.layers.{at}."),
)

KEYS_OF_EXTRA = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys that count layers of multi-token prediction."""

PLAIN_OF: Mapping[tuple[str, str], tuple[int, int]] = {
    ("weight", "U8"): (1, 2),
    ("weight", "F8_E4M3"): (1, 1),
    ("weight", "BF16"): (1, 1),
    ("weight", "F32"): (1, 1),
}
"""Factors from the sizes of a quantized matrix to those of the unquantized one, by its suffix and dtype."""

_SCALES = ("scale", "scale_inv", "scale_2", "scales", "qzeros", "g_idx", "shape")


def extra_schemas(entry: CatalogueEntry) -> tuple[list[TensorSchema], list[str]]:
    """The tensors of the layers after the main model's, and notes about them.

    They are like those of the main model's last layer if the config quantizes both alike, and unquantized if
    it excludes them; otherwise they are left out, with a note.
    """
    fields = ConfigFields(entry.config)
    counted = {key: fields.integer("layers", (key,), 0, low=0) for key in KEYS_OF_EXTRA}
    if not any(counted.values()):
        return [], []
    declared = declared_layers(entry.config, *separate_quantization(entry.documents))
    past = layer_count(fields)
    found: list[TensorSchema] = []
    places = []
    for rule in RULES:
        last = [it for it in entry.tensors if it.layers is None or entry.layers[-1] in it.layers]
        if not all(schema.name.startswith(rule.main) for schema in last):
            continue
        for at in range(counted[rule.key]):
            begins = rule.spelled.format(past=past + at, at=at)
            rows = _single([_moved(schema, rule.main, begins) for schema in last], rule)
            made = _as_declared(rows, declared, past + at, fields)
            found += made
            places += [begins.rstrip(".")] if made else []
    if not found:
        return [], ["layers of multi-token prediction are left out, as nothing says how they are stored"]
    return found, [f"the tensors of {', '.join(places)}, multi-token prediction, are derived"]


def _moved(schema: TensorSchema, main: str, begins: str) -> TensorSchema:
    return replace(schema, name=begins + schema.name.removeprefix(main), layers=None)


def _single(rows: list[TensorSchema], rule: _ExtraLayersRule) -> list[TensorSchema]:
    """The rows with one tensor for each expert where the main model has all experts in one tensor."""
    found = []
    for row in rows:
        head, fused, leaf = row.name.rpartition("experts.")
        if not fused or leaf not in ("gate_up_proj", "down_proj") or len(row.shape) != 3:
            found.append(row)
            continue
        rows_of, columns = (axis.value({}) for axis in row.shape[1:])
        halves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        shape = (AxisSize("", rows_of // len(halves)), AxisSize("", columns))
        found += [
            replace(row, name=f"{head}experts.{{expert}}.{half}.weight", shape=shape) for half in halves
        ]
    return found


def _as_declared(
    rows: list[TensorSchema], declared: DeclaredLayers, layer: int, fields: ConfigFields
) -> list[TensorSchema]:
    """The rows as they are, or plain, whichever the config says of their modules; none for another format."""
    modules = {row.name.rpartition(".")[0].format(expert=0) for row in rows if ".experts." in row.name}
    scheme, main = declared.problem_of(layer, modules)[0].scheme, declared.group.problem.scheme
    if scheme == main:
        return rows
    # Of a checkpoint that says fp8 and stores something else, a list of exceptions tells what is not that
    # something else: such modules may still be FP8 or MXFP4.
    if scheme.weight.name != "bf16" or fields.get("quantization_config.quant_method") == "fp8":
        return []
    found = []
    for row in rows:
        suffix = row.name.rpartition(".")[2]
        if suffix.removeprefix("weight_").removeprefix("input_") in _SCALES:
            continue
        factors = PLAIN_OF.get((suffix, row.dtype))
        if factors is None or len(row.shape) != 2 or "gate.weight" in row.name:
            if "{expert}" in row.name:
                return []
            found.append(row)
            continue
        shape = tuple(
            AxisSize("", axis.value({}) * factor) for axis, factor in zip(row.shape, factors, strict=True)
        )
        found.append(replace(row, dtype="BF16", shape=shape))
    return found

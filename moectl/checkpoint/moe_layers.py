"""Which layers of a model are Mixture-of-Experts layers, by the keys of its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .families import Fields

SPARSE_WORDS = ("sparse", "moe")
"""What a list of layer kinds calls a layer with experts."""

EXPERT_LETTER = "E"
"""What a pattern of layer kinds, one letter each, calls a layer with experts."""


def _number(fields: Fields, key: str, default: int, low: int = 0) -> int:
    return fields.integer("layers", (key,), default, low=low)


def _every(fields: Fields, layers: int) -> set[int]:
    return set(range(layers))


def _dense_first(fields: Fields, layers: int) -> set[int]:
    """Dense before `first_k_dense_replace`, then every `moe_layer_freq`-th layer."""
    first = _number(fields, "first_k_dense_replace", 0)
    listed = isinstance(fields.values.get("moe_layer_freq"), list)
    freq = 1 if listed else _number(fields, "moe_layer_freq", 1, low=1)
    return {layer for layer in range(first, layers) if layer % freq == 0}


def _flags(fields: Fields, layers: int) -> set[int]:
    """`moe_layer_freq` as a list of 0 or 1 for each layer."""
    flags = fields.values["moe_layer_freq"]
    if not isinstance(flags, list):
        return _every(fields, layers)
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise fields.refuse("moe_layer_freq", f"a positive integer or {layers} flags of 0 or 1")
    return {layer for layer in range(layers) if flags[layer]}


def _words(fields: Fields, layers: int) -> set[int]:
    """`mlp_layer_types`: a word for each layer."""
    words = fields.values["mlp_layer_types"]
    if not isinstance(words, list) or len(words) < layers:
        raise fields.refuse("mlp_layer_types", f"a list of {layers} words")
    return {layer for layer in range(layers) if words[layer] in SPARSE_WORDS}


def _step(fields: Fields, layers: int) -> set[int]:
    """Every `decoder_sparse_step`-th layer, counted from 1."""
    step = _number(fields, "decoder_sparse_step", 1, low=1)
    return {layer for layer in range(layers) if (layer + 1) % step == 0}


def _not_dense(fields: Fields, layers: int) -> set[int]:
    """All but `mlp_only_layers`."""
    return _every(fields, layers) - _numbers(fields, "mlp_only_layers")


def _interleaved(fields: Fields, layers: int) -> set[int]:
    """Every `interleave_moe_layer_step`-th layer, counted from 1."""
    step = _number(fields, "interleave_moe_layer_step", 1, low=1)
    return {layer for layer in range(layers) if (layer + 1) % step == 0}


def _period(fields: Fields, layers: int) -> set[int]:
    """Every `expert_layer_period`-th layer from `expert_layer_offset`."""
    period = _number(fields, "expert_layer_period", 1, low=1)
    offset = _number(fields, "expert_layer_offset", 0)
    return {layer for layer in range(layers) if layer % period == offset % period}


def _span(fields: Fields, layers: int) -> set[int]:
    """Every `moe_layer_interval`-th layer, counted from 1, of a first to a last one."""
    first = _number(fields, "moe_layer_start_index", 0)
    last = layers - 1
    if fields.has("moe_layer_end_index") and fields.values["moe_layer_end_index"] != -1:
        last = _number(fields, "moe_layer_end_index", last)
    interval = _number(fields, "moe_layer_interval", 1, low=1)
    return {layer for layer in range(first, min(last + 1, layers)) if (layer + 1) % interval == 0}


def _pattern(fields: Fields, layers: int) -> set[int]:
    """The letters of `hybrid_override_pattern`, one for each layer."""
    pattern = fields.values["hybrid_override_pattern"]
    if not isinstance(pattern, str) or len(pattern) < layers:
        raise fields.refuse("hybrid_override_pattern", f"{layers} letters")
    return {layer for layer in range(layers) if pattern[layer] == EXPERT_LETTER}


def _named(fields: Fields, layers: int) -> set[int]:
    """`moe_layers`: the layers themselves."""
    return _numbers(fields, "moe_layers")


def _enumerated(fields: Fields, layers: int) -> set[int]:
    """`moe_layers_enum`: the layers themselves, in one string."""
    text = fields.values["moe_layers_enum"]
    if not isinstance(text, str) or not all(part.strip().isdecimal() for part in text.split(",")):
        raise fields.refuse("moe_layers_enum", "layer numbers between commas")
    return {int(part) for part in text.split(",")}


def _numbers(fields: Fields, key: str) -> set[int]:
    found = fields.values[key]
    if not isinstance(found, list) or any(isinstance(it, bool) or not isinstance(it, int) for it in found):
        raise fields.refuse(key, "a list of layer numbers")
    return set(found)


RULES: Mapping[str, Callable[[Fields, int], set[int]]] = {
    "first_k_dense_replace": _dense_first,
    "moe_layer_freq": _flags,
    "mlp_layer_types": _words,
    "decoder_sparse_step": _step,
    "mlp_only_layers": _not_dense,
    "interleave_moe_layer_step": _interleaved,
    "moe_layers": _named,
    "moe_layers_enum": _enumerated,
    "expert_layer_period": _period,
    "moe_layer_start_index": _span,
    "hybrid_override_pattern": _pattern,
}
"""What a key leaves of all layers, by the key; where several stand in one config, all of them hold."""


def moe_layers(config: Mapping[str, Any] | Fields, count: int) -> tuple[int, ...]:
    """The indices of MoE layers among the first `count`; every layer where no key says otherwise.

    Raises CheckpointError when a key's value is not of its kind.
    """
    fields = config if isinstance(config, Fields) else Fields(config)
    found = _every(fields, count)
    for key, rule in RULES.items():
        if fields.has(key) and not (key == "moe_layers" and fields.values[key] == []):
            found &= rule(fields, count)
    return tuple(sorted(found))

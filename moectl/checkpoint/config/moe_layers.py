"""Which layers have experts: one rule per config key, intersected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .fields import KEYS, LIMITS, ConfigFields

KIND_LISTS = ("hybrid_override_pattern", "layers_block_type", "mlp_layer_types", "layer_types")
"""Keys whose value lists a kind for each layer, so that its length is the number of layers."""

Rule = Callable[[ConfigFields, str, int], frozenset[int]]
"""(config, key, number of layers) to the layers in which the key allows experts."""


def moe_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """Indices of the layers with experts among `layers` layers; all of them unless a key says otherwise.

    `layers` is the result of `layer_count` on the same `fields`. Raises CheckpointError when a key of
    `LAYER_RULES` has an invalid value.
    """
    indices = frozenset(range(layers))
    keys = [key for key in LAYER_RULES if fields.has(key) and (key, fields.get(key)) not in _IGNORED]
    for key in keys:
        indices &= LAYER_RULES[key](fields, key, layers)
    if keys:
        fields.sources["layers"] = ", ".join(map(fields.source_of, keys))
    return tuple(sorted(indices))


def layer_count(fields: ConfigFields) -> int:
    """The number of the model's layers: from a key, else the length of a list of layer kinds.

    Raises CheckpointError when the config has neither.
    """
    key = fields.key_of(KIND_LISTS)
    if key is None or fields.key_of(KEYS["layers"]) is not None:
        return fields.integer("layers", KEYS["layers"])
    kinds = fields.get(key)
    if not isinstance(kinds, (list, str)) or not 0 < len(kinds) <= LIMITS["layers"]:
        raise fields.invalid(key, f"a kind for each of 1 to {LIMITS['layers']} layers")
    fields.sources["layers"] = fields.source_of(key)
    return len(kinds)


def _count(fields: ConfigFields, key: str, low: int) -> int:
    return fields.integer("layers", (key,), low=low)


def _from(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    return frozenset(range(_count(fields, key, 0), layers))


def _up_to(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    if fields.get(key) == -1:
        return frozenset(range(layers))
    return frozenset(range(min(layers, _count(fields, key, 0) + 1)))


def _every(shift: int) -> Rule:
    """Every n-th layer, n being the value; with `shift` 1 the last layer of each run of n has experts."""

    def rule(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
        step = _count(fields, key, 1)
        return frozenset(layer for layer in range(layers) if (layer + shift) % step == 0)

    return rule


def _flags_or_every(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    """A list with a flag of 0 or 1 for each layer, or an integer n for every n-th layer."""
    flags = fields.get(key)
    if not isinstance(flags, list):
        return _every(0)(fields, key, layers)
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise fields.invalid(key, f"a positive integer or {layers} flags of 0 or 1")
    return frozenset(layer for layer in range(layers) if flags[layer])


def _without(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    return frozenset(range(layers)) - _numbers(fields, key, fields.get(key))


def _named(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    """Layer indices, as a list or as a comma-separated string."""
    value = fields.get(key)
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
            raise fields.invalid(key, "layer numbers separated by commas")
        value = [int(part) for part in parts]
    return _numbers(fields, key, value) & frozenset(range(layers))


def _numbers(fields: ConfigFields, key: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
        raise fields.invalid(key, "a list of layer numbers")
    return frozenset(value)


def _phase(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    period, offset = _count(fields, key, 1), fields.integer("layers", ("expert_layer_offset",), 0, low=0)
    return frozenset(layer for layer in range(layers) if layer % period == offset)


def _words(word: str, only: bool = True) -> Rule:
    """A list of kinds, or a string with a letter per layer, in which `word` stands for experts.

    Unless `only`, a list without `word` describes something else, such as attention, and is ignored.
    """

    def rule(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
        kinds = fields.get(key)
        if not isinstance(kinds, (list, str)) or len(kinds) < layers:
            raise fields.invalid(key, f"a kind for each of {layers} layers")
        if not only and word not in kinds:
            return frozenset(range(layers))
        return frozenset(layer for layer in range(layers) if kinds[layer] == word)

    return rule


def _switch(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    value = fields.get(key)
    if not isinstance(value, bool):
        raise fields.invalid(key, "true or false")
    return frozenset(range(layers)) if value else frozenset()


LAYER_RULES: Mapping[str, Rule] = {
    "first_k_dense_replace": _from,
    "num_dense_layers": _from,
    "moe_layer_start_index": _from,
    "moe_layer_end_index": _up_to,
    "moe_layer_freq": _flags_or_every,
    "moe_layer_interval": _every(1),
    "moe_layer_frequency": _every(1),
    "decoder_sparse_step": _every(1),
    "interleave_moe_layer_step": _every(1),
    "mlp_only_layers": _without,
    "mlp_layer_types": _words("sparse"),
    "moe_layers_enum": _named,
    "moe_layers": _named,
    "expert_layer_period": _phase,
    "hybrid_override_pattern": _words("E"),
    "layers_block_type": _words("moe", only=False),
    "enable_moe_block": _switch,
}
"""The rule of every key that decides which layers have experts."""

_IGNORED: tuple[tuple[str, Any], ...] = (("moe_layers", []),)
"""Values that decide nothing: Llama-4 then uses its step alone."""

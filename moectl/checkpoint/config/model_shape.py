"""Reading the sizes of a model outside its experts from config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...problem.model_shape import ModelShape
from .fields import KEYS, ConfigFields

HEADS = ("num_attention_heads", "n_heads")
KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
    "attn_config.kv_n_heads",
)
"""Keys in the order in which vLLM reads them."""
MOST = 1 << 24
"""Upper bound of a size, far above any model."""


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The sizes in the text model's part of `config`; unknown where a key is absent or is no such size.

    Example:
        >>> shape = model_shape({"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088})
        >>> shape.attention_heads, shape.kv_heads, shape.vocabulary, shape.layers
        (64, 8, 201088, 0)
    """
    fields = ConfigFields(config)
    latent = fields.has("kv_lora_rank")
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    whole = config.get("model_type")
    return ModelShape(
        attention_heads=_size(fields, HEADS),
        kv_heads=0 if latent else _size(fields, KV_HEADS),
        vocabulary=_size(fields, ("vocab_size",)),
        layers=_size(fields, KEYS["layers"]),
        architecture=first if isinstance(first, str) else "",
        model_type=whole if isinstance(whole, str) else "",
    )


def _size(fields: ConfigFields, keys: Sequence[str]) -> int:
    key = fields.key_of(keys)
    value = fields.get(key) if key else None
    return value if type(value) is int and 0 < value <= MOST else 0

"""Reading config.json key by key: the keys of each field, the valid values, and the source of each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ...files.strict_json import shown

KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "experts": (
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_num_experts",
        "ffn_config.moe_num_experts",
    ),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_k",
        "moe_top_k",
        "moe_topk",
        "ffn_config.moe_top_k",
        "top_k_experts",
    ),
    "hidden": ("hidden_size", "d_model"),
    "expert_hidden": ("routed_expert_hidden_size", "moe_latent_size"),
    "intermediate": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "expert_hidden_dim",
        "ffn_config.ffn_hidden_size",
        "intermediate_size",
    ),
    "shared_experts": (
        "n_shared_experts",
        "num_shared_experts",
        "moe_num_shared_experts",
        "num_shared_expert",
    ),
    "shared_width": (
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "share_expert_dim",
        "shared_intermediate_size",
    ),
    "hash_layers": ("num_hash_layers",),
    "dtype": ("torch_dtype", "dtype"),
}
"""Config keys by field, in order of preference, for all families; a dot separates nested keys.

`intermediate_size` comes last: in models with dense layers of another width it is theirs, and the experts'
width has a key of its own.
"""

LIMITS: Mapping[str, int] = {
    "layers": 1 << 14,
    "experts": 1 << 16,
    "top_k": 1 << 10,
    "hidden": 1 << 20,
    "expert_hidden": 1 << 20,
    "intermediate": 1 << 20,
    "shared_experts": 1 << 10,
    "shared_width": 1 << 20,
    "hash_layers": 1 << 14,
}
"""Upper bounds of config values, far above any model, so that a corrupt config cannot exhaust memory."""

_WORDS = {
    "layers": "the number of layers",
    "experts": "the number of experts",
    "top_k": "the number of experts per token",
    "hidden": "the hidden size",
    "intermediate": "the intermediate size",
}
"""Names of fields in errors, where the name alone says too little."""

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config.text_config")
"""Paths of the text model's config inside that of a multimodal model."""


def _inside(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted `path`, or None."""
    value: Any = values
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _text_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The text model's part of a config and the prefix of its keys."""
    for path in _TEXT:
        inner = _inside(config, path)
        if isinstance(inner, Mapping) and any(key in inner for key in KEYS["hidden"]):
            return inner, path + "."
    return config, ""


class ConfigFields:
    """The text model's config, read key by key; `sources` records which key each field came from."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.outer = config
        self.values, self.prefix = _text_model(config)
        self.sources: dict[str, str] = {}

    @property
    def model_type(self) -> str:
        """The text model's type, or the whole model's; ``""`` when neither is a string."""
        return next(iter(self._words("model_type")), "")

    def names(self) -> Iterator[str]:
        """Model types and class names, the text model's first, in lower case without punctuation."""
        for word in (*self._words("model_type"), *self._words("architectures")):
            yield "".join(filter(str.isalnum, word.lower()))

    def _words(self, key: str) -> Iterator[str]:
        for values in (self.values, self.outer):
            value = values.get(key)
            listed = value if isinstance(value, list) else [value]
            yield from (word for word in listed if isinstance(word, str) and word)

    def get(self, key: str) -> Any:
        """The value of the dotted `key`; None if it is absent."""
        return _inside(self.values, key)

    def has(self, *keys: str) -> bool:
        """True when every key is present and not null."""
        return all(self.get(key) is not None for key in keys)

    def key_of(self, keys: Sequence[str]) -> str | None:
        """The first of `keys` that is present and not null."""
        return next((key for key in keys if self.has(key)), None)

    def source_of(self, key: str) -> str:
        """``config:PATH`` of `key`, as `sources` records it."""
        return f"config:{self.prefix}{key}"

    def invalid(self, key: str, expected: str, hint: str = "Check config.json.") -> CheckpointError:
        """The error for a `key` whose value is not what is `expected`."""
        got = shown(self.get(key))
        return CheckpointError(f"config.json: {self.prefix}{key} must be {expected}, got {got}.", hint=hint)

    def integer(self, name: str, keys: Sequence[str], default: int | None = None, low: int = 1) -> int:
        """The integer at the first of `keys` that is present, from `low` to `LIMITS[name]`, else `default`.

        Raises CheckpointError when the value is anything else, or absent without a default.
        """
        key = self.key_of(keys)
        if key is None:
            if default is None:
                raise CheckpointError(
                    f"config.json: {_WORDS.get(name, name)} is missing; expected one of {', '.join(keys)}.",
                    hint="Check that this is the config of a Mixture-of-Experts model.",
                )
            return default
        value = self.get(key)
        if isinstance(value, list) and len(value) > 1 and all(item == value[0] for item in value):
            # One value per layer or kind of expert, all equal.
            value = value[0]
        high = LIMITS.get(name, 1 << 20)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            several = "Experts or layers of several sizes are not read; ask for that to be added."
            hint = several if isinstance(value, list) else "Check config.json."
            raise self.invalid(key, f"an integer from {low} to {high}", hint)
        self.sources[name] = self.source_of(key)
        return value


_KINDS: Mapping[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 20,
        "a whole number",
    ),
    float: (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e6,
        "a positive number",
    ),
}


@dataclass(frozen=True)
class FieldChoice:
    """How one field is read from a config.

    Attributes:
        keys: keys that may hold it, in order of preference.
        kind: type of the value, bool, int or float; ignored when `words` is set.
        default: value if no key is present and the family has no default.
        assumed: True when `default` is only what such models usually have.
        words: value by spelling, for keys whose value is a word.
        option: command-line option that overrides the field, for error messages.
    """

    keys: tuple[str, ...] = ()
    kind: type = bool
    default: Any = None
    assumed: bool = False
    words: Mapping[Any, Any] | None = None
    option: str = ""

    def read(self, name: str, fields: ConfigFields, defaults: Mapping[str, Any], family: str) -> Any:
        """The value of the first key that is present, else the family's default, else `default`.

        Records the source in ``fields.sources[name]``. Raises CheckpointError when the key's value is not
        a known word, or has the wrong type.
        """
        key = fields.key_of(self.keys)
        if key is None:
            if name in defaults:
                fields.sources[name] = f"family:{family}"
                return defaults[name]
            absent = f"config:no {self.keys[0]}" if self.keys else f"family:{family}"
            fields.sources[name] = "assumed" if self.assumed else absent
            return self.default
        value = fields.get(key)
        fields.sources[name] = fields.source_of(key)
        hint = f"Check config.json, or state it with {self.option}." if self.option else "Check config.json."
        if self.words is not None:
            if not isinstance(value, (str, bool)) or value not in self.words:
                raise fields.invalid(key, f"one of {', '.join(map(str, self.words))}", hint)
            return self.words[value]
        is_valid, expected = _KINDS[self.kind]
        if not is_valid(value):
            raise fields.invalid(key, expected, hint)
        return self.kind(value)

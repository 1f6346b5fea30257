"""A config read key by key: which keys hold a fact, what their values may be, where each was found."""

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
"""Config keys of a fact, in order of preference, whatever the family; a dot leads into an object.

Models whose dense layers have a width of their own state the experts' beside it, so the plain
`intermediate_size` comes last.
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
"""Largest values that a config may ask for, far above any model, so that a wrong one costs nothing."""

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config.text_config")
"""Where a multimodal model's config keeps the text model's."""


def _inside(values: Mapping[str, Any], path: str) -> Any:
    """What `path` leads to, or None."""
    found: Any = values
    for key in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def _text_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The text model's part of a config and the path to it."""
    for path in _TEXT:
        inner = _inside(config, path)
        if isinstance(inner, Mapping) and any(key in inner for key in KEYS["hidden"]):
            return inner, path + "."
    return config, ""


class ConfigFields:
    """A config's text model, read key by key; remembers where each value came from."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.outer = config
        self.values, self.prefix = _text_model(config)
        self.sources: dict[str, str] = {}

    @property
    def model_type(self) -> str:
        """The text model's type, or the whole model's; ``""`` when neither is a string."""
        return next(iter(self._words("model_type")), "")

    def names(self) -> Iterator[str]:
        """What the model calls itself, the text model first: types and classes, in small letters only."""
        for word in (*self._words("model_type"), *self._words("architectures")):
            yield "".join(filter(str.isalnum, word.lower()))

    def _words(self, key: str) -> Iterator[str]:
        for values in (self.values, self.outer):
            found = values.get(key)
            listed = found if isinstance(found, list) else [found]
            yield from (word for word in listed if isinstance(word, str) and word)

    def get(self, key: str) -> Any:
        """The value of `key`, in an object inside where it has dots; None when there is none."""
        return _inside(self.values, key)

    def has(self, *keys: str) -> bool:
        """True when every key is there and not null."""
        return all(self.get(key) is not None for key in keys)

    def key_of(self, keys: Sequence[str]) -> str | None:
        """The first of `keys` that is there and not null."""
        return next((key for key in keys if self.has(key)), None)

    def place(self, key: str) -> str:
        """The source of a fact that `key` holds."""
        return f"config:{self.prefix}{key}"

    def refuse(self, key: str, expected: str, hint: str = "Check config.json.") -> CheckpointError:
        """The error that `key` is not what it must be."""
        got = shown(self.get(key))
        return CheckpointError(f"config.json: {self.prefix}{key} must be {expected}, got {got}.", hint=hint)

    def integer(self, name: str, keys: Sequence[str], default: int | None = None, low: int = 1) -> int:
        """The integer that one of `keys` holds, `low` to `LIMITS[name]`; `default` when none is there.

        Raises CheckpointError when it is something else, or absent without a default.
        """
        key = self.key_of(keys)
        if key is None:
            if default is None:
                raise CheckpointError(
                    f"config.json: {name} is missing, expected one of the keys {', '.join(keys)}.",
                    hint="Check that this is the config of a Mixture-of-Experts model.",
                )
            return default
        value = self.get(key)
        if isinstance(value, list) and len(value) > 1 and all(it == value[0] for it in value):
            # A value for each layer, or each kind of expert, that is the same for all.
            value = value[0]
        high = LIMITS.get(name, 1 << 20)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            several = "Experts or layers of several sizes are not read; ask for that to be added."
            hint = several if isinstance(value, list) else "Check config.json."
            raise self.refuse(key, f"an integer from {low} to {high}", hint)
        self.sources[name] = self.place(key)
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
    """One value of a config.

    Attributes:
        keys: keys that may hold it.
        kind: the type of its value: bool, int or float, unless `words` says more.
        default: its value without any of them, where the architecture implies none.
        assumed: True when `default` is only what such models usually have.
        words: for a key whose value is a word: what each known word means.
        option: the command-line option that states the fact, for messages.
    """

    keys: tuple[str, ...] = ()
    kind: type = bool
    default: Any = None
    assumed: bool = False
    words: Mapping[Any, Any] | None = None
    option: str = ""

    def read(self, name: str, fields: ConfigFields, implied: Mapping[str, Any], family: str) -> Any:
        """The value: a key's, else what the family implies, else the default.

        Its source goes to ``fields.sources[name]``. Raises CheckpointError when the key's value is no
        known word, or not of the right kind.
        """
        key = fields.key_of(self.keys)
        if key is None:
            if name in implied:
                fields.sources[name] = f"family:{family}"
                return implied[name]
            absent = f"config:no {self.keys[0]}" if self.keys else f"family:{family}"
            fields.sources[name] = "assumed" if self.assumed else absent
            return self.default
        value = fields.get(key)
        fields.sources[name] = fields.place(key)
        hint = f"Check config.json, or state it with {self.option}." if self.option else "Check config.json."
        if self.words is not None:
            if not isinstance(value, (str, bool)) or value not in self.words:
                raise fields.refuse(key, f"one of {', '.join(map(str, self.words))}", hint)
            return self.words[value]
        good, expected = _KINDS[self.kind]
        if not good(value):
            raise fields.refuse(key, expected, hint)
        return self.kind(value)

"""What an architecture means by its config: which keys hold a fact, and what no key says.

A family is a row of `FAMILIES`; the next one is another row, and a fact's other spelling another
word in `KEYS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError
from ..problem import SILU, SWIGLU_OAI, Activation, Routing
from .strict_json import shown

KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_top_k"),
    "hidden": ("hidden_size", "d_model"),
    "dtype": ("torch_dtype", "dtype"),
}
"""Config keys of a fact, in order of preference, whatever the family."""

LIMITS: Mapping[str, int] = {
    "layers": 1 << 14,
    "experts": 1 << 16,
    "top_k": 1 << 10,
    "hidden": 1 << 20,
    "intermediate": 1 << 20,
    "shared_experts": 1 << 10,
}
"""Largest values that a config may ask for, far above any model, so that a wrong one costs nothing."""

DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "torch.bfloat16": "bf16"}
"""`MoEProblem.dtype` by the config's spelling."""

ACTIVATIONS: Mapping[str, Activation] = {"silu": SILU, "swiglu": SILU}
"""`Activation` by `hidden_act`."""


class Fields:
    """A config's text model, read key by key; remembers where each value came from."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config")
        nested = isinstance(inner, Mapping) and "hidden_size" in inner
        self.values: Mapping[str, Any] = inner if nested and isinstance(inner, Mapping) else config
        self.prefix = "text_config." if nested else ""
        self.sources: dict[str, str] = {}

    @property
    def model_type(self) -> str:
        value = self.values.get("model_type")
        return value if isinstance(value, str) else ""

    def has(self, *keys: str) -> bool:
        """True when every key is there and not null."""
        return all(self.values.get(key) is not None for key in keys)

    def key_of(self, keys: Sequence[str]) -> str | None:
        """The first of `keys` that is there and not null."""
        return next((key for key in keys if self.has(key)), None)

    def refuse(self, key: str, expected: str) -> CheckpointError:
        """The error that `key` is not what it must be."""
        got = shown(self.values.get(key))
        return CheckpointError(
            f"config.json: {self.prefix}{key} must be {expected}, got {got}.", hint="Check config.json."
        )

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
        value = self.values[key]
        high = LIMITS.get(name, 1 << 20)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        self.sources[name] = f"config:{self.prefix}{key}"
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
class Take:
    """One value of a config.

    Attributes:
        keys: keys that may hold it.
        kind: the type of its value: bool, int or float, unless `words` says more.
        default: its value without any of them.
        assumed: True when `default` is only what such models usually have, not part of the family.
        words: for a key whose value is a word: what each known word means.
    """

    keys: tuple[str, ...] = ()
    kind: type = bool
    default: Any = None
    assumed: bool = False
    words: Mapping[Any, Any] | None = None

    def read(self, name: str, fields: Fields, family: str) -> Any:
        """The value; its source goes to ``fields.sources[name]``.

        Raises CheckpointError when the key's value is no known word, or not of the right kind.
        """
        key = fields.key_of(self.keys)
        if key is None:
            fields.sources[name] = "assumed" if self.assumed else f"family:{family}"
            return self.default
        value = fields.values[key]
        fields.sources[name] = f"config:{fields.prefix}{key}"
        if self.words is not None:
            if not isinstance(value, (str, bool)) or value not in self.words:
                raise fields.refuse(key, f"one of {', '.join(map(str, self.words))}")
            return self.words[value]
        good, expected = _KINDS[self.kind]
        if not good(value):
            raise fields.refuse(key, expected)
        return self.kind(value)


def _all_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    return tuple(range(layers))


def _dense_first(fields: Fields, layers: int) -> tuple[int, ...]:
    """Dense before `first_k_dense_replace`, then every `moe_layer_freq`-th, or as a list of 0/1 says."""
    every = fields.values.get("moe_layer_freq", 1)
    listed = isinstance(every, list)
    freq = 1 if listed else fields.integer("layers", ("moe_layer_freq",), 1)
    first = fields.integer("layers", ("first_k_dense_replace",), 0, low=0)
    if listed:
        if len(every) < layers or any(flag not in (0, 1) for flag in every):
            raise fields.refuse("moe_layer_freq", f"a positive integer or {layers} flags of 0 or 1")
        return tuple(layer for layer in range(first, layers) if every[layer])
    return tuple(layer for layer in range(first, layers) if layer % freq == 0)


@dataclass(frozen=True)
class Family:
    """An architecture's reading of its config.

    Attributes:
        holds: True for a config that this family reads.
        intermediate: keys of the experts' intermediate size.
        moe_layers: the indices of MoE layers among so many.
        routing: a `Take` for each field of `Routing` that is not at its default.
        activation: the function between the GEMMs, or None when `hidden_act` names it.
        limit: where the activation's clamp comes from.
        shared_experts: where their number comes from.
        rows: as `MoEProblem.rows`.
        bias: experts have biases.
    """

    name: str
    holds: Callable[[Fields], bool]
    intermediate: tuple[str, ...]
    moe_layers: Callable[[Fields, int], tuple[int, ...]]
    routing: Mapping[str, Take]
    activation: Activation | None = None
    limit: Take = field(default_factory=Take)
    shared_experts: Take = field(default_factory=lambda: Take(default=0))
    rows: str = "concatenated"
    bias: bool = False

    def read_routing(self, fields: Fields) -> Routing:
        """The routing that the config declares, with a source for each field as ``routing.FIELD``."""
        return Routing(
            **{name: take.read(f"routing.{name}", fields, self.name) for name, take in self.routing.items()}
        )

    def read_activation(self, fields: Fields) -> Activation:
        """The activation with its parameters; CheckpointError when `hidden_act` is not understood."""
        found = self.activation
        if found is None:
            name = Take(("hidden_act", "hidden_activation"), words={key: key for key in ACTIVATIONS})
            if fields.key_of(name.keys) is None:
                raise CheckpointError("config.json: hidden_act is missing.", hint="Check config.json.")
            found = ACTIVATIONS[name.read("activation", fields, self.name)]
        else:
            fields.sources["activation"] = f"family:{self.name}"
        limit = self.limit.read("activation.limit", fields, self.name)
        if limit == found.limit:
            return found
        return Activation(found.name, found.gated, found.alpha, limit)


_NOAUX = {"noaux_tc": True, "greedy": False, "group_limited_greedy": False}

FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt-oss",
        lambda fields: fields.model_type == "gpt_oss",
        intermediate=("intermediate_size",),
        moe_layers=_all_layers,
        routing={
            "scoring": Take(default="softmax"),
            "renormalize": Take(default=True),
            "after_topk": Take(default=True),
            "router_bias": Take(default=True),
        },
        activation=SWIGLU_OAI,
        limit=Take(("swiglu_limit",), float, default=SWIGLU_OAI.limit),
        rows="interleaved",
        bias=True,
    ),
    Family(
        "deepseek",
        lambda fields: fields.has("n_routed_experts", "moe_intermediate_size", "scoring_func"),
        intermediate=("moe_intermediate_size",),
        moe_layers=_dense_first,
        routing={
            "scoring": Take(("scoring_func",), words={"softmax": "softmax", "sigmoid": "sigmoid"}),
            "renormalize": Take(("norm_topk_prob",), default=True, assumed=True),
            "correction_bias": Take(("topk_method",), default=False, assumed=True, words=_NOAUX),
            "groups": Take(("n_group",), int),
            "topk_groups": Take(("topk_group",), int),
            "scale": Take(("routed_scaling_factor",), float, default=1.0, assumed=True),
        },
        limit=Take(("swiglu_limit",), float),
        shared_experts=Take(("n_shared_experts",), int, default=0),
    ),
)
"""Every architecture whose config is understood; the first that holds reads it."""


def family_of(fields: Fields) -> Family:
    """The family that reads this config; CheckpointError when none does."""
    for family in FAMILIES:
        if family.holds(fields):
            return family
    raise CheckpointError(
        f"config.json: model_type {shown(fields.model_type)} is not understood yet.",
        reason=f"Understood are {' and '.join(family.name for family in FAMILIES)} configs.",
        hint="Ask for this architecture to be added.",
    )

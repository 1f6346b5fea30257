"""Model families: the config keys of routing and activation, and the defaults of each architecture.

`ROUTING` and `ACTIVATION` list the keys and spellings of every field. A row of `FAMILIES` holds only what an
architecture implies where its configs have no key. The config of an unknown family is read by its keys
alone; fields that they leave open are assumed, and reported as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import CheckpointError
from ...files.strict_json import shown
from ...problem.moe_problem import SILU, SWIGLU_OAI, Activation, Routing
from .fields import KEYS, ConfigFields, FieldChoice

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": SILU,
    "swish": SILU,
    "swiglu": SILU,
    "swigluoai": SWIGLU_OAI,
    "swiglustep": Activation("swiglustep", limit=7.0),
    "gelu": Activation("gelu"),
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
    "gelu_tanh": Activation("gelu_tanh"),
    "gelu_new": Activation("gelu_tanh"),
    "relu2": Activation("relu2", gated=False),
    "situ": Activation("situ", beta=1.0, linear_beta=1.0),
}
"""`Activation` by the name in the config, with the function's default parameters.

The experts' tensors decide whether they are gated; only `relu2` models are published without a gate.
"""

SCORINGS: Mapping[str, str] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrtsoftplus",
    "sparsemixer": "sparsemixer",
}
"""`Routing.scoring` by its canonical name."""

_SCORING_WORDS: Mapping[str, str] = {**SCORINGS, "noaux_tc": "sigmoid"}
"""`Routing.scoring` by the name in the config; dots.llm1 stores its top-k method under the scoring key."""

_BIAS_WORDS: Mapping[Any, bool] = {
    "noaux_tc": True,
    "greedy": False,
    "group_limited_greedy": False,
    True: True,
    False: False,
}

ROUTING: Mapping[str, FieldChoice] = {
    "scoring": FieldChoice(
        (
            "scoring_func",
            "score_func",
            "score_function",
            "scoring_function",
            "moe_router_activation_func",
            "moe_router_activation",
            "expert_selection_fn",
        ),
        default="softmax",
        assumed=True,
        words=_SCORING_WORDS,
        option="--routing",
    ),
    "renormalize": FieldChoice(
        ("norm_topk_prob", "moe_renormalize", "norm_expert_weight", "route_norm"),
        default=True,
        assumed=True,
        option="--routing",
    ),
    "after_topk": FieldChoice(default=False),
    "correction_bias": FieldChoice(
        (
            "topk_method",
            "use_routing_bias",
            "use_moe_router_bias",
            "moe_use_aux_free",
            "moe_router_enable_expert_bias",
            "use_expert_bias",
        ),
        default=False,
        words=_BIAS_WORDS,
        option="--routing",
    ),
    "router_bias": FieldChoice(default=False),
    "groups": FieldChoice(("n_group", "num_expert_group"), int),
    "topk_groups": FieldChoice(("topk_group", "num_limited_groups"), int),
    "scale": FieldChoice(
        (
            "routed_scaling_factor",
            "moe_router_scaling_factor",
            "moe_routed_scaling_factor",
            "route_scale",
            "router_scaling_factor",
        ),
        float,
        default=1.0,
        option="--routing",
    ),
    "weight_on_input": FieldChoice(("moe_apply_router_weight_on_input",), default=False),
    "expert_scale": FieldChoice(default=False),
}
"""The config keys of each field of `Routing`, except `hashed`, which differs by layer."""

ACTIVATION = FieldChoice(
    ("mlp_hidden_act", "hidden_act", "hidden_activation", "ffn_config.ffn_act_fn.name"),
    words={word: word for word in ACTIVATIONS},
    option="--activation",
)
"""The config keys of the activation's name."""

ACTIVATION_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "silu": ("limit",),
    "swigluoai": ("alpha", "limit"),
    "swiglustep": ("limit",),
    "situ": ("beta", "linear_beta"),
}
"""Parameters by activation name; activations that are not listed have none."""

PARAMETER_KEYS: Mapping[str, tuple[str, ...]] = {
    "alpha": ("swiglu_alpha",),
    "limit": ("swiglu_limit",),
    "beta": ("activation_situ_beta",),
    "linear_beta": ("activation_situ_linear_beta",),
}
"""Config keys by activation parameter."""


@dataclass(frozen=True)
class Family:
    """What an architecture implies beyond the keys of its configs.

    Attributes:
        name: the name in ``family:NAME`` sources.
        prefixes: prefixes of its model types and class names, lower case, letters and digits only.
        marker_keys: keys that only its configs have together, for configs without a known model type.
        absent_keys: keys that its configs never have, to rule out families with the same marker keys.
        defaults: values of fields that no key states: ``routing.FIELD``, ``activation``,
            ``shared_experts``, ``rows``, ``bias``.
        fixed: values that the architecture decides, whatever the keys say.
        stated: fields that its published configs always state; without the key, their default is assumed.
        experts: modules of a layer that hold the experts' matrices, as checkpoints and configs name them.
    """

    name: str
    prefixes: tuple[str, ...] = ()
    marker_keys: tuple[str, ...] = ()
    absent_keys: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    stated: tuple[str, ...] = ()
    experts: tuple[str, ...] = ("mlp.experts",)

    def matches_name(self, name: str) -> bool:
        """True for a normalized model type or class name of this family."""
        return name.startswith(self.prefixes)

    def matches_keys(self, fields: ConfigFields) -> bool:
        """True when the config has this family's marker keys and none of its absent keys."""
        has_markers = bool(self.marker_keys) and fields.has(*self.marker_keys)
        return has_markers and not any(map(fields.has, self.absent_keys))

    def read_field(self, name: str, choice: FieldChoice, fields: ConfigFields) -> Any:
        """The value of one field; records its source in `fields`. CheckpointError as `FieldChoice.read`."""
        if name in self.fixed:
            fields.sources[name] = f"family:{self.name}"
            return self.fixed[name]
        value = choice.read(name, fields, self.defaults, self.name)
        if name in self.stated and fields.key_of(choice.keys) is None:
            fields.sources[name] = "assumed"
        return value

    def read_routing(self, fields: ConfigFields, overrides: Mapping[str, Any]) -> Routing:
        """The routing that the config declares; records the source of each field as ``routing.FIELD``.

        Fields in `overrides` are not looked up. CheckpointError when a key's value is not understood.
        """
        values = dict(overrides)
        for name, choice in ROUTING.items():
            if name not in overrides:
                values[name] = self.read_field(f"routing.{name}", _norm_order(choice, fields), fields)
        return Routing(**{**values, "renormalize": bool(values["renormalize"])})

    def read_activation(self, fields: ConfigFields) -> Activation:
        """The activation with its parameters; CheckpointError when its name is not understood."""
        name = self.read_field("activation", ACTIVATION, fields)
        if name is None:
            fields.sources["activation"] = "assumed"
            name = "silu"
        activation = ACTIVATIONS[name]
        parameters = {}
        for parameter in ACTIVATION_PARAMETERS.get(activation.name, ()):
            default = getattr(activation, parameter)
            assumed = default is not None and not fields.sources["activation"].startswith("family:")
            choice = FieldChoice(PARAMETER_KEYS[parameter], float, default, assumed, option="--activation")
            parameters[parameter] = self.read_field(f"activation.{parameter}", choice, fields)
        return replace(activation, **parameters)


def _norm_order(choice: FieldChoice, fields: ConfigFields) -> FieldChoice:
    """`choice`, reading the order of a norm where the config has that instead of a boolean (DBRX)."""
    order = "ffn_config.moe_normalize_expert_weights"
    if "norm_topk_prob" in choice.keys and fields.key_of(choice.keys) is None and fields.has(order):
        if fields.get(order) != 1:
            raise fields.invalid(order, "1: weights divided by their sum", "State it with --routing.")
        return replace(choice, keys=(order,), kind=float)
    return choice


_SOFTMAX = {"routing.scoring": "softmax", "routing.renormalize": True}
_SIGMOID_BIAS = {"routing.scoring": "sigmoid", "routing.renormalize": True, "routing.correction_bias": True}

_GROUPED = ("routing.scale", "routing.groups", "routing.topk_groups")
_SPARSE = ("block_sparse_moe.experts", "mlp.experts")

FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt-oss",
        ("gptoss",),
        ("swiglu_limit", "initial_context_length"),
        defaults={
            **_SOFTMAX,
            "routing.after_topk": True,
            "routing.router_bias": True,
            "rows": "interleaved",
            "bias": True,
        },
        # The configs of gpt-oss say silu.
        fixed={"activation": "swigluoai"},
        stated=("activation.limit",),
    ),
    Family(
        "glm",
        ("glm4moe", "glm4vmoe", "glmmoe"),
        ("n_routed_experts", "first_k_dense_replace", "n_group"),
        ("scoring_func", "topk_method"),
        defaults={**_SIGMOID_BIAS, "activation": "silu"},
        stated=_GROUPED,
    ),
    Family(
        "nemotron-h",
        ("nemotronh",),
        ("hybrid_override_pattern", "n_routed_experts"),
        defaults={**_SIGMOID_BIAS, "activation": "relu2"},
        stated=("routing.scale",),
        experts=("mixer.experts",),
    ),
    Family(
        "deepseek-v2",
        ("deepseekv2",),
        defaults={"routing.scoring": "softmax", "routing.renormalize": False, "activation": "silu"},
        stated=_GROUPED,
    ),
    Family(
        "deepseek-v4",
        ("deepseekv4",),
        ("n_routed_experts", "num_hash_layers"),
        defaults={**_SIGMOID_BIAS, "routing.scoring": "sqrtsoftplus", "activation": "silu"},
        stated=("routing.scale", "activation.limit"),
        experts=("ffn.experts", "mlp.experts"),
    ),
    Family(
        "deepseek", ("deepseek", "kimik2"), defaults={**_SIGMOID_BIAS, "activation": "silu"}, stated=_GROUPED
    ),
    Family(
        "kimi-linear",
        ("kimilinear", "kimik3"),
        ("moe_router_activation_func",),
        defaults={"routing.correction_bias": True},
        stated=("routing.scale",),
        experts=("block_sparse_moe.experts",),
    ),
    Family(
        "minimax-m2",
        ("minimaxm2", "minimaxm3"),
        ("use_routing_bias",),
        defaults=_SIGMOID_BIAS,
        experts=_SPARSE,
    ),
    # MiniMax-Text-01 and M1.
    Family("minimax", ("minimax",), defaults=_SOFTMAX, experts=_SPARSE),
    Family("mimo", ("mimo",), defaults=_SIGMOID_BIAS),
    Family(
        "qwen2",
        ("qwen2moe",),
        defaults={"routing.scoring": "softmax", "routing.renormalize": False},
    ),
    Family("qwen3", ("qwen3",), ("decoder_sparse_step",), defaults=_SOFTMAX),
    Family(
        "phi-moe",
        ("phimoe",),
        ("num_local_experts", "input_jitter_noise"),
        defaults={"routing.scoring": "sparsemixer", "routing.renormalize": False},
        experts=_SPARSE,
    ),
    Family(
        "jamba",
        ("jamba",),
        ("expert_layer_period",),
        defaults={"routing.scoring": "softmax", "routing.renormalize": False},
        experts=("feed_forward.experts",),
    ),
    Family(
        "dbrx",
        ("dbrx",),
        ("ffn_config",),
        defaults={"routing.scoring": "softmax", "activation": "silu"},
        experts=("ffn.experts.mlp",),
    ),
    Family(
        "granite",
        ("granitemoe",),
        ("num_local_experts", "residual_multiplier"),
        defaults={**_SOFTMAX, "routing.after_topk": True},
        experts=("block_sparse_moe",),
    ),
    Family(
        "ernie",
        ("ernie45moe",),
        ("moe_num_experts", "moe_k"),
        defaults={**_SOFTMAX, "routing.correction_bias": True},
    ),
    Family(
        "olmoe",
        ("olmoe",),
        defaults={"routing.scoring": "softmax", "routing.renormalize": False},
    ),
    Family(
        "gemma4",
        ("gemma4",),
        ("top_k_experts",),
        defaults={**_SOFTMAX, "routing.expert_scale": True, "activation": "gelu_pytorch_tanh"},
        experts=("experts", "moe.experts"),
    ),
    Family(
        "llama4",
        ("llama4",),
        ("interleave_moe_layer_step",),
        defaults={
            "routing.scoring": "sigmoid",
            "routing.renormalize": False,
            "routing.after_topk": True,
            "routing.weight_on_input": True,
            "shared_experts": 1,
        },
        experts=("feed_forward.experts",),
    ),
    Family("step-3.5", ("step3p",), defaults={**_SIGMOID_BIAS, "activation": "silu"}, experts=("moe",)),
    Family(
        "step",
        ("step3",),
        ("moe_num_experts", "moe_top_k", "share_expert_dim"),
        defaults={"routing.scoring": "softmax", "activation": "silu"},
        experts=("moe",),
    ),
    Family("dots", ("dots1",), defaults={**_SIGMOID_BIAS, "activation": "silu"}),
    Family("hunyuan", ("hunyuanmoe", "hunyuanv1moe"), defaults={**_SOFTMAX, "activation": "silu"}),
    Family("hunyuan-v3", ("hyv3",), defaults={**_SIGMOID_BIAS, "activation": "silu"}),
    Family("afmoe", ("afmoe",), defaults={"routing.correction_bias": True}),
    Family(
        "bailing",
        ("bailingmoe",),
        defaults={"routing.scoring": "softmax", "routing.renormalize": True, "activation": "silu"},
    ),
    Family("laguna", ("laguna",), defaults=_SIGMOID_BIAS),
    Family(
        "lfm2",
        ("lfm2moe",),
        defaults={"routing.scoring": "sigmoid", "activation": "silu"},
        experts=("feed_forward.experts",),
    ),
    Family("exaone", ("exaonemoe",), defaults=_SIGMOID_BIAS),
    Family("mixtral", ("mixtral",), defaults=_SOFTMAX, experts=_SPARSE),
)
"""Architectures that imply more than the keys of their configs; the first match by name reads a config."""

UNKNOWN = Family(
    "unknown", experts=tuple(dict.fromkeys(module for family in FAMILIES for module in family.experts))
)
"""Fallback without defaults: the config is read by its keys alone."""


def family_of(fields: ConfigFields) -> Family:
    """The family of a config: by model type or class name, else by marker keys, else `UNKNOWN`.

    Raises CheckpointError when no family matches by name and no key states the number of experts and top-k.
    """
    for name in fields.names():
        for family in FAMILIES:
            if family.prefixes and family.matches_name(name):
                return family
    if fields.key_of(KEYS["experts"]) is None or fields.key_of(KEYS["top_k"]) is None:
        raise CheckpointError(
            f"config.json: model_type {shown(fields.model_type)} is not understood as a "
            "Mixture-of-Experts model: no key states the number of experts and top-k.",
            reason=f"Keys looked for are {', '.join(KEYS['experts'])} and {', '.join(KEYS['top_k'])}.",
            hint="Check that this is the config of a Mixture-of-Experts model.",
        )
    return next((family for family in FAMILIES if family.matches_keys(fields)), UNKNOWN)

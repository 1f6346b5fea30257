"""What an architecture means by its config: the keys of each fact, and what no key says.

A fact is a row of `ROUTING` or `ACTIVATION`, another spelling a word there. A family is a row of
`FAMILIES` and states only what its architecture implies where its configs have no key. A config of no
known family is read by its keys alone; what they leave open is assumed, and said to be.
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
"""`Activation` by the config's word, with the parameters that the function has unless told others.

Whether experts are gated is what their tensors show; `relu2` alone is published without a gate.
"""

SCORINGS: Mapping[str, str] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrtsoftplus",
    "sparsemixer": "sparsemixer",
}
"""`Routing.scoring` by its own word."""

_SCORING_WORDS: Mapping[str, str] = {**SCORINGS, "noaux_tc": "sigmoid"}
"""`Routing.scoring` by the config's word; dots.llm1 names there the method that it goes with."""

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
"""Where each field of `Routing` comes from; `hashed` differs by layer and is no row."""

ACTIVATION = FieldChoice(
    ("mlp_hidden_act", "hidden_act", "hidden_activation", "ffn_config.ffn_act_fn.name"),
    words={word: word for word in ACTIVATIONS},
    option="--activation",
)
"""Where the activation's name comes from."""

TAKES: Mapping[str, tuple[str, ...]] = {
    "silu": ("limit",),
    "swigluoai": ("alpha", "limit"),
    "swiglustep": ("limit",),
    "situ": ("beta", "linear_beta"),
}
"""Parameters of an activation; the others have none."""

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "alpha": ("swiglu_alpha",),
    "limit": ("swiglu_limit",),
    "beta": ("activation_situ_beta",),
    "linear_beta": ("activation_situ_linear_beta",),
}
"""Keys of the activation's parameters."""


@dataclass(frozen=True)
class Family:
    """What an architecture implies beyond the keys of its configs.

    Attributes:
        name: as sources spell it.
        words: how its model types and classes begin, letters and digits only.
        marks: keys that together only its configs have, for one that does not name itself.
        without: keys that its configs never have, to tell it from those with the same marks.
        implied: facts where no key says them: ``routing.FIELD``, ``activation``, ``shared_experts``,
            ``rows``, ``bias``.
        fixed: facts that the architecture decides whatever a key says.
    """

    name: str
    words: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    implied: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def calls_itself(self, name: str) -> bool:
        """True for a model type or class of this family."""
        return name.startswith(self.words)

    def marked(self, fields: ConfigFields) -> bool:
        """True when the config's keys are this family's."""
        return bool(self.marks) and fields.has(*self.marks) and not any(map(fields.has, self.without))

    def fact(self, name: str, take: FieldChoice, fields: ConfigFields) -> Any:
        """The value of a fact, its source noted in `fields`. CheckpointError as `FieldChoice.read`."""
        if name in self.fixed:
            fields.sources[name] = f"family:{self.name}"
            return self.fixed[name]
        return take.read(name, fields, self.implied, self.name)

    def read_routing(self, fields: ConfigFields, given: Mapping[str, Any]) -> Routing:
        """The routing that the config declares, with a source for each field as ``routing.FIELD``.

        Fields of `given` are not looked up. CheckpointError when a key's value is not understood.
        """
        found = dict(given)
        for name, take in ROUTING.items():
            if name not in given:
                found[name] = self.fact(f"routing.{name}", _of_kind(take, fields), fields)
        return Routing(**{**found, "renormalize": bool(found["renormalize"])})

    def read_activation(self, fields: ConfigFields) -> Activation:
        """The activation with its parameters; CheckpointError when its name is not understood."""
        name = self.fact("activation", ACTIVATION, fields)
        if name is None:
            fields.sources["activation"] = "assumed"
            name = "silu"
        found = ACTIVATIONS[name]
        told = {}
        for parameter in TAKES.get(found.name, ()):
            default = getattr(found, parameter)
            unsure = default is not None and not fields.sources["activation"].startswith("family:")
            take = FieldChoice(PARAMETERS[parameter], float, default, unsure, option="--activation")
            told[parameter] = self.fact(f"activation.{parameter}", take, fields)
        return replace(found, **told)


def _of_kind(take: FieldChoice, fields: ConfigFields) -> FieldChoice:
    """`take`, read as the norm's order where the config states one instead of yes or no (DBRX)."""
    order = "ffn_config.moe_normalize_expert_weights"
    if "norm_topk_prob" in take.keys and fields.key_of(take.keys) is None and fields.has(order):
        if fields.get(order) != 1:
            raise fields.refuse(order, "1: weights divided by their sum", "State it with --routing.")
        return replace(take, keys=(order,), kind=float)
    return take


_SOFTMAX = {"routing.scoring": "softmax", "routing.renormalize": True}
_SIGMOID_BIAS = {"routing.scoring": "sigmoid", "routing.renormalize": True, "routing.correction_bias": True}

FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt-oss",
        ("gptoss",),
        ("swiglu_limit", "initial_context_length"),
        implied={
            **_SOFTMAX,
            "routing.after_topk": True,
            "routing.router_bias": True,
            "rows": "interleaved",
            "bias": True,
        },
        # Its configs say silu.
        fixed={"activation": "swigluoai"},
    ),
    Family(
        "glm",
        ("glm4moe", "glm4vmoe", "glmmoe"),
        ("n_routed_experts", "first_k_dense_replace", "n_group"),
        ("scoring_func", "topk_method"),
        implied={**_SIGMOID_BIAS, "activation": "silu"},
    ),
    Family(
        "nemotron-h",
        ("nemotronh",),
        ("hybrid_override_pattern", "n_routed_experts"),
        implied={**_SIGMOID_BIAS, "activation": "relu2"},
    ),
    Family(
        "deepseek-v2",
        ("deepseekv2",),
        implied={"routing.scoring": "softmax", "routing.renormalize": False, "activation": "silu"},
    ),
    Family(
        "deepseek-v4",
        ("deepseekv4",),
        ("n_routed_experts", "num_hash_layers"),
        implied={**_SIGMOID_BIAS, "routing.scoring": "sqrtsoftplus", "activation": "silu"},
    ),
    Family("deepseek", ("deepseek", "kimik2"), implied={**_SIGMOID_BIAS, "activation": "silu"}),
    Family(
        "kimi-linear",
        ("kimilinear", "kimik3"),
        ("moe_router_activation_func",),
        implied={"routing.correction_bias": True},
    ),
    Family("minimax-m2", ("minimaxm2", "minimaxm3"), ("use_routing_bias",), implied=_SIGMOID_BIAS),
    # MiniMax-Text-01 and M1.
    Family("minimax", ("minimax",), implied=_SOFTMAX),
    Family("mimo", ("mimo",), implied=_SIGMOID_BIAS),
    Family("qwen2", ("qwen2moe",), implied={"routing.scoring": "softmax", "routing.renormalize": False}),
    Family("qwen3", ("qwen3",), ("decoder_sparse_step",), implied=_SOFTMAX),
    Family(
        "phi-moe",
        ("phimoe",),
        ("num_local_experts", "input_jitter_noise"),
        implied={"routing.scoring": "sparsemixer", "routing.renormalize": False},
    ),
    Family(
        "jamba",
        ("jamba",),
        ("expert_layer_period",),
        implied={"routing.scoring": "softmax", "routing.renormalize": False},
    ),
    Family("dbrx", ("dbrx",), ("ffn_config",), implied={"routing.scoring": "softmax", "activation": "silu"}),
    Family(
        "granite",
        ("granitemoe",),
        ("num_local_experts", "residual_multiplier"),
        implied={**_SOFTMAX, "routing.after_topk": True},
    ),
    Family(
        "ernie",
        ("ernie45moe",),
        ("moe_num_experts", "moe_k"),
        implied={**_SOFTMAX, "routing.correction_bias": True},
    ),
    Family("olmoe", ("olmoe",), implied={"routing.scoring": "softmax", "routing.renormalize": False}),
    Family(
        "gemma4",
        ("gemma4",),
        ("top_k_experts",),
        implied={**_SOFTMAX, "routing.expert_scale": True, "activation": "gelu_pytorch_tanh"},
    ),
    Family(
        "llama4",
        ("llama4",),
        ("interleave_moe_layer_step",),
        implied={
            "routing.scoring": "sigmoid",
            "routing.renormalize": False,
            "routing.after_topk": True,
            "routing.weight_on_input": True,
            "shared_experts": 1,
        },
    ),
    Family("step-3.5", ("step3p",), implied={**_SIGMOID_BIAS, "activation": "silu"}),
    Family(
        "step",
        ("step3",),
        ("moe_num_experts", "moe_top_k", "share_expert_dim"),
        implied={"routing.scoring": "softmax", "activation": "silu"},
    ),
    Family("dots", ("dots1",), implied={**_SIGMOID_BIAS, "activation": "silu"}),
    Family("hunyuan", ("hunyuanmoe", "hunyuanv1moe"), implied={**_SOFTMAX, "activation": "silu"}),
    Family("hunyuan-v3", ("hyv3",), implied={**_SIGMOID_BIAS, "activation": "silu"}),
    Family("afmoe", ("afmoe",), implied={"routing.correction_bias": True}),
    Family(
        "bailing",
        ("bailingmoe",),
        implied={"routing.scoring": "softmax", "routing.renormalize": True, "activation": "silu"},
    ),
    Family("laguna", ("laguna",), implied=_SIGMOID_BIAS),
    Family("lfm2", ("lfm2moe",), implied={"routing.scoring": "sigmoid", "activation": "silu"}),
    Family("exaone", ("exaonemoe",), implied=_SIGMOID_BIAS),
    Family("mixtral", ("mixtral",), implied=_SOFTMAX),
)
"""Every architecture that implies more than its keys say; the first that the config names reads it."""

UNKNOWN = Family("unknown")
"""Reads a config of no known family: by its keys alone."""


def family_of(fields: ConfigFields) -> Family:
    """The family that reads this config: by what it calls itself, else by its keys, else `UNKNOWN`.

    Raises CheckpointError when no key states experts and top-k: such a config is no MoE model's.
    """
    for name in fields.names():
        for family in FAMILIES:
            if family.words and family.calls_itself(name):
                return family
    if fields.key_of(KEYS["experts"]) is None or fields.key_of(KEYS["top_k"]) is None:
        raise CheckpointError(
            f"config.json: model_type {shown(fields.model_type)} is not understood as a "
            "Mixture-of-Experts model: no key states the number of experts and top-k.",
            reason=f"Keys looked for are {', '.join(KEYS['experts'])} and {', '.join(KEYS['top_k'])}.",
            hint="Check that this is the config of a Mixture-of-Experts model.",
        )
    return next((family for family in FAMILIES if family.marked(fields)), UNKNOWN)

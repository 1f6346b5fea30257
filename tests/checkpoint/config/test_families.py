"""Configs of the families as others publish them: other sizes, keys that moved, names that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from moectl.checkpoint import LayerGroup, layer_groups
from moectl.errors import CheckpointError
from moectl.problem.layer_ranges import ranges
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Routing

SIZES = {"num_hidden_layers": 6, "hidden_size": 1024, "vocab_size": 1000}
BF16 = {"torch_dtype": "bfloat16"}


def groups_of(**config: Any) -> tuple[LayerGroup, ...]:
    return layer_groups({**SIZES, **BF16, **config}, None)


def group_of(**config: Any) -> LayerGroup:
    """The last layers' group."""
    return max(groups_of(**config), key=lambda group: group.layers[-1])


GLM = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
QWEN = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "num_experts": 16,
}
STEP = {
    "moe_num_experts": 16,
    "moe_top_k": 8,
    "moe_intermediate_size": 256,
    "share_expert_dim": 256,
    "norm_expert_weight": True,
    "moe_layers_enum": "3,4,5",
}
GRANITE = {"num_local_experts": 16, "num_experts_per_tok": 8, "intermediate_size": 256, "hidden_act": "silu"}
SIGMOID = Routing("sigmoid", correction_bias=True)

CASES: dict[str, tuple[dict[str, Any], Routing, str, dict[str, Any]]] = {
    # name: config, routing, MoE layers, other fields of the problem
    "GLM-4.5 with nothing but keys": (
        GLM,
        Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1, scale=2.5),
        "3-5",
        {"shared_experts": 1},
    ),
    "GLM-4.5V, nested": (
        {"model_type": "glm4v_moe", "text_config": {**SIZES, "model_type": "glm4v_moe_text", **GLM}},
        Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1, scale=2.5),
        "3-5",
        {},
    ),
    "GLM with a list of layer kinds": (
        {**GLM, "mlp_layer_types": ["dense"] * 4 + ["sparse"] * 2, "model_type": "glm_moe_dsa"},
        Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1, scale=2.5),
        "4-5",
        {},
    ),
    "DeepSeek-V3 saved again, without its own keys": (
        {
            "model_type": "deepseek_v32",
            "n_routed_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "hidden_act": "silu",
            "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        },
        Routing("sigmoid", correction_bias=True, groups=8, topk_groups=4, scale=2.5),
        "1-5",
        {},
    ),
    "Qwen3 saved by transformers 5": (
        {
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "num_local_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "intermediate_size": 6144,
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0, 2],
        },
        Routing("softmax"),
        "1, 3-5",
        {"experts": 16},
    ),
    "Qwen3-Omni's thinker": (
        {
            "model_type": "qwen3_omni_moe",
            "thinker_config": {
                "text_config": {**SIZES, **QWEN, "model_type": "qwen3_omni_moe_text", "norm_topk_prob": True}
            },
        },
        Routing("softmax"),
        "0-5",
        {},
    ),
    "Qwen2 with every second layer": (
        {
            **QWEN,
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 1024,
        },
        Routing("softmax", renormalize=False),
        "1, 3, 5",
        {"shared_experts": 1},
    ),
    "MiMo-V2": (
        {
            "model_type": "mimo_v2_flash",
            "n_routed_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "n_shared_experts": None,
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": None,
            "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        },
        Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1),
        "1-5",
        {"shared_experts": 0},
    ),
    "Step-3": (STEP, Routing("softmax"), "3-5", {"shared_experts": 1, "activation": Activation("silu")}),
    "Step-3.5": (
        {
            **STEP,
            "model_type": "step3p5",
            "moe_router_activation": "sigmoid",
            "use_moe_router_bias": True,
            "moe_router_scaling_factor": 3.0,
        },
        Routing("sigmoid", correction_bias=True, scale=3.0),
        "3-5",
        {},
    ),
    "DBRX": (
        {
            "model_type": "dbrx",
            "d_model": 1024,
            "n_layers": 6,
            "ffn_config": {
                "ffn_act_fn": {"name": "silu"},
                "ffn_hidden_size": 256,
                "moe_num_experts": 16,
                "moe_top_k": 4,
                "moe_normalize_expert_weights": 1,
            },
        },
        Routing("softmax"),
        "0-5",
        {"top_k": 4},
    ),
    "Mixtral-8x22B": (
        {"model_type": "mixtral", **GRANITE, "num_experts_per_tok": 2},
        Routing("softmax"),
        "0-5",
        {},
    ),
    "Granite-4, hybrid": (
        {
            "model_type": "granitemoehybrid",
            **GRANITE,
            "shared_intermediate_size": 512,
            "residual_multiplier": 0.22,
            "layer_types": ["mamba"] * 5 + ["attention"],
        },
        Routing("softmax", after_topk=True),
        "0-5",
        {"shared_experts": 1},
    ),
    "ERNIE-4.5-300B": (
        {
            "model_type": "ernie4_5_moe",
            "moe_num_experts": 16,
            "moe_k": 8,
            "moe_num_shared_experts": 0,
            "moe_intermediate_size": 256,
            "moe_layer_start_index": 3,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "hidden_act": "silu",
            "moe_use_aux_free": True,
        },
        Routing("softmax", correction_bias=True),
        "3-5",
        {},
    ),
    "Jamba": (
        {
            "model_type": "jamba",
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "intermediate_size": 256,
            "hidden_act": "silu",
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        Routing("softmax", renormalize=False),
        "1, 3, 5",
        {},
    ),
    "Nemotron-H by kinds of layers": (
        {
            "model_type": "nemotron_h",
            "n_routed_experts": 16,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 256,
            "moe_latent_size": 512,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "routed_scaling_factor": 5.0,
            "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "moe"],
        },
        Routing("sigmoid", correction_bias=True, scale=5.0),
        "1, 3, 5",
        {"activation": Activation("relu2", gated=False), "model_hidden": 1024, "shared_experts": 1},
    ),
    "gpt-oss by its keys": (
        {
            "num_local_experts": 16,
            "experts_per_token": 4,
            "intermediate_size": 256,
            "hidden_act": "silu",
            "swiglu_limit": 7.0,
            "initial_context_length": 4096,
        },
        Routing("softmax", after_topk=True, router_bias=True),
        "0-5",
        {"rows": "interleaved", "bias": True},
    ),
    "Llama-4 by its keys": (
        {
            "text_config": {
                **SIZES,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "intermediate_size": 256,
                "intermediate_size_mlp": 512,
                "hidden_act": "silu",
                "interleave_moe_layer_step": 2,
                "moe_layers": [],
            }
        },
        Routing("sigmoid", renormalize=False, after_topk=True, weight_on_input=True),
        "1, 3, 5",
        {"shared_experts": 1},
    ),
    "Ling": (
        {
            "model_type": "bailing_moe_v2",
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "num_shared_experts": 1,
            "score_function": "sigmoid",
            "norm_topk_prob": True,
            "moe_router_enable_expert_bias": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
        },
        Routing("sigmoid", correction_bias=True, groups=8, topk_groups=4, scale=2.5),
        "1-5",
        {},
    ),
    "gpt-oss with the keys of its first config": (
        {
            "num_experts": 16,
            "experts_per_token": 4,
            "intermediate_size": 256,
            "swiglu_limit": 7.0,
            "initial_context_length": 4096,
        },
        Routing("softmax", after_topk=True, router_bias=True),
        "0-5",
        {"activation": SWIGLU_OAI, "bias": True, "rows": "interleaved"},
    ),
    "MiniMax-M1, whose router is not M2's": (
        {"model_type": "minimax_m1", **GRANITE},
        Routing("softmax"),
        "0-5",
        {},
    ),
    "MiniMax-M2 that does not name itself": (
        {**GRANITE, "use_routing_bias": True, "shared_intermediate_size": 0},
        SIGMOID,
        "0-5",
        {},
    ),
    "dots.llm1": (
        {
            **GLM,
            "model_type": "dots1",
            "scoring_func": "noaux_tc",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
        },
        Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1, scale=2.5),
        "3-5",
        {},
    ),
    "Hunyuan-A13B": (
        {
            "model_type": "hunyuan_v1_moe",
            "num_experts": 16,
            "moe_topk": [8] * 6,
            "moe_intermediate_size": [256] * 6,
            "num_shared_expert": [1] * 6,
            "norm_topk_prob": True,
            "hidden_act": "silu",
        },
        Routing("softmax"),
        "0-5",
        {"shared_experts": 1, "top_k": 8},
    ),
    "Hunyuan 3": (
        {
            "model_type": "hy_v3",
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "intermediate_size": 6144,
            "expert_hidden_dim": 256,
            "num_shared_experts": 1,
            "route_norm": True,
            "router_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
        },
        Routing("sigmoid", correction_bias=True, scale=2.826),
        "1-5",
        {"shared_experts": 1},
    ),
    "Laguna": (
        {
            "model_type": "laguna",
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "moe_routed_scaling_factor": 2.5,
            "moe_apply_router_weight_on_input": False,
            "hidden_act": "silu",
            "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        },
        Routing("sigmoid", correction_bias=True, scale=2.5),
        "1-5",
        {"shared_experts": 1},
    ),
    "Step-3.5 without its router's keys": (
        {"model_type": "step3p5", **STEP},
        SIGMOID,
        "3-5",
        {"shared_experts": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_config_of_a_family(name: str) -> None:
    config, routing, layers, fields = CASES[name]
    group = group_of(**config)
    assert group.problem.routing == routing
    assert ranges(group.layers) == layers
    assert {field: getattr(group.problem, field) for field in fields} == fields
    assert (group.problem.dims.intermediate, group.problem.model_hidden) == (256, 1024)
    assert not any("assumed" in note for note in group.notes)


def test_a_latent_size_is_the_experts_own() -> None:
    config, *_ = CASES["Nemotron-H by kinds of layers"]
    group = group_of(**config)
    assert group.problem.dims.hidden == 512
    assert group.sources["hidden"] == "config:moe_latent_size"
    assert group.sources["model_hidden"] == "config:hidden_size"


@pytest.mark.parametrize("nested", [False, True])
def test_a_wide_dtype_is_said_once(nested: bool) -> None:
    config = {**GRANITE, "torch_dtype": "float32"}
    group = group_of(**({"text_config": {**SIZES, **config}} if nested else config))
    assert group.problem.dtype == "bf16"
    assert sum("float32" in note for note in group.notes) == 1


def test_hash_layers_and_limits_make_groups() -> None:
    config = {
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 256,
        "num_hash_layers": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
    }
    first, rest = groups_of(**config)
    assert (first.layers, rest.layers) == ((0, 1), (2, 3, 4, 5))
    assert first.problem.routing == Routing("sqrtsoftplus", hashed=True)
    assert rest.problem.routing == Routing("sqrtsoftplus", correction_bias=True)
    assert rest.problem.activation == Activation("silu", limit=10.0)
    assert first.sources["routing.hashed"] == "config:num_hash_layers"
    plain, clamped = groups_of(**STEP, swiglu_limits=[0, 0, 0, 0, None, 7.0])
    assert (plain.layers, clamped.layers) == ((3, 4), (5,))
    assert plain.problem.activation == Activation("silu")
    assert clamped.problem.activation == Activation("swiglustep", limit=7.0)


def test_swigluoai_takes_its_parameters_from_keys() -> None:
    config = dict(GRANITE, hidden_act="swigluoai", swiglu_alpha=1.5, swiglu_limit=6.0, scoring_func="sigmoid")
    group = group_of(**config, use_routing_bias=True)
    assert group.problem.activation == Activation("swigluoai", alpha=1.5, limit=6.0)
    assert group.problem.routing == SIGMOID


def test_an_unknown_architecture_is_read_by_its_keys_and_says_what_it_assumes() -> None:
    group = group_of(model_type="motif", **{**QWEN, "scoring_func": "sigmoid"}, first_k_dense_replace=1)
    assert group.problem.routing.scoring == "sigmoid"
    assert group.sources["routing.scoring"] == "config:scoring_func"
    unsaid = group_of(
        model_type="motif",
        num_experts=16,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
    )
    assert unsaid.problem.routing == Routing("softmax")
    for fact in ("routing.scoring", "routing.renormalize", "activation"):
        assert unsaid.sources[fact] == "assumed"
        assert any(fact in note and "--routing" in note for note in unsaid.notes)


@pytest.mark.parametrize("kinds", ["M*EM*E", ["mamba", "attention", "moe"] * 2], ids=["letters", "words"])
def test_the_number_of_layers_follows_from_a_list_of_their_kinds(kinds: Any) -> None:
    key = "hybrid_override_pattern" if isinstance(kinds, str) else "layers_block_type"
    config = {
        "model_type": "nemotron_h",
        "n_routed_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "hidden_size": 1024,
        key: kinds,
    }
    (group,) = layer_groups(config, None)
    assert group.layers == (2, 5)
    assert group.sources["layers"] == f"config:{key}"
    with pytest.raises(CheckpointError, match="layers is missing"):
        layer_groups({name: value for name, value in config.items() if name != key}, None)
    with pytest.raises(CheckpointError, match="a kind for each"):
        layer_groups({**config, key: []}, None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GRANITE, "hidden_act": "mish"}, ("hidden_act", "mish", "--activation")),
        ({**GRANITE, "scoring_func": "entmax"}, ("scoring_func", "entmax", "--routing")),
        ({**STEP, "moe_layers_enum": "3,x"}, ("moe_layers_enum", "layer numbers")),
        ({**STEP, "swiglu_limits": [0, "x"]}, ("swiglu_limits",)),
        ({**GLM, "mlp_layer_types": ["sparse"]}, ("mlp_layer_types", "6 layers")),
        ({**GLM, "first_k_dense_replace": 6}, ("none of the 6 layers", "first_k_dense_replace")),
        ({**GLM, "zero_expert_num": 4}, ("zero_expert_num", "not supported")),
        ({**GLM, "n_group": 3}, ("16 experts", "3 groups", "--routing")),
        ({**GLM, "n_group": 4, "topk_group": 8}, ("best 8 of 4 groups",)),
        ({**GLM, "moe_intermediate_size": [256, 512]}, ("[256, 512]", "several sizes")),
        ({"model_type": "llama"}, ("llama", "not understood", "num_experts")),
    ],
)
def test_what_is_not_understood(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        group_of(**config)
    for word in words:
        assert word in str(caught.value)

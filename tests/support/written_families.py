"""Families of models as their publishers describe them in configs, with the modules of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPERTS, TOP_K, LAYERS = 4, 2, 4

PLAIN = "plain bf16 a16"
"""The format of experts that a config excludes."""


@dataclass(frozen=True)
class WrittenFamily:
    """An architecture: its config without quantization, and the names of a layer's modules.

    Attributes:
        root: prefix of a layer's names, with ``{n}`` for its number.
        matrices: the experts' matrices after `root`, gate first and down last, with ``{e}`` for the expert.
        others: modules of a MoE layer that are not routed experts; the last is a block of its own.
        moe: the layers with experts.
        nested: path of the text model's config.
    """

    config: Mapping[str, Any]
    root: str
    matrices: tuple[str, ...]
    others: tuple[str, ...]
    moe: tuple[int, ...] = (0, 1, 2, 3)
    nested: tuple[str, ...] = ()

    def experts(self, layer: int) -> list[str]:
        """The full names of all matrices of one layer's experts."""
        names = [
            self.root.format(n=layer) + matrix.format(e=e) for e in range(EXPERTS) for matrix in self.matrices
        ]
        return list(dict.fromkeys(names))

    def around(self) -> list[str]:
        """Modules outside of the experts: the others of every MoE layer, MLPs of dense layers, the head."""
        others = [self.root.format(n=layer) + name for layer in self.moe for name in self.others]
        dense = [f"{self.root.format(n=n)}mlp.down_proj" for n in range(LAYERS) if n not in self.moe]
        return ["lm_head", *dense, *others]

    @property
    def stem(self) -> str:
        """The experts' module after `root`."""
        return self.matrices[0].partition(".{e}.")[0] if "{e}" in self.matrices[0] else self._common()

    def _common(self) -> str:
        return self.matrices[0].rpartition(".")[0]


_SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 512, "torch_dtype": "bfloat16", "hidden_act": "silu"}
_COUNTS = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 256}
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": 256}
_DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
}


def _numbered(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{{e}}.{name}" for name in names)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")
_SHARED = ("self_attn.q_proj", "mlp.gate", "mlp.shared_experts.up_proj", "mlp.shared_experts")

FAMILIES: Mapping[str, WrittenFamily] = {
    "deepseek-v3": WrittenFamily(
        {**_SIZES, **_DEEPSEEK, "model_type": "deepseek_v3", "first_k_dense_replace": 1},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        _SHARED,
        (1, 2, 3),
    ),
    "kimi-k2.5": WrittenFamily(
        {**_SIZES, **_DEEPSEEK, "model_type": "kimi_k2", "first_k_dense_replace": 1},
        "language_model.model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        _SHARED,
        (1, 2, 3),
        ("text_config",),
    ),
    "glm-4.7": WrittenFamily(
        {**_SIZES, **_DEEPSEEK, "model_type": "glm4_moe", "first_k_dense_replace": 2},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        _SHARED,
        (2, 3),
    ),
    "deepseek-v4": WrittenFamily(
        {
            **_SIZES,
            **_DEEPSEEK,
            "model_type": "deepseek_v4",
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": 10,
        },
        "layers.{n}.",
        _numbered("ffn.experts", *_MIXTRAL),
        ("attn.wq_a", "ffn.gate", "ffn.shared_experts.w1", "attn"),
    ),
    "kimi-k3": WrittenFamily(
        {
            **_SIZES,
            "model_type": "kimi_linear",
            "num_experts": EXPERTS,
            "num_experts_per_token": TOP_K,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.0,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
        },
        "language_model.model.layers.{n}.",
        _numbered("block_sparse_moe.experts", *_MIXTRAL),
        ("self_attn.q_proj", "block_sparse_moe.gate", "block_sparse_moe.shared_experts.up_proj", "mlp"),
        (1, 2, 3),
        ("text_config",),
    ),
    "qwen3": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "self_attn"),
    ),
    "qwen3.5": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 256},
        "model.language_model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("linear_attn.out_proj", "mlp.gate", "mlp.shared_expert.up_proj", "mlp.shared_expert"),
        nested=("text_config",),
    ),
    "qwen3-omni": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "qwen3_omni_moe_text", "norm_topk_prob": True},
        "thinker.model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "self_attn"),
        nested=("thinker_config", "text_config"),
    ),
    "mixtral": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "mixtral"},
        "model.layers.{n}.",
        _numbered("block_sparse_moe.experts", *_MIXTRAL),
        ("self_attn.q_proj", "block_sparse_moe.gate", "self_attn"),
    ),
    "minimax-m2": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True},
        "model.layers.{n}.",
        _numbered("block_sparse_moe.experts", *_MIXTRAL),
        ("self_attn.q_proj", "block_sparse_moe.gate", "self_attn"),
    ),
    "llama4": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "llama4_text", "interleave_moe_layer_step": 1},
        "language_model.model.layers.{n}.",
        _numbered("feed_forward.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "feed_forward.router", "feed_forward.shared_expert.up_proj", "mlp"),
        nested=("text_config",),
    ),
    "gemma4": WrittenFamily(
        {
            **_SIZES,
            "model_type": "gemma4_text",
            "num_experts": EXPERTS,
            "top_k_experts": TOP_K,
            "moe_intermediate_size": 256,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "model.language_model.layers.{n}.",
        _numbered("experts", *_PROJECTIONS),
        ("self_attn.q_proj", "router.proj", "mlp.up_proj", "mlp"),
        nested=("text_config",),
    ),
    "step-3.5": WrittenFamily(
        {
            **_SIZES,
            "model_type": "step3p5",
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
            "moe_intermediate_size": 256,
            "moe_layers_enum": "1,2,3",
            "share_expert_dim": 256,
        },
        "model.layers.{n}.",
        ("moe.gate_proj", "moe.up_proj", "moe.down_proj"),
        ("self_attn.q_proj", "share_expert.up_proj", "mlp"),
        (1, 2, 3),
    ),
    "jamba": WrittenFamily(
        {
            **_SIZES,
            "model_type": "jamba",
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "intermediate_size": 256,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        "model.layers.{n}.",
        _numbered("feed_forward.experts", *_PROJECTIONS),
        ("mamba.in_proj", "feed_forward.router", "mamba"),
        (1, 3),
    ),
    "nemotron-h": WrittenFamily(
        {
            **_SIZES,
            **_DEEPSEEK,
            "model_type": "nemotron_h",
            "mlp_hidden_act": "relu2",
            "hybrid_override_pattern": "MEME",
        },
        "backbone.layers.{n}.",
        _numbered("mixer.experts", "up_proj", "down_proj"),
        ("mixer.gate", "mixer.shared_experts.up_proj", "mixer.shared_experts"),
        (1, 3),
    ),
    "granite": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "granitemoe"},
        "model.layers.{n}.",
        ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
        ("self_attn.q_proj", "block_sparse_moe.router.layer", "self_attn"),
    ),
    "ernie": WrittenFamily(
        {
            **_SIZES,
            "model_type": "ernie4_5_moe",
            "moe_num_experts": EXPERTS,
            "moe_k": TOP_K,
            "moe_intermediate_size": 256,
            "moe_layer_start_index": 1,
        },
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "mlp.shared_experts.up_proj", "mlp.shared_experts"),
        (1, 2, 3),
    ),
    "unknown": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "motif", "scoring_func": "softmax", "norm_topk_prob": True},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "self_attn"),
    ),
}

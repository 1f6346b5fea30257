"""How the weights outside the experts are distributed over ranks."""

from __future__ import annotations

import pytest

from moectl.problem.other_weights import OtherWeights, sum_weights

PLACES = {
    "sharded": (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_b_proj.weight_scale_inv",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "transformer.blocks.1.norm_attn_norm.attn.Wqkv.weight",
        "backbone.layers.1.mixer.in_proj.weight",
    ),
    "kv": ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.bias"),
    "replicated": (
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.self_attn.indexer.wq_b.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.router.bias",
        "model.layers.0.mlp.shared_expert_gate.weight",
    ),
    "first": (
        "model.embed_tokens.weight",
        "model.visual.blocks.7.attn.qkv.weight",
        "vision_model.model.layers.0.self_attn.k_proj.weight",
        "mm_projector.in_proj.weight",
    ),
    "last": ("lm_head.weight", "language_model.lm_head.weight"),
    "": ("model.layers.2.eh_proj.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.0.attn.wq_a.weight"),
}
"""Names of tensors of a model with two layers, by where they are."""


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, names in PLACES.items() for name in names]
)
def test_a_name_tells_the_place(place: str, name: str) -> None:
    found = sum_weights([(name, 8)], 2, 4, "headers")
    assert {it: getattr(found, it) for it in ("sharded", "kv", "replicated", "first", "last")} == {
        it: 8 * (it == place) for it in ("sharded", "kv", "replicated", "first", "last")
    }


def test_ranks_beyond_the_kv_heads_have_copies() -> None:
    weights = OtherWeights("config", 2, 4, kv=80)
    assert [weights.on_rank(tp, 2, False) for tp in (1, 2, 4, 8, 16)] == [80, 40, 20, 20, 20]


def test_a_stage_has_its_layers_and_one_end() -> None:
    weights = OtherWeights("config", 10, 4, sharded=1000, replicated=100, first=64, last=32)
    assert weights.on_rank(2, 10, False) == 500 + 100 + 48
    assert weights.on_rank(2, 4, True) == 200 + 40 + 32

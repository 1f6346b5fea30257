"""Routers, shared experts and other models' layers beside the experts, as published checkpoints have them."""

from __future__ import annotations

from typing import Any

import pytest

from moectl.checkpoint import layer_groups
from support.small_headers import (
    AWQ,
    BLOCK,
    CONFIG,
    FP4,
    FP8,
    LAYERS,
    MODELOPT,
    PLAIN,
    ROUTER,
    E,
    H,
    N,
    Rows,
    listing,
    matrices,
    read,
    refused,
)


def test_prediction_layers_are_left_out_with_a_note() -> None:
    tensors = listing({**ROUTER, **BLOCK})
    tensors |= listing({**ROUTER, **PLAIN}, (LAYERS,))
    tensors |= listing({**ROUTER, **PLAIN}, (0,), root="mtp.layers.")
    tensors |= listing({**ROUTER, **PLAIN}, (0,), root="mtp.")
    (group,) = layer_groups({**CONFIG, "quantization_config": FP8}, tensors)
    assert group.layers == (0, 1, 2)
    (note,) = group.notes
    for block in (f"model.layers.{LAYERS}.mlp", "mtp.layers.0.mlp", "mtp.0.mlp"):
        assert block in note


def test_hash_routed_layers_and_the_bias_that_others_have() -> None:
    expert = matrices({"weight": ("BF16", (N, H), (H, N))}, "ffn")
    router = {"ffn.gate.weight": ("BF16", (E, H))}
    table = {"ffn.gate.tid2eid": ("I64", (1000, 2))}
    bias = {"ffn.gate.bias": ("F32", (E,))}
    tensors = listing({**expert, **router, **table}, (0,), "layers.")
    tensors |= listing({**expert, **router, **bias}, (1, 2), "layers.")
    config = {**CONFIG, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "num_hash_layers": 1}
    first, rest = layer_groups(config, tensors)
    assert (first.problem.routing.hashed, first.problem.routing.correction_bias) == (True, False)
    assert (rest.problem.routing.hashed, rest.problem.routing.correction_bias) == (False, True)
    assert rest.names.router["correction_bias"] == "layers.{layer}.ffn.gate.bias"
    assert first.notes == rest.notes == ()


def test_a_bias_of_the_router_itself() -> None:
    group = read({**PLAIN, "mlp.gate.bias": ("BF16", (E,))})
    assert group.problem.routing.router_bias
    assert not group.problem.routing.correction_bias


def test_correction_bias_with_an_axis_of_one() -> None:
    group = read({**PLAIN, "mlp.moe_statics.e_score_correction_bias": ("F32", (1, E))})
    assert group.problem.routing.correction_bias
    refused({**PLAIN, "mlp.gate.e_score_correction_bias": ("F32", (2, E))}, "e_score_correction_bias")


def test_a_correction_bias_in_the_module_of_the_experts() -> None:
    name = "mlp.experts.e_score_correction_bias"
    group = read({**PLAIN, name: ("F32", (E,))})
    assert group.names.router["correction_bias"] == f"model.layers.{{layer}}.{name}"
    assert group.problem.routing.correction_bias
    refused({**PLAIN, name: ("F32", (E + 1,))}, name)


def test_a_router_outside_of_the_module_that_holds_the_experts() -> None:
    expert = matrices({"weight": ("BF16", (N, H), (H, N))}, "moe")
    router = {"router.proj.weight": ("F32", (E, H)), "router.per_expert_scale": ("BF16", (E,))}
    (group,) = layer_groups(CONFIG, listing({**expert, **router}))
    assert group.names.router["weight"] == "model.layers.{layer}.router.proj.weight"
    assert group.problem.router_dtype == "fp32"
    assert group.problem.routing.expert_scale
    # One inside goes first, and the other is something else.
    inside = {"moe.gate.weight": ("BF16", (E, H))}
    (group,) = layer_groups(CONFIG, listing({**expert, **router, **inside}))
    assert group.names.router == {"weight": "model.layers.{layer}.moe.gate.weight"}


def test_without_a_router_the_config_is_believed() -> None:
    (group,) = layer_groups({**CONFIG, "topk_method": "noaux_tc"}, listing(PLAIN))
    assert group.problem.routing.correction_bias
    assert any("no router" in note for note in group.notes)


def test_a_router_of_another_width_than_the_experts() -> None:
    refused({**PLAIN, "mlp.gate.weight": ("BF16", (E, H + 1))}, f"{H + 1} features", f"experts {H}")


def test_a_router_that_is_odd_beside_experts_that_are_not() -> None:
    refused(
        {**PLAIN, "mlp.gate.weight": ("BF16", (H, E))}, "mlp.gate.weight", f"[{E}, hidden]", f"[{H}, {E}]"
    )


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_experts_whose_scales_are_missing(dtype: str) -> None:
    rows = matrices({"weight": (dtype, (N, H), (H, N))})
    refused(rows, "layer 0", "lack", "down_proj.weight_scale")
    if dtype == "F8_E4M3":
        refused(rows, "lack", "down_proj.weight_scale_inv", quantization=FP8)


def test_rows_of_matrices_that_are_stored_apart_are_not_interleaved() -> None:
    names = {"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}
    bias = matrices({"bias": ("BF16", (N,), (H,))})
    router = {"mlp.gate.bias": ("BF16", (E,))}
    apart = read({**PLAIN, **bias, **router}, **names)
    assert apart.problem.rows == "concatenated"
    together = {
        "mlp.experts.gate_up_proj": ("BF16", (E, H, 2 * N)),
        "mlp.experts.gate_up_proj_bias": ("BF16", (E, 2 * N)),
        "mlp.experts.down_proj": ("BF16", (E, N, H)),
        "mlp.experts.down_proj_bias": ("BF16", (E, H)),
    }
    assert read({**together, **router}, **names).problem.rows == "interleaved"


def test_latent_experts() -> None:
    latent = {
        "mlp.routed_expert_down_proj.weight": ("BF16", (H, 2 * H)),
        "mlp.routed_expert_up_proj.weight": ("BF16", (2 * H, H)),
        "mlp.gate.weight": ("BF16", (E, 2 * H)),
    }
    group = read({**PLAIN, **latent}, hidden_size=2 * H)
    assert (group.problem.dims.hidden, group.problem.model_hidden) == (H, 2 * H)
    assert group.sources["hidden"].startswith("header:")
    assert set(group.names.latent) == {"in", "out"}
    refused({**PLAIN, **latent, "mlp.routed_expert_up_proj.weight": ("BF16", (H, H))}, "routed_expert_up")


@pytest.mark.parametrize(
    ("width", "config", "count"),
    [
        (2 * N, {"n_shared_experts": 2}, 2),
        (512, {"shared_expert_intermediate_size": 512}, 1),
        (512, {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 512}, 1),
        (2 * N, {"n_shared_experts": 1}, 2),
        (N, {}, 1),
    ],
)
def test_shared_experts_by_their_width(width: int, config: dict[str, Any], count: int) -> None:
    shared = {
        f"mlp.shared_experts.{name}_proj.weight": ("BF16", (H, width) if name == "down" else (width, H))
        for name in ("gate", "up", "down")
    }
    group = read({**BLOCK, **shared}, FP8, **config)
    assert group.problem.shared_experts == count
    assert group.details == {"arrangement": "per_expert", "shared_dtype": "BF16"}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_width_of_shared_experts_that_are_stored_transposed(method: str) -> None:
    def columns(rows: int, cols: int) -> Rows:
        packed = (rows // 8, cols) if method == "gptq" else (rows, cols // 8)
        zeros, scales = (rows // 128, cols // 8), (rows // 128, cols)
        return {"qweight": ("I32", packed), "qzeros": ("I32", zeros), "scales": ("F16", scales)}

    rows = {
        f"mlp.{module}.{name}_proj.{suffix}": row
        for module in ("experts.{e}", "shared_expert")
        for name in ("gate", "up", "down")
        for suffix, row in columns(*((N, H) if name == "down" else (H, N))).items()
    }
    quantization = {"quant_method": method, "bits": 4, "group_size": 128}
    assert read(rows, quantization).problem.shared_experts == 1


@pytest.mark.parametrize("lacking", ["gate", "down"])
def test_shared_experts_that_are_not_all_there(lacking: str) -> None:
    names = [name for name in ("gate", "up", "down") if name != lacking]
    shape = {"down": (H, N)}
    rows = {f"mlp.shared_experts.{name}_proj.weight": ("BF16", shape.get(name, (N, H))) for name in names}
    if lacking == "gate":
        del rows["mlp.shared_experts.up_proj.weight"]
    refused({**PLAIN, **rows}, f"no {lacking} matrix")


# What a format's tensors must be.


@pytest.mark.parametrize(
    ("rows", "leaf", "row"),
    [
        (BLOCK, "up_proj.weight_scale_inv", ("F32", (2, 2))),
        (BLOCK, "down_proj.weight", ("F8_E4M3", (H, N + 1))),
        (BLOCK, "gate_proj.weight", ("F8_E5M2", (N, H))),
        (matrices(MODELOPT), "gate_proj.weight_scale", ("F8_E4M3", (N, 3))),
        (matrices(MODELOPT), "down_proj.weight_scale_2", ("F32", (2,))),
        (matrices(MODELOPT), "up_proj.weight", ("I16", (N, H // 2))),
        (FP4, "down_proj.scale", ("F8_E8M0", (H, 3))),
        (AWQ, "gate_proj.qzeros", ("I32", (3, N // 8))),
        (AWQ, "up_proj.scales", ("I32", (H // 128, N))),
    ],
)
def test_odd_tensors_are_named(rows: Rows, leaf: str, row: tuple[str, tuple[int, ...]]) -> None:
    name = f"mlp.experts.{{e}}.{leaf}"
    assert name in rows
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128} if rows is AWQ else None
    refused({**rows, name: row}, leaf, quantization=quantization)


def test_an_ascend_export_says_which_tensor_is_not_understood() -> None:
    rows = matrices(
        {
            "weight": ("I8", (N, H), (H, N)),
            "weight_scale": ("F32", (N, 1), (H, 1)),
            "weight_offset": ("F32", (N, 1), (H, 1)),
        }
    )
    refused(rows, "weight_offset", "not understood")

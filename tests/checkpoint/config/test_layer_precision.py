"""Which format each layer's experts have, where configs list modules or give rules for them."""

from __future__ import annotations

from typing import Any

import pytest

from moectl.checkpoint import layer_groups
from moectl.errors import CheckpointError
from moectl.problem.layer_ranges import ranges
from support.small_headers import (
    CONFIG,
    FP8,
    LAYERS,
    MODELOPT,
    NVFP4,
    PLAIN,
    ROUTER,
    E,
    H,
    N,
    listing,
    matrices,
    read,
)

# Lists of modules in every language, read from the config alone.


def precision_by_layer(quantization: dict[str, Any]) -> dict[str, str]:
    groups = layer_groups({**CONFIG, "quantization_config": quantization}, None)
    return {ranges(group.layers): group.problem.scheme.weight.name for group in groups}


EXCLUSIONS = [
    ("modules_to_not_convert", ["gate", "e_score_correction_bias", "lm_head"], {"0-2": "fp8"}),
    ("modules_to_not_convert", [f"model.layers.{n}.mlp.gate" for n in range(3)], {"0-2": "fp8"}),
    ("modules_to_not_convert", ["layers.0.", "shared_expert"], {"0": "bf16", "1-2": "fp8"}),
    ("modules_to_not_convert", ["model.layers.1"], {"0, 2": "fp8", "1": "bf16"}),
    ("ignored_layers", ["model.layers.1.mlp.experts"], {"0, 2": "fp8", "1": "bf16"}),
    (
        "ignored_layers",
        [f"model.layers.2.mlp.experts.{e}.{name}_proj" for e in range(E) for name in ("gate", "up", "down")],
        {"0-1": "fp8", "2": "bf16"},
    ),
    ("ignore", ["re:.*self_attn.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"], {"0-2": "fp8"}),
    ("ignore", [r"re:.*layers\.2\.mlp.*"], {"0-1": "fp8", "2": "bf16"}),
    ("ignore", ["*.mlp.shared_expert.*", "mtp*", "*.attn.*"], {"0-2": "fp8"}),
    ("ignore", ["model.language_model.layers.0.mlp*"], {"0": "bf16", "1-2": "fp8"}),
    ("ignore", ["model.layers.1*"], {"0, 2": "fp8", "1": "bf16"}),
]


@pytest.mark.parametrize(("key", "patterns", "expected"), EXCLUSIONS)
def test_exclusions(key: str, patterns: list[str], expected: dict[str, str]) -> None:
    assert precision_by_layer({**FP8, key: patterns}) == expected


def test_lists_of_other_writers() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert precision_by_layer({**gptq, "dynamic": {r"-:.*layers\.0\..*": {}}}) == {"0": "bf16", "1-2": "int4"}
    listed = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts.0.gate_proj"]]}
    assert precision_by_layer({**gptq, **listed}) == {"0-2": "int4"}
    unlisted = {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}
    assert precision_by_layer({**gptq, **unlisted}) == {"0-2": "bf16"}
    mixed = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
            **{f"model.layers.1.mlp.experts.0.w{n}": {"quant_algo": "MXFP8"} for n in (1, 2, 3)},
            "model.layers.1.mlp.shared_experts.w1": {"quant_algo": "FP8"},
        },
    }
    assert precision_by_layer({"quant_method": "modelopt", **mixed}) == {
        "0": "nvfp4",
        "1": "mxfp8",
        "2": "bf16",
    }


def test_exceptions_of_auto_round() -> None:
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {
            **{
                f"model.layers.0.mlp.experts.{e}.{name}_proj": {"bits": 16}
                for e in range(E)
                for name in ("gate", "up", "down")
            },
            r".*layers\.1\.mlp\.experts.*": {"bits": 8},
            ".*self_attn.*": {"bits": 16},
            "model.layers.2.mlp.shared_experts": {"bits": 16},
        },
    }
    groups = layer_groups({**CONFIG, "quantization_config": config}, None)
    found = {ranges(group.layers): str(group.problem.scheme.weight) for group in groups}
    assert found == {"0": "bf16", "1": "int8 group 128", "2": "int4 group 128"}
    assert [group.problem.storage for group in groups] == ["plain", "gptq", "gptq"]
    assert groups[1].sources["scheme"] == "config:quantization_config.extra_config"


def test_quark_rules_by_layer() -> None:
    fp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
    block = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}
    steps = [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}]
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": fp4, "input_tensors": fp4},
        "layer_quant_config": {
            r"re:.*layers\.1\.ffn\.experts\.\d+\.w[123]": {"weight": block},
            "*layers.2.mlp.experts*": {"weight": steps},
            r"re:mtp\.0\.ffn\.experts\.\d+\.w1": {"weight": block},
        },
        "exclude": [r"re:.*\.gate$"],
    }
    groups = layer_groups({**CONFIG, "quantization_config": config}, None)
    found = {ranges(group.layers): str(group.problem.scheme.weight) for group in groups}
    assert found == {"0": "mxfp4 group 32", "1": "fp8 block 128x128", "2": "int4 per channel"}


def test_groups_of_compressed_tensors_by_module() -> None:
    int4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    int8 = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {**int4, "targets": ["Linear"], "input_activations": None},
            "group_1": {
                **int8,
                "targets": [r"re:.*layers\.0\.mlp\.experts.*"],
                "input_activations": None,
            },
        },
    }
    assert precision_by_layer(config) == {"0": "int8", "1-2": "int4"}


def test_where_the_description_stands() -> None:
    rows = {**ROUTER, **matrices(MODELOPT)}
    inner = {**CONFIG, "quantization_config": NVFP4}
    (nested,) = layer_groups({"text_config": inner}, listing(rows))
    assert nested.sources["scheme"] == "config:text_config.quantization_config.quant_algo"
    apart = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (beside,) = layer_groups(
        CONFIG, listing(rows), quantization=apart, quantization_file="hf_quant_config.json"
    )
    assert beside.problem == nested.problem
    assert beside.sources["scheme"] == "config:hf_quant_config.json.quant_algo"


def test_quark_int4_for_fp8_activations() -> None:
    rows = matrices(
        {
            "weight": ("I32", (N, H // 8), (H, N // 8)),
            "weight_scale": ("F32", (), ()),
            "weight_scale_2": ("F32", (N,), (H,)),
            "input_scale": ("F32", (), ()),
        }
    )
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    weight = [spec, {"dtype": "int4", "qscheme": "per_channel"}]
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": {**spec, "is_dynamic": False}},
    }
    group = read(rows, config)
    assert str(group.problem.scheme) == "int4 per channel, fp8 static activations"
    assert group.notes == ()
    assert read(rows).problem.scheme == group.problem.scheme


def test_sizes_that_are_listed_for_each_layer() -> None:
    group = read(PLAIN, num_experts_per_tok=[2] * LAYERS, moe_intermediate_size=[N] * LAYERS)
    assert (group.problem.top_k, group.problem.dims.intermediate) == (2, N)
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        read(PLAIN, num_experts_per_tok=[2, 1, 2])

"""Quantization configs: every recorded scheme, overrides, and refusals that name the key."""

import json
from typing import Any

import pytest

from moectl.checkpoint.config.layer_precision import read_precision
from moectl.checkpoint.config.quantization import KNOWN_METHODS, parse_quantization
from moectl.errors import CheckpointError
from moectl.oracle.engines.vllm_0_33_0.data import GRID
from moectl.problem.schemes import BF16, FULL, MXFP4, ActFormat, Scheme, WeightFormat, int_format

SCHEMES = json.loads(GRID.read_text())["SCHEMES"]
FP8_STATIC = ActFormat("fp8", 8, (FULL, FULL), dynamic=False)
MXFP4_ACT = ActFormat("mxfp4", 4, (1, 32))
MXFP8 = Scheme(WeightFormat("mxfp8", 8, (1, 32)), ActFormat("mxfp8", 8, (1, 32)))
FP8_BLOCK = Scheme(WeightFormat("fp8", 8, (128, 128)), ActFormat("fp8", 8, (1, 128)))
FP8_TENSOR = WeightFormat("fp8", 8, (FULL, FULL))
NVFP4 = WeightFormat("nvfp4", 4, (1, 16))
NVFP4_ACT = ActFormat("nvfp4", 4, (1, 16))

EXPECTED: dict[str, tuple[str, Scheme, str]] = {
    "bf16": ("plain", Scheme(BF16), ""),
    "fp8_block128_dynamic": ("fp8", FP8_BLOCK, ""),
    "fp8_block128_dynamic_ct": ("compressed-tensors", FP8_BLOCK, ""),
    "fp8_tensor_static": ("fp8", Scheme(FP8_TENSOR, FP8_STATIC), ""),
    "fp8_tensor_static_modelopt": ("modelopt", Scheme(FP8_TENSOR, FP8_STATIC), ""),
    "fp8_tensor_static_ct": ("compressed-tensors", Scheme(FP8_TENSOR, FP8_STATIC), ""),
    "fp8_tensor_dynamic": ("fp8", Scheme(FP8_TENSOR, ActFormat("fp8", 8, (FULL, FULL))), ""),
    "fp8_channel_token_ct": (
        "compressed-tensors",
        Scheme(WeightFormat("fp8", 8, (1, FULL)), ActFormat("fp8", 8, (1, FULL))),
        "",
    ),
    "nvfp4_w4a4_modelopt": ("modelopt", Scheme(NVFP4, NVFP4_ACT), ""),
    "nvfp4_w4a4_ct": ("compressed-tensors", Scheme(NVFP4, NVFP4_ACT), ""),
    "nvfp4_w4a16_ct": ("compressed-tensors", Scheme(NVFP4), ""),
    "mxfp4_gptoss": ("gpt_oss", Scheme(MXFP4), ""),
    "mxfp4_native": ("mxfp4", Scheme(MXFP4), ""),
    "mxfp4_ct": ("compressed-tensors", Scheme(MXFP4, MXFP4_ACT), ""),
    "mxfp4_quark_w4a16": ("quark", Scheme(MXFP4), ""),
    "mxfp4_quark_w4a4": ("quark", Scheme(MXFP4, MXFP4_ACT), ""),
    "mxfp4_quark_w4a8_static": ("quark", Scheme(MXFP4, FP8_STATIC), ""),
    "mxfp8": ("modelopt", MXFP8, ""),
    "mxfp8_ct": ("compressed-tensors", MXFP8, ""),
    "int4_g32_sym_ct": ("compressed-tensors", Scheme(int_format(4, 32)), ""),
    "int4_g32_sym_ct_actorder_group": ("compressed-tensors", Scheme(int_format(4, 32)), "group"),
    "int4_g128_sym_ct": ("compressed-tensors", Scheme(int_format(4, 128)), ""),
    "int4_g128_gptq": ("gptq", Scheme(int_format(4, 128)), ""),
    "int4_g128_gptq_descact": ("gptq", Scheme(int_format(4, 128)), "group"),
    "int4_g128_awq_zp": ("awq", Scheme(int_format(4, 128, zero_point=True)), ""),
    "int8_w8a16_g128_ct": ("compressed-tensors", Scheme(int_format(8, 128)), ""),
    "int8_w8a16_channel_ct": ("compressed-tensors", Scheme(int_format(8, FULL)), ""),
    "int8_w8a16_gptq": ("gptq", Scheme(int_format(8, 128)), ""),
    "int8_w8a8_ct": (
        "compressed-tensors",
        Scheme(int_format(8, FULL), ActFormat("int8", 8, (1, FULL))),
        "",
    ),
    "w4a8_fp8_g128_ct": (
        "compressed-tensors",
        Scheme(int_format(4, 128), ActFormat("fp8", 8, (1, FULL))),
        "",
    ),
}


def test_every_recorded_scheme_has_an_expectation() -> None:
    assert set(EXPECTED) == {name for name, (config, _) in SCHEMES.items() if not isinstance(config, str)}


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_schemes(name: str) -> None:
    model_type = "gpt_oss" if name == "mxfp4_gptoss" else "qwen3_moe"
    found = parse_quantization(SCHEMES[name][0], model_type=model_type)
    assert (found.storage, found.scheme, found.act_order) == EXPECTED[name]
    if found.method:
        assert found.sources["scheme"].startswith("config:quantization_config.")


@pytest.mark.parametrize("stated", ["ue8m0", "UE8M0"])
def test_scale_fmt_says_that_scales_of_tokens_are_powers_of_two(stated: str) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    plain, found = parse_quantization(config), parse_quantization({**config, "scale_fmt": stated})
    assert found.scheme.act.rounds_scales and not plain.scheme.act.rounds_scales
    assert found.scheme == plain.scheme
    assert found.sources["token_scales"] == "config:quantization_config.scale_fmt"
    assert "token_scales" not in plain.sources
    fp4 = parse_quantization({**config, "scale_fmt": stated}, expert_dtype="fp4")
    assert fp4.scheme.act.name == "a16" and "token_scales" not in fp4.sources


def gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, **changes}


def test_gptq_details() -> None:
    assert parse_quantization(gptq(group_size=-1, desc_act=True)).act_order == ""
    assert parse_quantization(gptq(sym=False)).scheme.weight.zero_point
    ruled = parse_quantization(
        gptq(dynamic={"-:.*gate.*": {}, "+:.*experts.*": {"bits": 8, "group_size": 64}})
    )
    assert ruled.scheme.weight == int_format(8, 64)


def test_the_group_that_names_experts_is_taken() -> None:
    config = json.loads(json.dumps(SCHEMES["int8_w8a16_g128_ct"][0]))
    config["config_groups"]["group_1"] = json.loads(
        json.dumps(SCHEMES["int4_g32_sym_ct"][0]["config_groups"]["group_0"])
    )
    config["config_groups"]["group_1"]["targets"] = ["re:.*mlp.experts.*"]
    assert parse_quantization(config).scheme.weight == int_format(4, 32)
    config["config_groups"]["group_1"]["targets"] = ["re:.*shared_experts.*"]
    assert parse_quantization(config).scheme.weight == int_format(8, 128)


def test_mixed_precision_of_modelopt_takes_what_the_experts_have() -> None:
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "layers.0.attn.q_proj": {"quant_algo": "FP8"},
            "layers.0.mlp.experts": {"quant_algo": "NVFP4"},
        },
    }
    assert parse_quantization(config).scheme == Scheme(NVFP4, NVFP4_ACT)
    config["quantized_layers"] |= {
        "layers.1.mlp.experts": {"quant_algo": "FP8"},
        "layers.2.mlp.experts": {"quant_algo": "NVFP4"},
    }
    main = parse_quantization(config)
    assert main.scheme == Scheme(NVFP4, NVFP4_ACT)
    layers = read_precision(main, config)
    found = [layers.of_layer(layer, [f"layers.{layer}.mlp.experts.0.up_proj"]) for layer in range(4)]
    assert [it.scheme.weight.name for it in found] == ["nvfp4", "fp8", "nvfp4", "bf16"]
    config["quantized_layers"]["layers.2.mlp.experts.0.w2"] = {"quant_algo": "FP8"}
    with pytest.raises(CheckpointError, match="one quant_algo for all routed experts of layer 2"):
        read_precision(main, config)


def test_scale_dtypes_do_not_make_formats_differ() -> None:
    assert int_format(4, 32, "F16") == int_format(4, 32, "BF16")


def changed(name: str, path: str, value: object) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(SCHEMES[name][0]))
    *inner, last = path.split(".")
    at = config
    for key in inner:
        at = at[key]
    at[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"quant_method": "exl3"}, "'exl3'"),
        ({"bits": 4}, "None"),
        ({"quant_method": ["gptq"]}, "gptq"),
        (gptq(bits=3), "bits must be 4 or 8"),
        (gptq(bits="four"), "bits must be an integer"),
        (gptq(group_size=0), "group_size must be -1 or a positive"),
        (changed("int4_g32_sym_ct", "config_groups", {}), "config_groups"),
        (changed("int4_g32_sym_ct", "config_groups.group_0.weights.num_bits", 3), "weights.type"),
        (changed("int4_g32_sym_ct", "config_groups.group_0.weights.group_size", None), "group_size"),
        (changed("int4_g32_sym_ct", "config_groups.group_0.weights.actorder", "random"), "actorder"),
        (changed("mxfp4_ct", "config_groups.group_0.weights.group_size", 64), "group_size must be 32"),
        (changed("fp8_block128_dynamic", "weight_block_size", [128]), "weight_block_size"),
        (changed("fp8_tensor_static", "activation_scheme", "frozen"), "activation_scheme"),
        (changed("mxfp4_quark_w4a16", "global_quant_config.weight", None), "global_quant_config.weight"),
        (changed("mxfp4_quark_w4a16", "global_quant_config.weight.group_size", 64), "weight.dtype"),
        (changed("nvfp4_w4a4_modelopt", "quant_algo", "INT3"), "quant_algo"),
        (gptq(modules_to_not_convert=3), "modules_to_not_convert"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config: dict[str, Any], names: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_quantization(config)
    assert names in caught.value.what


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_quantization({"quant_method": "exl3"})
    assert all(method in caught.value.what for method in KNOWN_METHODS)


@pytest.mark.parametrize("config", [None, {}])
def test_no_config_is_plain(config: dict[str, Any] | None) -> None:
    assert parse_quantization(config).scheme == Scheme(BF16)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match="must be an object, got a list"):
        parse_quantization([])  # type: ignore[arg-type]

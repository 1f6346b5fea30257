"""Configs as publishers write them, each against what its writer put in; other parsers judge the writer."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest

from moectl.checkpoint import LayerGroup, layer_groups
from moectl.checkpoint.config.declared_layers import CONFIG_ONLY
from moectl.checkpoint.source.shards import separate_quantization
from moectl.errors import CheckpointError
from support.sampling import every_nth
from support.written_configs import WrittenConfig, written_configs
from support.written_families import EXPERTS, FAMILIES, PLAIN, TOP_K, WrittenFamily
from support.written_methods import METHODS


@cache
def configs() -> tuple[WrittenConfig, ...]:
    return tuple(written_configs())


def answers(written: WrittenConfig) -> dict[int, str]:
    quantization, file = separate_quantization(written.documents)
    groups = layer_groups(written.config, None, quantization=quantization, quantization_file=file)
    for group in groups:
        assert (group.problem.experts, group.problem.top_k) == (EXPERTS, TOP_K)
        assert CONFIG_ONLY in group.notes
    return {
        layer: f"{group.problem.storage} {group.problem.scheme.weight.name} {group.problem.scheme.act.name}"
        for group in groups
        for layer in group.layers
    }


def test_there_are_many_and_none_twice() -> None:
    names = Counter(written.name for written in configs())
    assert len(configs()) >= 500
    assert max(names.values()) == 1


@pytest.mark.parametrize(("family", "method"), every_nth(product(FAMILIES, METHODS), 6))
def test_the_answer_is_what_was_written(family: str, method: str) -> None:
    asked = [it for it in configs() if it.family is FAMILIES[family] and it.method == method]
    assert len(asked) > 3
    wrong = {}
    for written in asked:
        try:
            found: object = answers(written)
        except CheckpointError as error:
            found = str(error)
            if written.refusal and written.refusal in found:
                continue
        if written.refusal or found != written.answers:
            wrong[written.name] = (found, written.refusal or written.answers)
    assert not wrong


NEEDS_311 = "a development dependency where Python is 3.11 or newer"


def modules(family: WrittenFamily) -> Any:
    """A model of linear layers without data, with the names of all modules that a config may mention."""
    import torch

    model = torch.nn.Module()
    leaves = [*(name for layer in family.moe for name in family.experts(layer)), *family.around()]
    for name in (name for name in leaves if not any(other.startswith(f"{name}.") for other in leaves)):
        *parents, last = name.split(".")
        at = model
        for part in parents:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.add_module(last, torch.nn.Linear(256, 256, bias=False, device="meta"))
    return model


WEIGHTS = {
    "int4": (4, "int", "group"),
    "int8": (8, "int", "channel"),
    "fp8": (8, "float", "channel"),
    "nvfp4": (4, "float", "tensor_group"),
    "mxfp4": (4, "float", "group"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors_reads_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parser gives each matrix of every expert the format that the writer expects."""
    pytest.importorskip("compressed_tensors", reason=NEEDS_311)
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.lifecycle import apply

    # A module has its scheme by then; scales and zero points, which follow from it, take most of the time.
    monkeypatch.setattr(apply, "initialize_module_for_quantization", lambda *_, **__: None)
    model, judged = modules(FAMILIES[family]), 0
    for written in configs():
        if written.family is not FAMILIES[family] or "config_groups" not in written.quantization:
            continue
        for module in model.modules():
            vars(module).pop("quantization_scheme", None)
        read = QuantizationConfig.model_validate(copy.deepcopy(dict(written.quantization)))
        apply_quantization_config(model, read)
        for layer in written.family.moe:
            found = set()
            for name in written.family.experts(layer):
                scheme = getattr(model.get_submodule(name), "quantization_scheme", None)
                weights = scheme and scheme.weights
                words = [getattr(weights, key, None) for key in ("num_bits", "type", "strategy")]
                found.add(weights and tuple(getattr(word, "value", word) for word in words))
            if written.refusal:
                assert len(found) == (2 if layer == written.family.moe[-1] else 1), written.name
                continue
            assert found == {WEIGHTS.get(written.answers[layer].split()[1])}, written.name
        judged += 1
    assert judged >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_excludes_the_same(family: str) -> None:
    """The rule by which transformers leaves modules as they are, for methods with lists of plain names."""
    pytest.importorskip("transformers", reason=NEEDS_311)
    from transformers.quantizers.quantizers_utils import should_convert_module

    judged = 0
    for written in configs():
        if written.family is not FAMILIES[family] or written.method not in ("fp8 blocks", "mxfp4", "awq"):
            continue
        patterns = list(written.quantization.get("modules_to_not_convert", ()))
        for layer in written.family.moe:
            kept = {not should_convert_module(name, patterns) for name in written.family.experts(layer)}
            if written.refusal:
                assert len(kept) == (2 if layer == written.family.moe[-1] else 1), written.name
                continue
            assert kept == {written.answers[layer] == PLAIN}, written.name
        judged += 1
    assert judged >= 20


# What the product of choices does not hold.

GEMMA, STEP, QWEN = FAMILIES["gemma4"], FAMILIES["step-3.5"], FAMILIES["qwen3"]
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def read(family: WrittenFamily, quantization: dict[str, Any] | None, **keys: Any) -> tuple[LayerGroup, ...]:
    text = {**family.config, **keys}
    for name in reversed(family.nested):
        text = {name: text}
    return layer_groups({**text, "quantization_config": quantization}, None)


def formats(family: WrittenFamily, quantization: dict[str, Any]) -> dict[int, str]:
    return {
        layer: group.problem.scheme.weight.name
        for group in read(family, quantization)
        for layer in group.layers
    }


def groups(**targets: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    """A compressed-tensors config; each keyword has the targets and weights of a group."""
    named = {
        name: {"targets": where, "weights": weights, "input_activations": None}
        for name, (where, weights) in targets.items()
    }
    return {"quant_method": "compressed-tensors", "config_groups": named}


ATTENTION = ["re:.*self_attn.*", "model.layers.0.self_attn.q_proj", "LlamaAttention"]


@pytest.mark.parametrize("targets", [*([it] for it in ATTENTION), ATTENTION])
def test_a_group_of_attention_alone_leaves_experts_as_they_are(targets: list[str]) -> None:
    groups_found = read(QWEN, groups(group_0=(targets, INT4)))
    assert [group.problem.storage for group in groups_found] == ["plain"]
    assert groups_found[0].sources["scheme"] == "config:quantization_config.config_groups"
    both = groups(group_0=(targets, INT4), group_1=(["Linear"], NVFP4))
    assert set(formats(QWEN, both).values()) == {"nvfp4"}


def test_a_full_name_goes_before_an_expression_and_that_before_a_class() -> None:
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config = groups(
        group_0=(["Linear"], NVFP4),
        group_1=(["re:.*mlp.experts.*"], int8),
        group_2=(QWEN.experts(2), INT4),
    )
    assert formats(QWEN, config) == {0: "int8", 1: "int8", 2: "int4", 3: "int8"}


@pytest.mark.parametrize(
    ("family", "expected"), [(GEMMA, "int4"), (STEP, "int4"), (FAMILIES["llama4"], "int4"), (QWEN, "bf16")]
)
def test_another_block_of_the_layer_is_not_the_experts(family: WrittenFamily, expected: str) -> None:
    for pattern in ("mlp*", "mlp.*", "mlp"):
        skipped = [family.root.format(n=layer) + pattern for layer in family.moe]
        config = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": skipped}
        assert set(formats(family, config).values()) == {expected}


def test_rules_of_gptq_apply_in_their_order_and_stay_in_their_layer() -> None:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    rules = {
        r"+:.*layers\.1\..*experts.*": {"bits": 8, "group_size": 64, "desc_act": True},
        r"-:.*layers\.[13]\..*": {},
        r".*layers\.2\..*": {"sym": False},
    }
    found = {group.layers: group.problem for group in read(QWEN, {**base, "dynamic": rules})}
    said = {layers: (str(it.scheme.weight), it.act_order) for layers, it in found.items()}
    assert said == {
        (0,): ("int4 group 128", ""),
        (1,): ("int8 group 64", "group"),
        (2,): ("int4 group 128 with zero points", ""),
        (3,): ("bf16", ""),
    }


def test_gate_and_down_in_different_formats_are_refused_with_advice() -> None:
    down = groups(
        group_0=([r"re:.*experts\.\d+\.(gate|up)_proj"], NVFP4),
        group_1=([r"re:.*experts\.\d+\.down_proj"], INT4),
    )
    listed = {name: {"quant_algo": "FP8" if "down" in name else "NVFP4"} for name in QWEN.experts(1)}
    some = {name: {"quant_algo": "NVFP4"} for name in QWEN.experts(1) if "down" not in name}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    for config, words in (
        (down, "gate nvfp4 group 16, a16 activations, up nvfp4 group 16, a16 activations, down int4"),
        ({**mixed, "quantized_layers": listed}, "layer 1, got FP8, NVFP4"),
        ({**mixed, "quantized_layers": some}, "gate, up NVFP4, down unlisted"),
    ):
        with pytest.raises(CheckpointError) as caught:
            read(QWEN, config)
        assert words in caught.value.what
        assert "in one format" in caught.value.hint


def test_mixed_precision_by_a_list_of_modules() -> None:
    base = {"quant_method": "modelopt", "quant_algo": "mixed_precision"}
    attention = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    assert set(formats(QWEN, {**base, "quantized_layers": attention}).values()) == {"bf16"}
    for family in FAMILIES.values():
        one, *others = family.moe
        listed = {
            **{name: {"quant_algo": "FP8"} for name in family.experts(one)},
            **{
                name: {"quant_algo": "W4A16_NVFP4", "group_size": 16}
                for n in others
                for name in family.experts(n)
            },
        }
        expected = {one: "fp8", **dict.fromkeys(others, "nvfp4")}
        assert formats(family, {**base, "quantized_layers": {**attention, **listed}}) == expected
    wide = {"model.layers.*.mlp.experts*": {"quant_algo": "NVFP4"}}
    assert set(formats(QWEN, {**base, "quantized_layers": {**attention, **wide}}).values()) == {"nvfp4"}


def nvfp4(size: int) -> list[dict[str, Any]]:
    """NVFP4 with groups of `size` by every tool."""
    spec = {"num_bits": 4, "type": "float", "group_size": size}
    return [
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": size},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {n: {"quant_algo": "NVFP4", "group_size": size} for n in QWEN.experts(0)},
        },
        {"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp", "group_size": size},
        groups(group_0=(["Linear"], {**spec, "strategy": "tensor_group"})),
    ]


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("tool", range(4))
def test_another_group_size_with_nvfp4_is_a_question(tool: int, size: int) -> None:
    assert formats(QWEN, nvfp4(16)[tool])[0] == "nvfp4"
    with pytest.raises(CheckpointError) as caught:
        read(QWEN, nvfp4(size)[tool])
    assert "group_size must be" in caught.value.what and f"got {size}" in caught.value.what
    if size == 32:
        assert caught.value.hint == "Is the format NVFP4 or MXFP4? Correct config.json."


@pytest.mark.parametrize(("spelled", "dtype"), [("fp32", "fp32"), ("float32", "fp32"), ("bfloat16", "bf16")])
def test_the_config_may_state_the_dtype_of_the_router(spelled: str, dtype: str) -> None:
    (group,) = read(QWEN, None, moe_router_dtype=spelled)
    assert (group.problem.router_dtype, group.sources["router_dtype"]) == (dtype, "config:moe_router_dtype")
    (silent,) = read(QWEN, None)
    assert (silent.problem.router_dtype, silent.sources["router_dtype"]) == ("bf16", "assumed")
    with pytest.raises(CheckpointError, match=r"moe_router_dtype must be one of .*, got 'int8'"):
        read(QWEN, None, moe_router_dtype="int8")


TRIMMED = [
    ("deepseek-v3", "routed_scaling_factor", "routing.scale (1)"),
    ("deepseek-v3", "n_group", "routing.groups (none)"),
    ("deepseek-v4", "swiglu_limit", "activation.limit (none)"),
    ("glm-4.7", "routed_scaling_factor", "routing.scale (1)"),
    ("nemotron-h", "routed_scaling_factor", "routing.scale (1)"),
    ("kimi-k3", "routed_scaling_factor", "routing.scale (1)"),
]


@pytest.mark.parametrize(("family", "key", "said"), TRIMMED)
def test_the_default_for_a_key_that_was_trimmed_away_is_named(family: str, key: str, said: str) -> None:
    whole = read(FAMILIES[family], None)[0]
    assert not any(note.startswith("assumed") for note in whole.notes)
    trimmed = read(FAMILIES[family], None, **{key: None})[0]
    (note,) = [note for note in trimmed.notes if note.startswith("assumed")]
    assert said in note
    assert trimmed.sources[said.split()[0]] == "assumed"

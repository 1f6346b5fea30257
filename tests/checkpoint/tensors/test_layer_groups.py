"""Layer groups: what configs and headers say, where they disagree, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moectl.checkpoint import TensorInfo, layer_groups, open_checkpoint
from moectl.checkpoint.config.declared_layers import CONFIG_ONLY
from moectl.checkpoint.source.catalogue import built_in
from moectl.errors import CheckpointError, MoectlError
from moectl.problem.layer_ranges import ranges
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import MXFP4, Scheme, int_format
from moectl.synth import SynthSizes, resized

GPT, KIMI = "openai/gpt-oss-20b", "moonshotai/Kimi-K2-Thinking"
Listing = dict[str, TensorInfo]


def small(model: str, **sizes: int) -> tuple[dict[str, Any], Listing]:
    """A small model's config and listing."""
    entry = built_in(model)
    config = resized(
        entry, SynthSizes(**{"layers": 2, "experts": 8, "hidden": 256, "intermediate": 128} | sizes)
    )
    return config, dict(entry.listing(config))


def changed(listing: Listing, name: str, **fields: Any) -> Listing:
    return {**listing, name: replace(listing[name], **fields)}


def renamed(listing: Listing, change: Callable[[str], str]) -> Listing:
    return {change(name): replace(info, name=change(name)) for name, info in listing.items()}


def refused(config: dict[str, Any], tensors: Listing | None, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        layer_groups(config, tensors)
    for word in words:
        assert word in str(caught.value)


GPT_PROBLEM = MoEProblem(
    Dims(2880, 2880),
    32,
    4,
    Scheme(MXFP4),
    activation=SWIGLU_OAI,
    routing=Routing("softmax", renormalize=True, after_topk=True, router_bias=True),
    storage="gpt_oss",
    rows="interleaved",
    bias=True,
    model_type="gpt_oss",
)
KIMI_PROBLEM = MoEProblem(
    Dims(7168, 2048),
    384,
    8,
    Scheme(int_format(4, 32)),
    routing=Routing("sigmoid", renormalize=True, correction_bias=True, groups=1, topk_groups=1, scale=2.827),
    storage="compressed-tensors",
    shared_experts=1,
    model_type="kimi_k2",
)


@pytest.mark.parametrize(("model", "problem"), [(GPT, GPT_PROBLEM), (KIMI, KIMI_PROBLEM)])
def test_published_problem_with_and_without_headers(model: str, problem: MoEProblem) -> None:
    entry = built_in(model)
    (alone,) = layer_groups(entry.config, None)
    (whole,) = layer_groups(entry.config, entry.listing())
    assert alone.problem == whole.problem == problem
    assert alone.layers == whole.layers == tuple(range(24) if model == GPT else range(1, 61))
    assert (alone.notes, whole.notes) == ((CONFIG_ONLY,), ())
    assert not alone.names.experts


def test_names_by_role() -> None:
    (gpt,) = layer_groups(*small(GPT))
    assert set(gpt.names.experts) == {"w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"}
    assert gpt.names.experts["w2_scale"] == "model.layers.{layer}.mlp.experts.down_proj_scales"
    assert gpt.names.router == {
        "weight": "model.layers.{layer}.mlp.router.weight",
        "bias": "model.layers.{layer}.mlp.router.bias",
    }
    (kimi,) = layer_groups(*small(KIMI))
    assert set(kimi.names.experts) == {f"w{i}{s}" for i in "123" for s in ("", "_scale", "_shape")}
    stem = "model.layers.{layer}.mlp.experts.{expert}"
    assert kimi.names.experts["w3"] == f"{stem}.up_proj.weight_packed"
    assert set(kimi.names.router) == {"weight", "correction_bias"}
    assert kimi.names.shared["w2"] == "model.layers.{layer}.mlp.shared_experts.down_proj.weight"


def test_every_name_is_a_tensor() -> None:
    for model in (GPT, KIMI):
        config, listing = small(model)
        (group,) = layer_groups(config, listing)
        names = [*group.names.experts.values(), *group.names.router.values(), *group.names.shared.values()]
        spelled = {n.format(layer=la, expert=e) for n in names for la in group.layers for e in range(8)}
        assert spelled == set(listing)


def test_sources() -> None:
    (gpt,) = layer_groups(*small(GPT))
    assert gpt.sources["experts"] == "config:num_local_experts"
    assert gpt.sources["activation.limit"] == "config:swiglu_limit"
    assert gpt.sources["routing.after_topk"] == "family:gpt-oss"
    assert gpt.sources["scheme"] == "config:quantization_config.quant_method"
    assert gpt.sources["dtype"] == "header:model.layers.0.mlp.router.weight"
    (alone,) = layer_groups(small(GPT)[0], None)
    assert alone.sources["dtype"] == "assumed"
    config, _ = small(KIMI)
    del config["norm_topk_prob"]
    (kimi,) = layer_groups(config, None)
    assert kimi.sources["routing.renormalize"] == "family:deepseek"
    del config["model_type"], config["architectures"]
    (unknown,) = layer_groups(config, None)
    assert unknown.sources["routing.renormalize"] == "assumed"
    assert any("assumed, as no key says it: routing.renormalize" in note for note in unknown.notes)
    assert replace(unknown.problem, model_type="kimi_k2") == kimi.problem
    (kimi,) = layer_groups(config, None)
    assert kimi.sources["routing.scoring"] == "config:scoring_func"


def test_text_config_and_other_prefix() -> None:
    config, listing = small(KIMI)
    nested = {"model_type": "kimi_k25", "text_config": config}
    (group,) = layer_groups(nested, renamed(listing, lambda name: f"language_model.{name}"))
    assert group.problem == layer_groups(config, listing)[0].problem
    assert group.sources["experts"] == "config:text_config.n_routed_experts"
    assert group.names.experts["w1"].startswith("language_model.model.layers.{layer}.mlp.experts.{expert}.")


def test_other_matrix_names() -> None:
    config, listing = small(KIMI)
    spelled = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def rename(name: str) -> str:
        for old, new in spelled.items():
            name = name.replace(old, new)
        return name.replace(".mlp.", ".block_sparse_moe.")

    (group,) = layer_groups(config, renamed(listing, rename))
    assert group.names.experts["w3_scale"].endswith("block_sparse_moe.experts.{expert}.w3.weight_scale")


def test_headers_win_with_a_note() -> None:
    config, listing = small(GPT)
    (group,) = layer_groups({**config, "num_local_experts": 16, "intermediate_size": 64}, listing)
    assert group.problem.experts == 8
    assert group.problem.local_experts == 8
    assert group.problem.dims == Dims(256, 128)
    assert group.sources["experts"].startswith("header:")
    assert any("experts: the config says 16, the headers say 8" in note for note in group.notes)
    assert any("intermediate: the config says 64, the headers say 128" in note for note in group.notes)


def test_group_size_from_headers() -> None:
    config, listing = small(KIMI)
    config = json.loads(json.dumps(config))
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (group,) = layer_groups(config, listing)
    assert group.problem.scheme.weight == int_format(4, 32)
    assert group.sources["scheme"].startswith("header:")
    assert any("group 64" in note and "group 32" in note for note in group.notes)


def test_correction_bias_from_headers() -> None:
    config, listing = small(KIMI)
    del config["topk_method"]
    (group,) = layer_groups(config, listing)
    assert group.problem.routing.correction_bias
    assert group.sources["routing.correction_bias"].endswith("e_score_correction_bias")


def test_shared_experts_from_width() -> None:
    config, listing = small(KIMI, layers=1)
    for matrix, shape in (("gate_proj", (256, 256)), ("up_proj", (256, 256)), ("down_proj", (256, 256))):
        listing = changed(listing, f"model.layers.1.mlp.shared_experts.{matrix}.weight", shape=shape)
    (group,) = layer_groups(config, listing)
    assert group.problem.shared_experts == 2


def plain_layer(listing: Listing, layer: int) -> Listing:
    """`listing` with a layer's experts left unquantized."""
    found: Listing = {}
    for name, info in listing.items():
        if not name.startswith(f"model.layers.{layer}.mlp.experts."):
            found[name] = info
        elif name.endswith("weight_packed"):
            plain = name.replace("weight_packed", "weight")
            shape = (info.shape[0], info.shape[1] * 8)
            found[plain] = replace(info, name=plain, dtype="BF16", shape=shape)
    return found


def test_an_unquantized_layer_is_a_group_of_its_own() -> None:
    config, listing = small(KIMI, layers=3)
    first, second = layer_groups(config, plain_layer(listing, 2))
    assert (first.layers, first.problem.scheme.weight.name) == ((1, 3), "int4")
    assert (second.layers, second.problem.scheme.weight.name) == ((2,), "bf16")
    assert second.problem.storage == "plain"
    assert any("int4" in note for note in second.notes)


def test_layers_past_the_last_are_left_out_with_a_note() -> None:
    config, listing = small(KIMI)
    extra = {name: info for name, info in listing.items() if ".layers.2." in name}
    extra = renamed(extra, lambda name: name.replace(".layers.2.", ".layers.3."))
    mtp = renamed(extra, lambda name: name.replace("model.layers.3.", "mtp.layers.0."))
    (group,) = layer_groups(config, listing | extra | mtp)
    assert group.layers == (1, 2)
    assert any("model.layers.3.mlp" in note and "mtp.layers.0.mlp" in note for note in group.notes)


def test_layer_lists_that_disagree() -> None:
    config, listing = small(KIMI)
    (group,) = layer_groups({**config, "first_k_dense_replace": 2}, listing)
    assert group.layers == (1, 2)
    assert any("layer 1 has experts" in note for note in group.notes)
    rest = {name: info for name, info in listing.items() if ".layers.2." not in name}
    (group,) = layer_groups(config, rest)
    assert any("layer 2 has no experts" in note for note in group.notes)


@pytest.mark.parametrize(
    ("freq", "layers"), [(1, (1, 2, 3)), (2, (2,)), ([0, 1, 0, 1], (1, 3)), ([1, 1, 1, 1], (1, 2, 3))]
)
def test_moe_layer_freq(freq: Any, layers: tuple[int, ...]) -> None:
    config, _ = small(KIMI, layers=3)
    (group,) = layer_groups({**config, "moe_layer_freq": freq}, None)
    assert group.layers == layers


def test_swiglu_limit() -> None:
    config, _ = small(GPT)
    (group,) = layer_groups({**config, "swiglu_limit": 5}, None)
    assert group.problem.activation == Activation("swigluoai", alpha=1.702, limit=5.0)


# Faults of headers.

EXPERT = "model.layers.1.mlp.experts."


def test_missing_expert() -> None:
    config, listing = small(KIMI)
    for gone in (0, 3, 7):
        rest = {n: info for n, info in listing.items() if not n.startswith(f"{EXPERT}{gone}.")}
        refused(config, rest, f"expert {gone} is missing", f"{EXPERT}{gone}.")


@pytest.mark.parametrize(
    "leaf", ["up_proj.weight_scale", "down_proj.weight_packed", "gate_proj.weight_shape"]
)
def test_missing_tensor_of_one_expert(leaf: str) -> None:
    config, listing = small(KIMI)
    del listing[f"{EXPERT}5.{leaf}"]
    refused(config, listing, f"{EXPERT}5.{leaf}")


def test_missing_tensor_of_all_experts() -> None:
    config, listing = small(GPT)
    del listing["model.layers.1.mlp.experts.down_proj_scales"]
    refused(config, listing, "layer 1", "lack down_proj_scales")
    config, listing = small(KIMI)
    rest = {name: info for name, info in listing.items() if not name.endswith("up_proj.weight_scale")}
    refused(config, rest, "layer 1", "lack up_proj.weight_scale")


def test_wrong_dtype() -> None:
    config, listing = small(GPT)
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    refused(config, changed(listing, name, dtype="I8"), name, "must be U8, got I8")
    config, listing = small(KIMI)
    name = f"{EXPERT}4.up_proj.weight_scale"
    refused(config, changed(listing, name, dtype="F16"), name, "F16")


@pytest.mark.parametrize(
    ("model", "leaf", "shape"),
    [
        (GPT, "gate_up_proj_blocks", (8, 256, 8)),
        (GPT, "gate_up_proj_blocks", (8, 256, 7, 16)),
        (GPT, "gate_up_proj_scales", (8, 256, 9)),
        (GPT, "gate_up_proj_scales", (7, 256, 8)),
        (GPT, "down_proj_bias", (8, 255)),
        (GPT, "down_proj_bias", ()),
        (KIMI, "3.gate_proj.weight_packed", (128, 33)),
        (KIMI, "0.gate_proj.weight_packed", (0, 32)),
        (KIMI, "0.down_proj.weight_packed", (256,)),
        (KIMI, "2.down_proj.weight_shape", (3,)),
    ],
)
def test_wrong_shape(model: str, leaf: str, shape: tuple[int, ...]) -> None:
    config, listing = small(model)
    refused(config, changed(listing, EXPERT + leaf, shape=shape), "model.layers.1.mlp.experts.")


def test_unknown_names_are_refused() -> None:
    config, listing = small(KIMI)
    info = next(iter(listing.values()))
    block = "model.layers.1.mlp."
    for name, word in {
        f"{block}experts.0.gate_proj.weight_extra": "weight_extra",
        f"{block}experts.extra": "mixes experts",
        f"{block}experts.00.gate_proj.weight_packed": "not understood",
        f"{block}gate.surprise": "router",
        f"{block}shared_experts.gate_proj.surprise": "shared expert",
        f"{block}shared_experts.gate.weight": "shared expert",
        "other.layers.1.mlp.experts.0.gate_proj.weight_packed": "two names",
    }.items():
        refused(config, {**listing, name: replace(info, name=name)}, word)


def test_no_router() -> None:
    config, listing = small(KIMI)
    for layer in (1, 2):
        del listing[f"model.layers.{layer}.mlp.gate.weight"]
    (group,) = layer_groups(config, listing)
    assert any("no router's weight" in note for note in group.notes)
    assert (group.problem.experts, group.problem.router_dtype) == (8, "bf16")
    assert group.sources["router_dtype"] == "assumed"
    config, listing = small(KIMI)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    refused(config, changed(listing, name, shape=(9,)), name)


def test_no_experts_at_all() -> None:
    config, listing = small(GPT)
    rest = {name: info for name, info in listing.items() if "experts" not in name}
    refused(config, rest, "no Mixture-of-Experts layer")


# Faults of configs.


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in ("n_routed_experts", "num_experts_per_tok", "hidden_size", "num_hidden_layers")
        for value in (0, -1, True, 2.0, "8", [8], 10**12)
    ]
    + [
        ("moe_intermediate_size", "x"),
        ("moe_layer_freq", 0),
        ("moe_layer_freq", [1]),
        ("moe_layer_freq", [1, 2, 1]),
        ("first_k_dense_replace", -1),
        ("first_k_dense_replace", 61),
        ("scoring_func", "tanh"),
        ("scoring_func", 3),
        ("topk_method", "other"),
        ("norm_topk_prob", 1),
        ("n_group", "1"),
        ("routed_scaling_factor", -1.0),
        ("routed_scaling_factor", float("inf")),
        ("n_shared_experts", 1.5),
        ("hidden_act", "geglu"),
        ("hidden_act", ["silu"]),
        ("torch_dtype", "float64"),
        ("num_experts_per_tok", 9),
    ],
)
def test_bad_config_value(key: str, value: Any) -> None:
    config, _ = small(KIMI)
    refused({**config, key: value}, None, "config.json")


@pytest.mark.parametrize("key", ["n_routed_experts", "num_hidden_layers", "hidden_size"])
def test_missing_config_key(key: str) -> None:
    config, _ = small(KIMI)
    del config[key]
    refused(config, None, "config.json")


def test_unknown_family_and_method() -> None:
    refused({"model_type": "llama", "hidden_size": 64}, None, "'llama'", "not understood")
    refused({}, None, "not understood")
    config, _ = small(KIMI)
    refused({**config, "quantization_config": {"quant_method": "magic"}}, None, "'magic'")
    refused({**config, "quantization_config": ["int4"]}, None, "quantization_config")


@pytest.mark.parametrize("text", ["[]", '"x"', "12", "null", "{", '{"a": ' + "[" * 100_000, "\udcff", ""])
def test_config_is_no_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for ref in (path, tmp_path):
        with pytest.raises(MoectlError, match=r"config\.json"):
            open_checkpoint(ref)


@pytest.mark.parametrize(
    ("numbers", "text"), [(set(), ""), ({3}, "3"), ({5, 0, 1, 2}, "0-2, 5"), (range(24), "0-23")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text

"""Weights outside the routed experts, computed from configs, against published files and other code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.config.other_weights import estimated_weights
from moectl.checkpoint.source.catalogue import CatalogueEntry, model_names, read_entry
from moectl.checkpoint.source.shards import separate_quantization
from moectl.problem.other_weights import OtherWeights
from support.sampling import every_nth

UNKNOWN = {
    "amd/DeepSeek-V4-Pro-MXFP4",
    "deepseek-ai/DeepSeek-V4-Flash",
    "nvidia/DeepSeek-V4-Flash-NVFP4",
    "moonshotai/Kimi-K3",
    # The config's copy has no image encoder.
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    # The config lists no exception, and some modules are not quantized.
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "RedHatAI/Qwen3-Coder-Next-NVFP4",
    # The config does not say that the model is quantized.
    "nvidia/DeepSeek-R1-0528-FP4",
    "nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4",
}


def estimate(entry: CatalogueEntry) -> OtherWeights | None:
    packed = any(row.dtype in ("U8", "F8_E4M3", "I32") for row in entry.tensors if ".experts." in row.name)
    stored = {"nvfp4" if packed else "bf16"}
    return estimated_weights(entry.config, *separate_quantization(entry.documents), stored)


def expert_bytes(entry: CatalogueEntry) -> int:
    """Bytes of the routed experts of the main model."""
    main = frozenset(entry.layers)
    return sum(
        info.nbytes
        for name, info in entry.listing().items()
        if ".experts." in name and int(name.split("layers.")[1].split(".")[0]) in main
    )


# `total_size` in the published model.safetensors.index.json.
PUBLISHED = {
    "openai/gpt-oss-20b": 13_761_264_768,
    "Qwen/Qwen3-30B-A3B": 61_064_245_248,
    "mistralai/Mixtral-8x7B-v0.1": 93_405_585_408,
}


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_experts_and_estimate_are_the_published_total(name: str, total: int) -> None:
    entry = read_entry(name)
    found = estimate(entry)
    assert found is not None and found.source == "config"
    published = total - expert_bytes(entry)
    assert found.total == pytest.approx(published, rel=1e-3)


def test_deepseek_files_are_experts_estimate_and_prediction_layer() -> None:
    """The published files of DeepSeek-V3 have 688,586,727,753 bytes, a sixty-second layer included."""
    entry = read_entry("deepseek-ai/DeepSeek-V3")
    found = estimate(entry)
    assert found is not None
    hidden, vocabulary = 7168, 129280
    layer = (found.sharded + found.replicated - 3 * 3 * hidden * 18432) / 61
    shared = 3 * hidden * 2048 * 3 / 61
    prediction = 2 * (2 * hidden * hidden + 2 * vocabulary * hidden) + layer + shared
    one_layer = expert_bytes(entry) // len(entry.layers)
    total = expert_bytes(entry) + one_layer + found.total + prediction
    assert total == pytest.approx(688_586_727_753, rel=1e-3)
    assert found.total + prediction == pytest.approx(
        688_586_727_753 - expert_bytes(entry) - one_layer, rel=0.01
    )


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model without quantization."""
    found = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    text = found.get("text_config")
    return found | {"text_config": plain(text)} if isinstance(text, Mapping) else found


def parameters(config: dict[str, Any]) -> int:
    """Numbers outside the routed experts in the model that transformers makes."""
    transformers = pytest.importorskip("transformers", reason="a development dependency")
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    settings = CONFIG_MAPPING[kind].from_dict({**config, "model_type": kind})
    images = "vision_config" in config
    maker = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = maker.from_config(settings)
    routed = (".experts.", "block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
    return sum(p.numel() for name, p in model.named_parameters() if not any(it in name for it in routed))


FAMILIES = (
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "Qwen/Qwen3-Next-80B-A3B-Thinking",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "deepseek-ai/DeepSeek-V2-Lite",
    "nvidia/DeepSeek-V3.2-NVFP4",
    "moonshotai/Kimi-K2-Instruct",
    "amd/Kimi-K2.5-MXFP4",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-5",
    "MiniMaxAI/MiniMax-M2",
    "MiniMaxAI/MiniMax-M3-MXFP8",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "ai21labs/AI21-Jamba-1.5-Mini",
    "baidu/ERNIE-4.5-21B-A3B-PT",
    "ibm-granite/granite-3.1-1b-a400m-instruct",
    "google/gemma-4-26B-A4B",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "microsoft/Phi-3.5-MoE-instruct",
    "allenai/OLMoE-1B-7B-0125-Instruct",
)


@pytest.mark.parametrize("name", every_nth(FAMILIES, 2))
def test_transformers_makes_as_many_numbers(name: str) -> None:
    config = plain(read_entry(name).config)
    found = estimated_weights(config)
    assert found is not None
    assert found.total / 2 == pytest.approx(parameters(config), rel=1e-3)


HYBRID = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}


def test_state_space_layers_of_granite() -> None:
    found = estimated_weights(HYBRID)
    assert found is not None and not found.last
    assert found.total / 2 == pytest.approx(parameters(dict(HYBRID)), rel=2e-3)


def test_built_in_models_without_an_estimate_are_these() -> None:
    assert {name for name in model_names() if estimate(read_entry(name)) is None} == UNKNOWN


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("deepseek-ai/DeepSeek-V3", 17.77),  # attention, dense layers and shared experts in FP8
        ("moonshotai/Kimi-K2-Thinking", 21.83),  # experts alone in INT4
        ("nvidia/Kimi-K2.5-NVFP4", 18.64),  # shared experts and the dense layer in NVFP4
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", 1.618),  # all but router, embedding and head
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", 3.35),  # listed: FP8 attention, NVFP4 shared experts and head
    ],
)
def test_modules_have_the_format_that_the_config_gives_them(name: str, gib: float) -> None:
    found = estimate(read_entry(name))
    assert found is not None and found.total / 2**30 == pytest.approx(gib, rel=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "somethingelse"},
        {"vocab_size": "many"},
        {"vocab_size": None},
        {"layer_types": ["mamba", "mamba", "attention", "surprise"]},
        {"mamba_n_heads": -1},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"vision_config": "large"},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
    ],
)
def test_nothing_is_estimated_from_what_is_not_understood(change: dict[str, Any]) -> None:
    assert estimated_weights({**HYBRID, **change}) is None


def test_they_are_computed_once_for_all_answers_about_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def estimated(*asked: object) -> None:
        calls.append(asked)

    monkeypatch.setattr("moectl.checkpoint.config.other_weights.estimated_weights", estimated)
    checkpoint = open_checkpoint("openai/gpt-oss-20b", offline=True)
    assert [checkpoint.other_weights for _ in range(3)] == [None] * 3 and len(calls) == 1

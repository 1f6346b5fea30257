"""Outputs in the hands of others: compressed-tensors' own reader, and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.portable.options import PortableOptions
from moectl.convert.portable.portable_plan import plan_portable
from moectl.problem.schemes import BF16, MXFP4, int_format
from support.portable_folders import contents, converted, layer_in, random_layer, storage_of
from support.stored_layers import EXPERTS, judge

CT = "compressed-tensors"
PLAIN = ("plain", BF16)
FROM = (
    (PLAIN, "mxfp4", None),
    (PLAIN, "int4-g32", None),
    (PLAIN, "int4-g128", None),
    (PLAIN, "int8", None),
    (PLAIN, "nvfp4", None),
    (PLAIN, "fp8-block", None),
    (PLAIN, "fp8-channel", None),
    (("awq", int_format(4, 32, zero_point=True)), "int4-g32", int_format(4, 32, zero_point=True)),
    (("gptq", int_format(4, 128)), "int4-g128", int_format(4, 128)),
    (("quark", MXFP4, "weight"), "mxfp4", None),
    (("mxfp4", MXFP4, "proj.scale"), "nvfp4", None),
)


@pytest.mark.parametrize("source, target, weight", FROM, ids=str)
def test_compressed_tensors_reads_the_same_values(source, target, weight, tmp_path):
    pytest.importorskip("compressed_tensors", reason="a development dependency where Python is 3.11 or newer")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    layer = random_layer(*source)
    if source[0] == "mxfp4":
        for role in ("w1_scale", "w2_scale", "w3_scale"):
            layer.tensors[role][:] = [
                t.view(torch.uint8).clamp(110, 120).view(t.dtype) for t in layer.tensors[role]
            ]
    out = converted(layer, tmp_path, target)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    format_ = weight or PortableOptions(target).format.weight
    ours = layer_in(
        out, storage_of(CT, format_, "packed" if format_.bits == 4 or target == "int8" else ""), format_
    )
    tensors = contents(out)
    for expert in range(EXPERTS):
        for matrix, name in (("w1", "gate_proj"), ("w2", "down_proj")):
            prefix = f"model.layers.7.mlp.experts.{expert}.{name}."
            state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            theirs = compressor.decompress(state, scheme)["weight"].double().numpy()
            own = judge(ours, matrix, expert)
            # They multiply in the dtype of the scales, bfloat16 for most.
            assert np.all(abs(theirs - own) <= 2.0**-8 * abs(own) + 1e-30), (expert, name)


def tiny(kind: str, folder: Path) -> Path:
    """A tiny model of a family, saved by transformers itself."""
    import transformers

    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "num_experts_per_tok": 2,
    }
    configs = {
        "qwen3": lambda: transformers.Qwen3MoeConfig(
            **sizes, intermediate_size=128, moe_intermediate_size=128, num_experts=4, head_dim=64
        ),
        "mixtral": lambda: transformers.MixtralConfig(**sizes, intermediate_size=256, num_local_experts=4),
        "deepseek": lambda: transformers.DeepseekV3Config(
            **sizes,
            intermediate_size=128,
            moe_intermediate_size=128,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=64,
        ),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **sizes, intermediate_size=128, num_local_experts=4, head_dim=64
        ),
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]()).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def portable(source: Path, out: Path, target: str, **asked: object) -> Path:
    convert(plan_portable(open_checkpoint(source), PortableOptions(target, **asked)), out)
    return out


def logits(folder: Path) -> torch.Tensor:
    """What transformers computes with a checkpoint, every weight of it taken from there."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits.float()


FAMILIES = (
    ("qwen3", "int4-g128"),
    *(
        pytest.param(kind, target, marks=pytest.mark.slow)
        for kind, target in (
            ("qwen3", "int4-g32"),
            ("qwen3", "int8"),
            ("qwen3", "mxfp4"),
            ("qwen3", "fp8-channel"),
            ("mixtral", "int4-g128"),
            ("mixtral", "mxfp4"),
            ("deepseek", "int4-g128"),
            ("deepseek", "fp8-channel"),
        )
    ),
)


@pytest.mark.parametrize("kind, target", FAMILIES)
def test_transformers_computes_with_the_decoded_weights(kind, target, tmp_path):
    pytest.importorskip("transformers", reason="a development dependency where Python is 3.11 or newer")
    source = tiny(kind, tmp_path / "source")
    out = portable(source, tmp_path / "out", target)
    decoded = portable(out, tmp_path / "decoded", "bf16", requantize=True)
    ours, theirs, before = logits(decoded), logits(out), logits(source)
    assert (theirs - ours).norm() <= 0.01 * ours.norm()
    assert 0 < (ours - before).norm() <= 0.2 * before.norm()


@pytest.mark.slow
def test_transformers_reads_gpt_oss_in_bf16_and_back(tmp_path):
    pytest.importorskip("transformers", reason="a development dependency where Python is 3.11 or newer")
    source = tiny("gpt-oss", tmp_path / "source")
    packed = portable(source, tmp_path / "mxfp4", "mxfp4", container="native")
    assert "model.layers.0.mlp.experts.gate_up_proj_blocks" in contents(packed)
    decoded = portable(packed, tmp_path / "decoded", "bf16")
    before, after = logits(source), logits(decoded)
    assert (after - before).norm() <= 0.2 * before.norm()

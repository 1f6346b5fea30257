"""Small synthetic checkpoints in the published formats' own names, shapes and dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moectl.synth import synthesize

GPT_OSS_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}

KIMI_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "actorder": None,
                },
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    },
}


def random_bytes(generator: torch.Generator, *shape: int, high: int = 256) -> Tensor:
    """uint8 of `shape`, below `high`."""
    return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)


def bf16(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def gpt_oss_layer(layer: int, config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """One gpt-oss layer's tensors; E8M0 scales leave out 255, which is NaN."""
    experts, hidden, inter = (
        config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    prefix = f"model.layers.{layer}"
    moe = f"{prefix}.mlp.experts"
    return {
        f"{moe}.gate_up_proj_blocks": random_bytes(generator, experts, 2 * inter, hidden // 32, 16),
        f"{moe}.gate_up_proj_scales": random_bytes(generator, experts, 2 * inter, hidden // 32, high=255),
        f"{moe}.gate_up_proj_bias": bf16(generator, experts, 2 * inter),
        f"{moe}.down_proj_blocks": random_bytes(generator, experts, hidden, inter // 32, 16),
        f"{moe}.down_proj_scales": random_bytes(generator, experts, hidden, inter // 32, high=255),
        f"{moe}.down_proj_bias": bf16(generator, experts, hidden),
        f"{prefix}.mlp.router.weight": bf16(generator, experts, hidden),
        f"{prefix}.mlp.router.bias": bf16(generator, experts),
        f"{prefix}.input_layernorm.weight": bf16(generator, hidden),
    }


def _projections(hidden: int, inter: int) -> tuple[tuple[str, int, int], ...]:
    return (("gate_proj", inter, hidden), ("up_proj", inter, hidden), ("down_proj", hidden, inter))


def kimi_layer(layer: int, config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """One int4 pack-quantized layer of per-expert tensors."""
    hidden, inter = config["hidden_size"], config["moe_intermediate_size"]
    prefix = f"model.layers.{layer}"
    tensors = {
        f"{prefix}.mlp.gate.weight": bf16(generator, config["n_routed_experts"], hidden),
        f"{prefix}.mlp.gate.e_score_correction_bias": torch.randn(
            config["n_routed_experts"], generator=generator
        ),
        f"{prefix}.mlp.shared_experts.gate_proj.weight": bf16(generator, inter, hidden),
        f"{prefix}.mlp.shared_experts.up_proj.weight": bf16(generator, inter, hidden),
        f"{prefix}.mlp.shared_experts.down_proj.weight": bf16(generator, hidden, inter),
        f"{prefix}.input_layernorm.weight": bf16(generator, hidden),
    }
    for expert in range(config["n_routed_experts"]):
        for name, n, k in (
            ("gate_proj", inter, hidden),
            ("up_proj", inter, hidden),
            ("down_proj", hidden, inter),
        ):
            base = f"{prefix}.mlp.experts.{expert}.{name}"
            tensors[f"{base}.weight_packed"] = random_bytes(generator, n, k // 2).view(torch.int32)
            tensors[f"{base}.weight_scale"] = bf16(generator, n, k // 32)
            tensors[f"{base}.weight_shape"] = torch.tensor([n, k], dtype=torch.int32)
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> Path:
    """A folder with config, an index, a tokenizer, and the given safetensors files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    for name, tensors in files.items():
        save_file(tensors, folder / name, {"format": "pt"})
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def gpt_oss_checkpoint(folder: Path, **sizes: Any) -> Path:
    """Three layers in two files, and a third file without experts."""
    config = {**GPT_OSS_CONFIG, **sizes}
    generator = torch.Generator().manual_seed(1)
    layers = [gpt_oss_layer(i, config, generator) for i in range(config["num_hidden_layers"])]
    middle = len(layers) // 2
    files: dict[str, dict[str, Tensor]] = {"model-00001-of-00003.safetensors": {}}
    files["model-00002-of-00003.safetensors"] = {}
    for i, tensors in enumerate(layers):
        files[f"model-0000{1 if i < middle else 2}-of-00003.safetensors"].update(tensors)
    files["model-00003-of-00003.safetensors"] = {
        "model.embed_tokens.weight": bf16(generator, 32, config["hidden_size"]),
        "model.norm.weight": bf16(generator, config["hidden_size"]),
    }
    return write_checkpoint(folder, config, {name: tensors for name, tensors in files.items() if tensors})


def kimi_checkpoint(folder: Path, **sizes: Any) -> Path:
    """One dense layer and two MoE layers; the last layer's experts are spread over two files."""
    config = {**KIMI_CONFIG, **sizes}
    generator = torch.Generator().manual_seed(2)
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    first = {
        "model.embed_tokens.weight": bf16(generator, 32, hidden),
        "model.layers.0.mlp.gate_proj.weight": bf16(generator, dense, hidden),
        "model.layers.0.mlp.up_proj.weight": bf16(generator, dense, hidden),
        "model.layers.0.mlp.down_proj.weight": bf16(generator, hidden, dense),
        **kimi_layer(1, config, generator),
    }
    second = kimi_layer(2, config, generator)
    moved = {key: second.pop(key) for key in sorted(second) if ".experts.0." in key}
    files = {"model-00001-of-00002.safetensors": {**first, **moved}}
    files["model-00002-of-00002.safetensors"] = second
    return write_checkpoint(folder, config, files)


CHECKPOINTS = {"gpt_oss": gpt_oss_checkpoint, "kimi": kimi_checkpoint}


def nvfp4_checkpoint(folder: Path) -> Path:
    """A small NVFP4 checkpoint whose experts each have a scale of inputs, the first the largest."""
    synthesize(
        "nvidia/Qwen3-30B-A3B-NVFP4", folder, layers=1, experts=8, hidden=256, intermediate=128, top_k=2
    )
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(".input_scale"):
            expert = int(name.split(".experts.")[1].split(".")[0])
            tensors[name] = torch.full_like(tensors[name], 2.0 ** -(8 + expert))
    save_file(tensors, file, {"format": "pt"})
    return folder


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files and converted layers, by name."""
    files = (path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".experts"))
    return {key: t for path in files for key, t in load_file(path).items()}


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True when names, shapes, dtypes and bytes agree."""
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype
        and a[key].shape == b[key].shape
        and torch.equal(a[key].reshape(-1).view(torch.uint8), b[key].reshape(-1).view(torch.uint8))
        for key in a
    )


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file's content, by its path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

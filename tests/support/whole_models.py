"""Whole tiny models for engines: synthetic experts, random attention, norms and output heads around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY, HEADS, KV_HEADS, HEAD = 512, 4, 2, 64

SIZES: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": VOCABULARY - 2,
    "bos_token_id": VOCABULARY - 2,
}

UNQUANTIZED = [
    "re:.*self_attn.*",
    "re:.*mlp.gate$",
    "re:.*shared_experts.*",
    "re:.*layers.0.mlp.*_proj",
    "lm_head",
]


def gpt_oss(folder: Path) -> Path:
    """gpt-oss: biases, attention sinks, MXFP4 experts."""
    from moectl.synth import synthesize

    synthesize("openai/gpt-oss-20b", folder, layers=2, experts=8, hidden=256, intermediate=192)
    return _completed(folder, {"initial_context_length": 4096, "sliding_window": 16}, sinks=True, bias="qkvo")


def qwen3(folder: Path) -> Path:
    """Qwen3-MoE: softmax routing with normalized weights, INT4 experts (compressed-tensors)."""
    from moectl.synth import synthesize

    name = "RedHatAI/Qwen3-30B-A3B-quantized.w4a16"
    synthesize(name, folder, layers=2, experts=8, hidden=256, intermediate=256)
    return _completed(folder, {"num_experts_per_tok": 4, "max_window_layers": 2}, qk_norm=True)


def bf16(folder: Path) -> Path:
    """Qwen3-MoE with 16-bit experts: no ``quantization_config``."""
    from moectl.synth import synthesize

    synthesize("Qwen/Qwen3-30B-A3B", folder, layers=2, experts=8, hidden=256, intermediate=256)
    return _completed(folder, {"num_experts_per_tok": 4, "max_window_layers": 2}, qk_norm=True)


def glm(folder: Path) -> Path:
    """GLM-4.5: a dense first layer, shared experts, sigmoid routing with a correction bias, INT4 experts."""
    from moectl.synth import synthesize

    name = "zai-org/GLM-4.5-Air"
    source = folder.with_name(folder.name + "-16-bit")
    synthesize(name, source, layers=1, experts=8, hidden=256, intermediate=256, top_k=4)
    changed = {"intermediate_size": 256, "routed_scaling_factor": 2.5, "use_qk_norm": False}
    return _completed(source, changed, bias="qkv", dense=True, out=folder)


def _completed(
    folder: Path,
    changed: dict[str, Any],
    sinks: bool = False,
    qk_norm: bool = False,
    bias: str = "",
    dense: bool = False,
    out: Path | None = None,
) -> Path:
    """`folder` with what `synthesize` leaves out; in `out` instead if it is given."""
    config = json.loads((folder / "config.json").read_text()) | SIZES | changed
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, spread: float = 0.05) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors["model.embed_tokens.weight"] = random(VOCABULARY, hidden, spread=1.0)
    tensors["lm_head.weight"] = random(VOCABULARY, hidden, spread=0.1)
    tensors["model.norm.weight"] = ones(hidden)
    wide, narrow = HEADS * HEAD, KV_HEADS * HEAD
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("q", wide, hidden),
            ("k", narrow, hidden),
            ("v", narrow, hidden),
            ("o", hidden, wide),
        ):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = random(rows, columns)
            if name in bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = random(rows)
        for name in ("q_norm", "k_norm") if qk_norm else ():
            tensors[f"{prefix}self_attn.{name}.weight"] = ones(HEAD)
        if sinks:
            tensors[f"{prefix}self_attn.sinks"] = random(HEADS, spread=1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones(hidden)
    if dense:
        inner = config["intermediate_size"]
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"model.layers.0.mlp.{name}_proj.weight"] = random(rows, columns)
    if "quantization_config" in config and "ignore" in config["quantization_config"]:
        config["quantization_config"]["ignore"] = UNQUANTIZED
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    target = out or folder
    target.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target

"""Whole checkpoints with random weights, at the sizes of published models, that serving engines can load.

Weights behave: the same model in two engines with other kernels gives the same greedy tokens, and small
differences of log-probabilities say something about the kernels.

- Routed experts and attention each add a few percent to the residual stream in every layer, so a hidden
  state is mostly its token's embedding and differences in rounding do not grow from layer to layer.
- A token's embedding names its experts: `CODE` in as many of its first dimensions as experts are chosen.
  Every layer's router reads these dimensions in another order, so no rounding moves a choice.
- The head adds to random numbers the embedding of one other token (`SUCCESSOR`), by far the likeliest next.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

PACKED_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
}


CODE = 2.0
"""Value in an embedding's dimensions that name the token's experts; others there are 0."""

ROUTER = 2.0
"""Weight with which a router reads one of these dimensions."""

SUCCESSOR = 7.0
"""Logit of the next token by the permutation; all others are normal with a deviation of 1."""


WRITERS = 4
"""Files that are written at once, whose tensors are in memory."""

INSIDE, OUTSIDE = 1.0, 0.2
"""Root mean squares of the experts' first and second product, for inputs of 1."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a whole model; `layers` are decoder layers, all with experts."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True)
class Family:
    """How a family of models stores a layer, and its config.json."""

    layer: Callable[[Sizes, Noise, str], dict[str, Tensor]]
    config: Callable[[Sizes], dict[str, object]]


class Noise:
    """Random tensors of one seed, made on the GPU where there is one and returned on the CPU."""

    def __init__(self, seed: int) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def normal(self, *shape: int, std: float) -> Tensor:
        """Normal bf16 numbers."""
        numbers = torch.randn(*shape, generator=self._generator, device=self._device)
        return (numbers * std).to(torch.bfloat16).cpu()

    def fp8(self, *shape: int, std: float) -> Tensor:
        """Normal E4M3 numbers."""
        numbers = torch.randn(*shape, generator=self._generator, device=self._device)
        return (numbers * std).clamp(-448, 448).to(torch.float8_e4m3fn).cpu()

    def permutation(self, count: int) -> Tensor:
        """The numbers below `count` in random order."""
        return torch.randperm(count, generator=self._generator, device=self._device).cpu()

    def codes(self, tokens: int, experts: int, top_k: int) -> Tensor:
        """``[tokens, experts]`` bf16 with `CODE` in `top_k` places of each row."""
        chosen = (
            torch.rand(tokens, experts, generator=self._generator, device=self._device).topk(top_k).indices
        )
        codes = torch.zeros(tokens, experts, device=self._device)
        return codes.scatter_(1, chosen, CODE).to(torch.bfloat16).cpu()

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform integers in [`low`, `high`)."""
        return torch.randint(
            low, high, shape, generator=self._generator, device=self._device, dtype=dtype
        ).cpu()


def _attention(sizes: Sizes, noise: Noise, prefix: str, bias: bool) -> dict[str, Tensor]:
    rows = {
        "q_proj": sizes.heads * sizes.head_dim,
        "k_proj": sizes.kv_heads * sizes.head_dim,
        "v_proj": sizes.kv_heads * sizes.head_dim,
    }
    tensors = {}
    for name, count in rows.items():
        tensors[f"{prefix}self_attn.{name}.weight"] = noise.normal(count, sizes.hidden, std=0.03)
    heads = sizes.heads * sizes.head_dim
    tensors[f"{prefix}self_attn.o_proj.weight"] = noise.normal(sizes.hidden, heads, std=0.001)
    if bias:
        for name, count in {**rows, "o_proj": sizes.hidden}.items():
            tensors[f"{prefix}self_attn.{name}.bias"] = noise.normal(count, std=0.01)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(sizes.hidden, dtype=torch.bfloat16)
    return tensors


def _router(sizes: Sizes, noise: Noise) -> Tensor:
    weight = noise.normal(sizes.experts, sizes.hidden, std=0.001)
    weight[torch.arange(sizes.experts), noise.permutation(sizes.experts)] = ROUTER
    return weight


def _gpt_oss_layer(sizes: Sizes, noise: Noise, prefix: str) -> dict[str, Tensor]:
    tensors = _attention(sizes, noise, prefix, bias=True)
    tensors[f"{prefix}self_attn.sinks"] = noise.normal(sizes.heads, std=1.0)
    tensors[f"{prefix}mlp.router.weight"] = _router(sizes, noise)
    tensors[f"{prefix}mlp.router.bias"] = noise.normal(sizes.experts, std=0.05)
    matrices = {
        "gate_up_proj": (2 * sizes.intermediate, sizes.hidden, INSIDE),
        "down_proj": (sizes.hidden, sizes.intermediate, OUTSIDE),
    }
    for name, (rows, columns, spread) in matrices.items():
        role, groups = f"{prefix}mlp.experts.{name}", columns // 32
        # Codes of all kinds have an rms of 2.9, three successive powers of two 2.6 times the smallest.
        exponent = 127 + round(math.log2(spread / (columns**0.5 * 2.9 * 2.6)))
        shape = sizes.experts, rows, groups
        tensors[f"{role}_blocks"] = noise.integers(0, 256, *shape, 16, dtype=torch.uint8)
        tensors[f"{role}_scales"] = noise.integers(exponent, exponent + 3, *shape, dtype=torch.uint8)
        tensors[f"{role}_bias"] = noise.normal(sizes.experts, rows, std=0.01)
    return tensors


def _gpt_oss_config(sizes: Sizes) -> dict[str, object]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": sizes.top_k,
        "num_local_experts": sizes.experts,
        "hidden_act": "silu",
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(sizes.layers)],
        "initial_context_length": 4096,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


Stored = Callable[[Noise, int, int, int, float], dict[str, Tensor]]
"""Random matrices of experts, rows and columns as a format stores them, by the ends of the tensors' names."""


def _bf16(noise: Noise, experts: int, rows: int, columns: int, spread: float) -> dict[str, Tensor]:
    return {"weight": noise.normal(experts, rows, columns, std=spread / columns**0.5)}


def _fp8_blocks(noise: Noise, experts: int, rows: int, columns: int, spread: float) -> dict[str, Tensor]:
    codes = noise.fp8(experts, rows, columns, std=100.0)
    factors = noise.integers(64, 192, experts, rows // 128, columns // 128, dtype=torch.int64)
    return {
        "weight": codes,
        "weight_scale_inv": factors.float() * (spread / (columns**0.5 * 100.0 * 128)),
    }


def _int4_groups(noise: Noise, experts: int, rows: int, columns: int, spread: float) -> dict[str, Tensor]:
    scale = spread / (columns**0.5 * 4.6)  # codes of all kinds have an rms of 4.6
    words = noise.integers(-(2**31), 2**31 - 1, experts, rows, columns // 8, dtype=torch.int64).int()
    factors = noise.integers(64, 192, experts, rows, columns // 128, dtype=torch.int64)
    return {
        "weight_packed": words,
        "weight_scale": (factors.float() * (scale / 128)).to(torch.bfloat16),
        "weight_shape": torch.tensor([[rows, columns]] * experts),
    }


def _qwen3_layer(stored: Stored, sizes: Sizes, noise: Noise, prefix: str) -> dict[str, Tensor]:
    tensors = _attention(sizes, noise, prefix, bias=False)
    for name in ("q_norm", "k_norm"):
        tensors[f"{prefix}self_attn.{name}.weight"] = torch.ones(sizes.head_dim, dtype=torch.bfloat16)
    tensors[f"{prefix}mlp.gate.weight"] = _router(sizes, noise)
    matrices = {
        "gate_proj": (sizes.intermediate, sizes.hidden, INSIDE),
        "up_proj": (sizes.intermediate, sizes.hidden, INSIDE),
        "down_proj": (sizes.hidden, sizes.intermediate, OUTSIDE),
    }
    for name, (rows, columns, spread) in matrices.items():
        for end, matrix in stored(noise, sizes.experts, rows, columns, spread).items():
            for expert in range(sizes.experts):
                tensors[f"{prefix}mlp.experts.{expert}.{name}.{end}"] = matrix[expert]
    return tensors


def _qwen3_config(sizes: Sizes) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "moe_intermediate_size": sizes.intermediate,
        "intermediate_size": 8 * sizes.intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
    }


def _fp8_config(sizes: Sizes) -> dict[str, object]:
    layers = [f"model.layers.{number}." for number in range(sizes.layers)]
    plain = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.gate"]
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(layer + name for layer in layers for name in plain)],
    }
    return _qwen3_config(sizes) | {"quantization_config": quantization}


def _int4_config(sizes: Sizes) -> dict[str, object]:
    return _qwen3_config(sizes) | {"quantization_config": PACKED_INT4}


GPT_OSS = Family(_gpt_oss_layer, _gpt_oss_config)
QWEN3 = Family(partial(_qwen3_layer, _bf16), _qwen3_config)
QWEN3_FP8 = Family(partial(_qwen3_layer, _fp8_blocks), _fp8_config)
QWEN3_INT4 = Family(partial(_qwen3_layer, _int4_groups), _int4_config)

QWEN3_30B = Sizes(48, 128, 8, 2048, 768, 32, 4, 128, 151936)

MODELS: dict[str, tuple[Family, Sizes]] = {
    "gpt-oss-20b": (GPT_OSS, Sizes(24, 32, 4, 2880, 2880, 64, 8, 64, 201088)),
    "gpt-oss-120b": (GPT_OSS, Sizes(36, 128, 4, 2880, 2880, 64, 8, 64, 201088)),
    "qwen3-30b": (QWEN3, QWEN3_30B),
    "qwen3-30b-fp8": (QWEN3_FP8, QWEN3_30B),
    "qwen3-30b-int4": (QWEN3_INT4, QWEN3_30B),
}
"""Families and sizes by name."""


def write_model(family: Family, sizes: Sizes, out: Path, seed: int = 0) -> int:
    """Writes a checkpoint into the new directory `out`, a file per layer; returns its tensors' bytes."""
    out.mkdir(parents=True)

    def write(number: int) -> tuple[dict[str, str], int]:
        noise = Noise(seed * (sizes.layers + 1) + number + 1)
        if number < 0:
            file, tensors = "model-outside-layers.safetensors", _outside_layers(sizes, noise)
        else:
            file = f"model-{number:05d}.safetensors"
            tensors = family.layer(sizes, noise, f"model.layers.{number}.")
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, out / file, metadata={"format": "pt"}
        )
        return dict.fromkeys(tensors, file), sum(t.nbytes for t in tensors.values())

    index: dict[str, str] = {}
    total = 0
    with ThreadPoolExecutor(WRITERS) as pool:
        for names, size in pool.map(write, range(-1, sizes.layers)):
            index |= names
            total += size
    common: dict[str, object] = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "num_experts_per_tok": sizes.top_k,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.9,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": sizes.vocabulary - 3,
        "pad_token_id": sizes.vocabulary - 2,
        "eos_token_id": sizes.vocabulary - 1,
    }
    documents: Mapping[str, object] = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": index},
        "config.json": common | family.config(sizes),
    }
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=1))
    return total


def _outside_layers(sizes: Sizes, noise: Noise) -> dict[str, Tensor]:
    embedding = noise.normal(sizes.vocabulary, sizes.hidden, std=1.0)
    embedding[:, : sizes.experts] = noise.codes(sizes.vocabulary, sizes.experts, sizes.top_k)
    head = noise.normal(sizes.vocabulary, sizes.hidden, std=sizes.hidden**-0.5)
    head += embedding[noise.permutation(sizes.vocabulary)] * (SUCCESSOR / sizes.hidden)
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(sizes.hidden, dtype=torch.bfloat16),
    }

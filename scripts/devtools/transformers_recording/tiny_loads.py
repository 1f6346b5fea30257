"""What one transformers release makes of quantized experts: `from_pretrained` of small checkpoints on a CPU.

Runs in a process of its own, with the release's modules on the path and without moectl. Standard input is a
JSON document (`out`). Each checkpoint has one layer of Qwen3-MoE with experts stored as in a format; nothing
of transformers is changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "vocab_size": 64,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
IGNORED = ["lm_head", "re:.*gate$", "re:.*self_attn.*"]


def _nvfp4(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "weight": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1.0),
        "input_scale": torch.tensor(1.0),
    }


def _gptq(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        "qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
        "scales": torch.zeros(1, rows, dtype=torch.float16),
        "g_idx": torch.zeros(columns, dtype=torch.int32),
    }


def _awq(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
        "qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
        "scales": torch.zeros(1, rows, dtype=torch.float16),
    }


def _packed(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
        "weight_scale": torch.ones(rows, columns // 128, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _packed_nvfp4(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "weight_packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1.0]),
        "input_global_scale": torch.tensor([1.0]),
    }


def _fp8(**scales: torch.Tensor) -> Callable[[torch.Tensor], Tensors]:
    return lambda weight: {
        "weight": weight.to(torch.float8_e4m3fn),
        **{name: scale.clone() for name, scale in scales.items()},
    }


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": IGNORED, "quantization_status": "compressed",
    }  # fmt: skip


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CHANNELS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
GROUPS_OF_16 = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any] | None, Callable[[torch.Tensor], Tensors]]] = {
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
    "modelopt nvfp4, hf_quant_config.json alone": (None, _nvfp4),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        _fp8(weight_scale=torch.tensor(2.0), input_scale=torch.tensor(1.0)),
    ),
    "gptq int4, its tensors alone": (None, _gptq),
    "awq int4, its tensors alone": (None, _awq),
    "compressed-tensors int4": (_compressed("pack-quantized", INT4, None), _packed),
    "compressed-tensors fp8": (
        _compressed("float-quantized", CHANNELS, TOKENS),
        _fp8(weight_scale=torch.ones(128, 1)),
    ),
    "compressed-tensors nvfp4": (
        _compressed("nvfp4-pack-quantized", GROUPS_OF_16, {**GROUPS_OF_16, "dynamic": "local"}),
        _packed_nvfp4,
    ),
    "fp8 fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        _fp8(weight_scale_inv=torch.ones(1, 1)),
    ),
}
"""By storage and format: what config.json declares, and the tensors of an expert's matrix.

GPTQ's and AWQ's quantizers need GPTQModel, which replaces linear layers; experts are none, so that it makes
no difference to them whether config.json declares them.
"""


def rows() -> Iterator[dict[str, Any]]:
    """What becomes of each kind."""
    base = Path(tempfile.mkdtemp())
    whole_model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL))
    whole_model.to(torch.bfloat16).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    for kind, (declared, store) in KINDS.items():
        folder = Path(tempfile.mkdtemp())
        kept: Tensors = {}
        for name, value in tensors.items():
            matrix = name.removesuffix(".weight")
            stored = store(value) if ".experts." in name else {"weight": value}
            kept |= {
                f"{matrix}.{part}" if name.endswith(".weight") else name: t for part, t in stored.items()
            }
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        whole = config if declared is None else {**config, "quantization_config": declared}
        (folder / "config.json").write_text(json.dumps(whole))
        row: dict[str, Any] = {"loading": kind}
        try:
            auto: Any = AutoModelForCausalLM
            model, found = auto.from_pretrained(folder, output_loading_info=True)
        except Exception as error:
            yield {**row, "error": type(error).__name__}
            continue
        experts = model.model.layers[0].mlp.experts
        dtypes = {str(value.dtype).removeprefix("torch.") for value in experts.parameters()}
        unread = {name.rpartition(".")[2] for name in found["unexpected_keys"] if ".experts." in name}
        yield {
            **row,
            "experts": type(experts).__name__,
            "dtypes": sorted(dtypes),
            "missing": sorted(name for name in found["missing_keys"] if ".experts." in name),
            "unread": sorted(unread),
        }


def main() -> None:
    """Write what becomes of each kind."""
    warnings.filterwarnings("ignore")
    out = json.load(sys.stdin)["out"]
    with Path(out).open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows())


if __name__ == "__main__":
    main()

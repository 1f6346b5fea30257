"""Headers of small checkpoints of three layers, by format, and the layer group that they are read as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moectl.checkpoint import LayerGroup, TensorInfo, layer_groups
from moectl.errors import CheckpointError

E, H, N, LAYERS = 4, 256, 128, 3
CONFIG: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": H,
    "moe_intermediate_size": N,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
ROUTER = {"mlp.gate.weight": ("BF16", (E, H))}
Rows = Mapping[str, tuple[str, tuple[int, ...]]]

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def listing(rows: Rows, layers: tuple[int, ...] = (0, 1, 2), root: str = "model.layers.") -> dict[str, Any]:
    """Tensors of `rows`, names inside a layer with ``{e}`` for each expert, in every one of `layers`."""
    found = {}
    for layer in layers:
        for template, (dtype, shape) in rows.items():
            for expert in range(E) if "{e}" in template else (0,):
                name = f"{root}{layer}.{template.replace('{e}', str(expert))}"
                found[name] = TensorInfo(name, dtype, shape, "model.safetensors", 0, 1)
    return found


def matrices(rows: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]], block: str = "mlp") -> Rows:
    """Per-expert tensors of gate, up and down from (dtype, shape of gate and up, shape of down) by suffix."""
    return {
        f"{block}.experts.{{e}}.{matrix}_proj.{suffix}": (dtype, down if matrix == "down" else up)
        for suffix, (dtype, up, down) in rows.items()
        for matrix in ("gate", "up", "down")
    }


PLAIN = matrices({"weight": ("BF16", (N, H), (H, N))})
BLOCK = matrices({"weight": ("F8_E4M3", (N, H), (H, N)), "weight_scale_inv": ("F32", (1, 2), (2, 1))})
FP4 = matrices({"weight": ("I8", (N, H // 2), (H, N // 2)), "scale": ("F8_E8M0", (N, H // 32), (H, N // 32))})
MODELOPT = {
    "weight": ("U8", (N, H // 2), (H, N // 2)),
    "weight_scale": ("F8_E4M3", (N, H // 16), (H, N // 16)),
    "weight_scale_2": ("F32", (), ()),
}
AWQ = matrices(
    {
        "qweight": ("I32", (H, N // 8), (N, H // 8)),
        "qzeros": ("I32", (H // 128, N // 8), (N // 128, H // 8)),
        "scales": ("F16", (H // 128, N), (N // 128, H)),
    }
)


def read(rows: Rows, quantization: Any = None, **config: Any) -> LayerGroup:
    """The only group of layers that all have `rows` and a router."""
    extra = {} if quantization is None else {"quantization_config": quantization}
    (group,) = layer_groups({**CONFIG, **extra, **config}, listing({**ROUTER, **rows}))
    return group


def refused(rows: Rows, *words: str, quantization: Any = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(rows, quantization)
    for word in words:
        assert word in str(caught.value)

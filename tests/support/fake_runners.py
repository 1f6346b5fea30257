"""Runners in every form that a kernel must serve, all of them the torch backend inside."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.quantize_tokens import QuantizedTokens, dequantize
from moectl.kernels.reference import route
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import Runner
from moectl.problem.schemes import MXFP8_ACT, NVFP4_ACT, ActFormat
from support.scale_tiles import from_tiles

FP8_BLOCKS = ActFormat("fp8", 8, (1, 128))
FP8_STATIC = ActFormat("fp8", 8, (-1, -1), dynamic=False)

TORCH = runner_for("torch")


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    assert TORCH.compute is not None
    return TORCH.compute(prepared, x, ids, weights)


def routes_itself(prepared: PreparedMoE, x: Tensor, logits: Tensor, bias: Tensor | None) -> Tensor:
    """A monolithic kernel: it routes over all experts and computes those that are here."""
    ids, weights = route(logits, prepared.problem, bias)
    return _compute(prepared, x, prepared.local_ids(ids).to(torch.int32), weights)


def leaves_weights(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, top_k, hidden]``: every expert's output by itself, NaN where there is none."""
    y = torch.full((*ids.shape, x.shape[1]), float("nan"), dtype=x.dtype)
    single = replace(prepared, problem=replace(prepared.problem, top_k=1))
    on_input = prepared.problem.routing.weight_on_input
    for k in range(ids.shape[1]):
        factor = weights[:, k : k + 1] if on_input else torch.ones(len(x), 1)
        part = _compute(single, x, ids[:, k : k + 1], factor)
        y[:, k] = torch.where((ids[:, k] >= 0)[:, None], part, torch.nan)
    return y


def plain(prepared: PreparedMoE, tokens: QuantizedTokens, tiled: bool) -> Tensor:
    """The tokens that a runner was given, decoded, in the model's dtype."""
    scale = prepared.weights.get("w13_input")
    if tiled:
        rows, blocks = tokens.values.shape[-2], tokens.values.shape[-1] * 2 // 16
        tokens = replace(tokens, scales=from_tiles(tokens.scales, rows, blocks))
    flat = QuantizedTokens(tokens.values.flatten(0, -2), tokens.scales.flatten(0, -2), tokens.format)
    return dequantize(flat, scale).view(*tokens.values.shape[:-1], -1).bfloat16()


def wanting(form: ActFormat, tiled: bool = False) -> Runner:
    """A runner that takes tokens in `form`, standard and batched."""

    def compute(prepared: PreparedMoE, tokens: QuantizedTokens, ids: Tensor, weights: Tensor) -> Tensor:
        assert tokens.format == form and len(tokens) == len(ids)
        return _compute(prepared, plain(prepared, tokens, tiled), ids, weights)

    def batched(prepared: PreparedMoE, tokens: QuantizedTokens, counts: Tensor, expected: int) -> Tensor:
        assert TORCH.batched is not None
        return TORCH.batched(prepared, plain(prepared, tokens, tiled), counts, expected)

    return replace(
        TORCH,
        name=f"torch wanting {form.name}",
        compute=compute,
        batched=batched,
        wants=form,
        tiled=tiled,
        input_scale=lambda prepared: prepared.weights.get("w13_input"),
    )


MONOLITHIC = replace(TORCH, name="torch on logits", compute=None, batched=None, monolithic=routes_itself)
UNWEIGHED = replace(
    TORCH, name="torch without weights", compute=leaves_weights, batched=None, applies_router_weights=False
)
FP8, MXFP8, NVFP4 = wanting(FP8_BLOCKS), wanting(MXFP8_ACT), wanting(NVFP4_ACT, tiled=True)
STATIC = wanting(FP8_STATIC)

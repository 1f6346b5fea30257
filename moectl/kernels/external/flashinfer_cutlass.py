"""The flashinfer_cutlass backend: FlashInfer's CUTLASS fused MoE on SM90.

MXFP4 weights with BF16 tokens, BF16, and FP8 in blocks of 128 (whose tokens the kernel quantizes itself).
Weights as ``cutlass-sm90``, ``cutlass-bf16`` and ``cutlass-fp8-block`` lay them out: up before gate. The
library compiles its kernels at the first call, for minutes, unless they are in its cache; its tuner chooses
the tactics, at the first call of a layer with about as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...capabilities.flashinfer import CUTLASS, FlashInferKernel, function_of, kernel_of, refusal
from ...problem.moe_problem import MoEProblem
from ...torch_dtypes import MODEL_TORCH_DTYPES
from ..prepared_layer import PreparedMoE
from ..runner import Runner
from ..tolerance import DECLARED
from . import flashinfer_common
from .flashinfer_common import Arguments

NAME = "flashinfer_cutlass"
CAPABILITY = (9, 0)


def kernel_for(problem: MoEProblem) -> FlashInferKernel | None:
    """The row of `CUTLASS` for a problem; None when there is none."""
    return kernel_of(CUTLASS, problem.scheme.weight, problem.scheme.act)


def layout(problem: MoEProblem) -> str:
    """The layout of a problem's weights; that of another row for formats that are refused anyway."""
    return (kernel_for(problem) or CUTLASS[0]).layout


def _mxfp4(weights: Mapping[str, Tensor]) -> Arguments:
    return {
        "fc1_expert_weights": weights["w13"],
        "fc2_expert_weights": weights["w2"],
        "quant_scales": [weights["w13_scale"], weights["w2_scale"]],
        "use_w4_group_scaling": True,
    }


def _bf16(weights: Mapping[str, Tensor]) -> Arguments:
    return {"fc1_expert_weights": weights["w13"], "fc2_expert_weights": weights["w2"], "quant_scales": []}


def _fp8_block(weights: Mapping[str, Tensor]) -> Arguments:
    return {
        "fc1_expert_weights": weights["w13"].view(torch.float8_e4m3fn),
        "fc2_expert_weights": weights["w2"].view(torch.float8_e4m3fn),
        "quant_scales": [weights["w13_scale"], weights["w2_scale"]],
        "use_deepseek_fp8_block_scale": True,
    }


WEIGHTS: Mapping[str, Callable[[Mapping[str, Tensor]], Arguments]] = {
    "cutlass-sm90": _mxfp4,
    "cutlass-bf16": _bf16,
    "cutlass-fp8-block": _fp8_block,
}
"""Weights and their scales as arguments, by the layout's name."""


def layer_arguments(prepared: PreparedMoE) -> Arguments:
    """Arguments of ``cutlass_fused_moe`` that every call of a layer shares."""
    problem, weights = prepared.problem, prepared.weights
    found = function_of(problem.activation)
    numbers = flashinfer_common.activation_numbers(problem, prepared.device)
    # SiTU has arguments of its own for what SwiGLU calls alpha and beta.
    names = ("situ_beta", "situ_linear_beta") if found and found.member == "Situ" else _SWIGLU
    given = dict(zip((*names, *_SWIGLU[len(names) :]), numbers.values(), strict=True))
    return {
        **WEIGHTS[prepared.layout](weights),
        "fc1_expert_biases": weights.get("w13_bias"),
        "fc2_expert_biases": weights.get("w2_bias"),
        "output_dtype": MODEL_TORCH_DTYPES[problem.dtype],
        "activation_type": flashinfer_common.activation_member(problem),
        **given,
        # Sums of a token's experts inside the second GEMM come in any order: other bits in every call.
        "use_fused_finalize": False,
    }


_SWIGLU = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")


def arguments(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Arguments:
    """Arguments of ``cutlass_fused_moe`` for one call; shapes and dtypes as of `FusedMoEKernel.apply`.

    Ids of -1 are experts of other ranks to it, and add nothing.
    """
    x, weights = flashinfer_common.weighted(prepared.problem, x, weights)
    return {
        **flashinfer_common.kept(prepared, NAME, layer_arguments),
        "input": flashinfer_common.widened(x, flashinfer_common.sizes_of(prepared).padded_hidden),
        "token_selected_experts": ids.contiguous(),
        "token_final_scales": weights.contiguous(),
    }


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    hidden = prepared.problem.dims.hidden
    with flashinfer_common.choosing_tactics(prepared, NAME, len(x)):
        return flashinfer_common.call(NAME, "cutlass_fused_moe", arguments(prepared, x, ids, weights), hidden)


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    kernel = kernel_for(problem)
    if device.type != "cuda":
        return f"it needs a CUDA GPU, the weights are on {device.type}"
    if torch.cuda.get_device_capability(device) != CAPABILITY:
        return "it needs compute capability 9.0"
    return flashinfer_common.no_kernel(CUTLASS, problem) if kernel is None else refusal(kernel, problem)


RUNNER = Runner(
    NAME,
    layout,
    _compute,
    _refusal,
    accumulation=DECLARED,
    ready=lambda prepared: flashinfer_common.kept(prepared, NAME, layer_arguments),
    tactic=flashinfer_common.tactic,
)

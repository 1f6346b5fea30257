"""The flashinfer_cutlass backend: FlashInfer's CUTLASS fused MoE on SM90.

Supports MXFP4 weights with BF16 tokens, BF16, and FP8 in blocks of 128, for which the kernel quantizes the
tokens itself. Weights are in the layouts ``cutlass-sm90``, ``cutlass-bf16`` and ``cutlass-fp8-block``, with
up before gate. Unless they are cached, FlashInfer compiles its kernels in the first call, which takes
minutes. Its tuner times the tactics in a layer's first call of each power of two of tokens.
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
    """The row of `CUTLASS` for a problem, or None."""
    return kernel_of(CUTLASS, problem.scheme.weight, problem.scheme.act)


def layout(problem: MoEProblem) -> str:
    """The layout of a problem's weights; for unsupported formats, which are rejected later, any layout."""
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
"""Builds the arguments for weights and scales, by layout."""


def layer_arguments(prepared: PreparedMoE) -> Arguments:
    """Arguments of ``cutlass_fused_moe`` that are the same in every call of a layer."""
    problem, weights = prepared.problem, prepared.weights
    activation = function_of(problem.activation)
    parameters = flashinfer_common.activation_parameters(problem, prepared.device)
    # SiTU's counterparts of SwiGLU's alpha and beta are separate arguments.
    names = ("situ_beta", "situ_linear_beta") if activation and activation.member == "Situ" else _SWIGLU
    by_argument = dict(zip((*names, *_SWIGLU[len(names) :]), parameters.values(), strict=True))
    return {
        **WEIGHTS[prepared.layout](weights),
        "fc1_expert_biases": weights.get("w13_bias"),
        "fc2_expert_biases": weights.get("w2_bias"),
        "output_dtype": MODEL_TORCH_DTYPES[problem.dtype],
        "activation_type": flashinfer_common.activation_member(problem),
        **by_argument,
        # Summing over a token's experts in the second GEMM's epilogue is not deterministic.
        "use_fused_finalize": False,
    }


_SWIGLU = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")


def arguments(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Arguments:
    """Arguments of ``cutlass_fused_moe`` for one call; shapes and dtypes as in `FusedMoEKernel.apply`.

    It treats ids of -1 as experts of other ranks, which contribute nothing.
    """
    x, weights = flashinfer_common.apply_input_weights(prepared.problem, x, weights)
    return {
        **prepared.derive(NAME, layer_arguments),
        "input": flashinfer_common.pad_columns(x, flashinfer_common.padded_dims(prepared).padded_hidden),
        "token_selected_experts": ids.contiguous(),
        "token_final_scales": weights.contiguous(),
    }


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    hidden = prepared.problem.dims.hidden
    with flashinfer_common.autotuned(prepared, NAME, len(x)):
        return flashinfer_common.call(NAME, "cutlass_fused_moe", arguments(prepared, x, ids, weights), hidden)


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    kernel = kernel_for(problem)
    if device.type != "cuda":
        return f"it needs a CUDA GPU; the weights are on {device.type}"
    if torch.cuda.get_device_capability(device) != CAPABILITY:
        return "it needs compute capability 9.0"
    return flashinfer_common.formats_refusal(CUTLASS, problem) if kernel is None else refusal(kernel, problem)


RUNNER = Runner(
    NAME,
    layout,
    _compute,
    _refusal,
    accumulation=DECLARED,
    ready=lambda prepared: prepared.derive(NAME, layer_arguments),
    tactic=flashinfer_common.tactic,
)

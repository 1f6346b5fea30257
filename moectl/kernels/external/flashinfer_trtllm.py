"""FlashInfer's TRT-LLM kernels on SM10x: MXFP4, NVFP4, MXINT4, FP8, MXFP8 and BF16.

Each in two forms: with expert ids and weights, and with router logits, which the kernel routes by itself.
Weights as the ``trtllm-*`` layouts store them. Sizes are the padded ones throughout; the output's padded
columns are cut off, so that nothing depends on what a kernel leaves in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...capabilities.flashinfer import TRTLLM, FlashInferKernel, function_of, kernel_of, method_of, refusal
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import A16, MXFP4, MXFP8_ACT, ActFormat
from ..prepared_layer import PreparedMoE
from ..quantize_tokens import QuantizedTokens
from ..runner import LIBRARY, Runner, chosen_by
from ..tolerance import DECLARED
from . import flashinfer_common
from .flashinfer_common import Arguments

E4M3 = torch.float8_e4m3fn
MAJOR = 10

FP8_TOKENS_FOR_MXFP4 = "flashinfer_trtllm_afp8"
"""Prefix of the runners that compute MXFP4 weights with MXFP8 tokens whatever the checkpoint declares."""


def kernel_for(problem: MoEProblem, backend: str) -> FlashInferKernel | None:
    """The row of `TRTLLM` with which `backend` computes a problem; None when there is none."""
    scheme = problem.scheme
    if not backend.startswith(FP8_TOKENS_FOR_MXFP4):
        return kernel_of(TRTLLM, scheme.weight, scheme.act)
    if scheme.weight != MXFP4 or scheme.act not in (A16, MXFP8_ACT):
        return None
    return kernel_of(TRTLLM, MXFP4, MXFP8_ACT)


def _kernel(problem: MoEProblem, backend: str) -> FlashInferKernel:
    """`kernel_for`, and any other row for formats that are refused anyway."""
    return kernel_for(problem, backend) or TRTLLM[0]


def input_scale(prepared: PreparedMoE) -> Tensor | None:
    """The layer's one scale of incoming tokens, ``[1]`` fp32; None where scales are made at run time."""
    scale = prepared.weights.get("w13_input")
    return None if scale is None else scale.flatten()[:1]


def _numbers(prepared: PreparedMoE, accumulated: Tensor | None = None) -> Arguments:
    """alpha, beta and limit as arguments; `accumulated` is what one unit of a kernel's raw sums is worth.

    The limit and SwiGLU's beta meet raw sums, before their scale; all else is in real numbers.
    """
    found = function_of(prepared.problem.activation)
    numbers = flashinfer_common.activation_numbers(prepared.problem, prepared.device)
    if accumulated is not None and found is not None and found.member != "Situ":
        for name in ("beta", "limit"):
            number = numbers[name]
            numbers[name] = None if number is None else number / accumulated
    return {
        "gemm1_alpha": numbers["alpha"],
        "gemm1_beta": numbers["beta"],
        "gemm1_clamp_limit": numbers["limit"],
    }


def _output_scales(prepared: PreparedMoE, weight: str, names: tuple[str, str, str]) -> Arguments:
    """What raw sums of both GEMMs are multiplied by: ``[local_experts]`` fp32 each.

    `weight` ends the role of the weights' scale; `names` are the arguments for the first GEMM's output, its
    gate and the second GEMM's output. Without a gate to multiply, or with a function that is no product of
    its up, only the requantization of the activations is left in the first.
    """
    weights, problem = prepared.weights, prepared.problem
    first_in, second_in = (weights[f"{role}_input"].flatten()[:1].float() for role in ("w13", "w2"))
    gate = weights[f"w13_{weight}"].float() * first_in
    found = function_of(problem.activation)
    product = problem.activation.gated and found is not None and found.member != "Situ"
    first = gate / second_in if product else torch.ones_like(gate) / second_in
    second = weights[f"w2_{weight}"].float() * second_in
    return dict(zip(names, (first.contiguous(), gate.contiguous(), second.contiguous()), strict=True))


_FP4_SCALARS = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
_FP8_SCALARS = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")


def _fp4_weights(prepared: PreparedMoE) -> Arguments:
    weights = prepared.weights
    return {
        "gemm1_weights": weights["w13"],
        "gemm1_weights_scale": weights["w13_scale"].view(E4M3),
        "gemm1_bias": weights.get("w13_bias"),
        "gemm2_weights": weights["w2"],
        "gemm2_weights_scale": weights["w2_scale"].view(E4M3),
        "gemm2_bias": weights.get("w2_bias"),
        "activation_type": int(flashinfer_common.activation_member(prepared.problem)),
    }


def _mxfp4(prepared: PreparedMoE) -> Arguments:
    return {**_fp4_weights(prepared), **_numbers(prepared), **dict.fromkeys(_FP4_SCALARS)}


def _nvfp4(prepared: PreparedMoE) -> Arguments:
    scales = _output_scales(prepared, "global", _FP4_SCALARS)
    return {**_fp4_weights(prepared), **_numbers(prepared, scales[_FP4_SCALARS[1]]), **scales}


def _mxint4(prepared: PreparedMoE) -> Arguments:
    weights, sizes = prepared.weights, flashinfer_common.sizes_of(prepared)
    blocks = {"w13": sizes.padded_hidden // 32, "w2": sizes.padded_intermediate // 32}
    scales = {role: weights[f"{role}_scale"].reshape(len(weights[role]), -1, n) for role, n in blocks.items()}
    return {
        "gemm1_weights": weights["w13"],
        "gemm1_weights_scale": scales["w13"],
        "gemm2_weights": weights["w2"],
        "gemm2_weights_scale": scales["w2"],
        **_numbers(prepared),
    }


def _fp8_blocks(layout: str, kind: str) -> Callable[[PreparedMoE], Arguments]:
    def make(prepared: PreparedMoE) -> Arguments:
        weights = prepared.weights
        return {
            "gemm1_weights": weights["w13"].view(E4M3),
            "gemm1_weights_scale": weights["w13_scale"],
            "gemm2_weights": weights["w2"].view(E4M3),
            "gemm2_weights_scale": weights["w2_scale"],
            "use_shuffled_weight": True,
            "weight_layout": int(flashinfer_common.member("WeightLayout", layout)),
            "fp8_quantization_type": flashinfer_common.member("Fp8QuantizationType", kind),
            "activation_type": int(flashinfer_common.activation_member(prepared.problem)),
            **_numbers(prepared),
        }

    return make


def _fp8_tensor(prepared: PreparedMoE) -> Arguments:
    weights, scales = prepared.weights, _output_scales(prepared, "scale", _FP8_SCALARS)
    return {
        "gemm1_weights": weights["w13"].view(E4M3),
        "gemm2_weights": weights["w2"].view(E4M3),
        "activation_type": int(flashinfer_common.activation_member(prepared.problem)),
        "gemm1_clamp_limit": _numbers(prepared, scales[_FP8_SCALARS[1]])["gemm1_clamp_limit"],
        **scales,
    }


def _bf16(prepared: PreparedMoE) -> Arguments:
    return {
        "gemm1_weights": prepared.weights["w13"],
        "gemm2_weights": prepared.weights["w2"],
        "use_shuffled_weight": True,
        "weight_layout": int(flashinfer_common.member("WeightLayout", "BlockMajorK")),
        "activation_type": int(flashinfer_common.activation_member(prepared.problem)),
        **_numbers(prepared),
    }


WEIGHTS: Mapping[str, Callable[[PreparedMoE], Arguments]] = {
    "trtllm-mxfp4": _mxfp4,
    "trtllm-nvfp4": _nvfp4,
    "trtllm-mxint4": _mxint4,
    "trtllm-fp8-block": _fp8_blocks("BlockMajorK", "DeepSeekFp8"),
    "trtllm-mxfp8": _fp8_blocks("MajorK", "MxFp8"),
    "trtllm-fp8-tensor": _fp8_tensor,
    "trtllm-bf16": _bf16,
}
"""Arguments that follow from a layer's weights and activation function, by the layout's name."""


def _linear_scales(tokens: QuantizedTokens, columns: int) -> Arguments:
    block = tokens.format.block[1]
    return {
        "hidden_states_scale": flashinfer_common.widened(tokens.scales, columns // block).view(E4M3),
        "hidden_states_scale_layout": flashinfer_common.member("SfLayout", "layout_linear"),
    }


SCALES: Mapping[str, Callable[[QuantizedTokens, int], Arguments]] = {
    "trtllm-mxfp4": _linear_scales,
    "trtllm-nvfp4": _linear_scales,
    "trtllm-fp8-block": lambda tokens, columns: {"hidden_states_scale": tokens.scales.t().contiguous()},
    "trtllm-mxfp8": lambda tokens, columns: {
        "hidden_states_scale": flashinfer_common.widened(tokens.scales, columns // 32)
    },
    "trtllm-fp8-tensor": lambda tokens, columns: {},
}
"""The scales of quantized tokens as arguments, by the layout's name and the padded hidden size."""

UNSCALED: Mapping[str, Arguments] = {"trtllm-mxfp4": {"hidden_states_scale": None}}
"""What is said of 16-bit tokens where the function takes both kinds."""


def token_arguments(prepared: PreparedMoE, x: Tensor | QuantizedTokens) -> Arguments:
    """Tokens, as wide as the weights, and their scales."""
    columns = flashinfer_common.sizes_of(prepared).padded_hidden
    if isinstance(x, Tensor):
        return {"hidden_states": flashinfer_common.widened(x, columns), **UNSCALED.get(prepared.layout, {})}
    packed = columns * x.format.bits // 8
    return {
        "hidden_states": flashinfer_common.widened(x.values, packed),
        **SCALES[prepared.layout](x, columns),
    }


def _shape_arguments(prepared: PreparedMoE) -> Arguments:
    problem = prepared.problem
    return {
        "num_experts": problem.experts,
        "top_k": problem.top_k,
        "intermediate_size": flashinfer_common.sizes_of(prepared).padded_intermediate,
        "local_expert_offset": prepared.first_expert,
        "local_num_experts": problem.local_experts,
    }


def _layer_arguments(prepared: PreparedMoE) -> Arguments:
    return {**_shape_arguments(prepared), **WEIGHTS[prepared.layout](prepared)}


def packed(ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, top_k]`` int32: the id in the upper half, the weight as BF16 in the lower one."""
    return (ids << 16) | (weights.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF)


NO_BIAS_ARGUMENT = frozenset(("trtllm-mxint4", "trtllm-bf16"))
"""Layouts whose function for expert ids has no argument for a routing bias."""

PACKED_IDS = frozenset(("trtllm-mxint4",))
"""Layouts whose function takes ids and weights in one tensor only."""


def _weighed(prepared: PreparedMoE, on_input: bool) -> Arguments:
    """Whether the kernel multiplies tokens by the router's weights, where it can."""
    kernel = kernel_of(TRTLLM, prepared.problem.scheme.weight, prepared.problem.scheme.act)
    return {"use_routing_scales_on_input": on_input} if kernel and kernel.weight_on_input else {}


def routed_arguments(
    prepared: PreparedMoE, x: Tensor | QuantizedTokens, ids: Tensor, weights: Tensor
) -> Arguments:
    """Arguments of the function for expert ids and weights; `ids` are counted from the first expert here.

    Ids of no expert here become -1, which the kernels skip.
    """
    local = prepared.problem.local_experts
    if isinstance(x, Tensor):
        x, weights = flashinfer_common.weighted(prepared.problem, x, weights)
    here = (ids >= 0) & (ids < local)
    ids, weights = torch.where(here, ids + prepared.first_expert, -1).int(), weights.contiguous()
    return {
        **flashinfer_common.kept(prepared, "flashinfer_trtllm", _layer_arguments),
        **token_arguments(prepared, x),
        **_weighed(prepared, False),
        "topk_ids": packed(ids, weights) if prepared.layout in PACKED_IDS else (ids, weights),
        **({} if prepared.layout in NO_BIAS_ARGUMENT else {"routing_bias": None}),
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": None,
        "routing_method_type": int(flashinfer_common.member("RoutingMethodType", "Renormalize")),
    }


def logits_arguments(
    prepared: PreparedMoE, x: Tensor | QuantizedTokens, logits: Tensor, correction_bias: Tensor | None
) -> Arguments:
    """Arguments of the function for router logits ``[tokens, experts]`` and a bias ``[experts]`` or None."""
    routing = prepared.problem.routing
    method = method_of(routing)
    assert method is not None, "refused before"
    grouped = bool(routing.groups and routing.groups > 1)
    return {
        **flashinfer_common.kept(prepared, "flashinfer_trtllm", _layer_arguments),
        **token_arguments(prepared, x),
        **_weighed(prepared, routing.weight_on_input),
        "routing_logits": logits.float().contiguous(),
        "routing_bias": None if correction_bias is None else correction_bias.float().contiguous(),
        "n_group": routing.groups if grouped else None,
        "topk_group": routing.topk_groups if grouped else None,
        "routed_scaling_factor": routing.scale if method.scales else None,
        "routing_method_type": int(flashinfer_common.member("RoutingMethodType", method.member)),
        "norm_topk_prob": method.normalizes,
    }


def _refusal(backend: str, logits: bool) -> Callable[[MoEProblem, torch.device], str]:
    def why(problem: MoEProblem, device: torch.device) -> str:
        if device.type != "cuda":
            return f"it needs a CUDA GPU, the weights are on {device.type}"
        if torch.cuda.get_device_capability(device)[0] != MAJOR:
            return "it needs compute capability 10.x"
        return cannot(problem, backend, logits)

    return why


def cannot(problem: MoEProblem, backend: str, logits: bool) -> str:
    """Why `backend` cannot compute `problem` on the device that it is for, a clause; empty when it can."""
    kernel = kernel_for(problem, backend)
    if kernel is None:
        return flashinfer_common.no_kernel(TRTLLM, problem)
    return refusal(kernel, problem, logits=logits)


def _modular(backend: str) -> Runner:
    def compute(prepared: PreparedMoE, x: Tensor | QuantizedTokens, ids: Tensor, weights: Tensor) -> Tensor:
        arguments = routed_arguments(prepared, x, ids, weights)
        name = _kernel(prepared.problem, backend).routed
        return flashinfer_common.call(backend, name, arguments, prepared.problem.dims.hidden)

    return replace(_RUNNER, name=backend, compute=compute, **_common(backend, logits=False))


def _monolithic(backend: str) -> Runner:
    def compute(
        prepared: PreparedMoE, x: Tensor | QuantizedTokens, logits: Tensor, correction_bias: Tensor | None
    ) -> Tensor:
        arguments = logits_arguments(prepared, x, logits, correction_bias)
        name = _kernel(prepared.problem, backend).logits
        return flashinfer_common.call(backend, name, arguments, prepared.problem.dims.hidden)

    return replace(_RUNNER, name=backend, monolithic=compute, **_common(backend, logits=True))


def _common(backend: str, logits: bool) -> Arguments:
    def wanted(problem: MoEProblem) -> ActFormat:
        return _kernel(problem, backend).act

    own = backend.startswith(FP8_TOKENS_FOR_MXFP4)
    return {
        "accumulation": MXFP8_ACT.name if own else DECLARED,
        "layout": lambda problem: _kernel(problem, backend).layout,
        "refusal": _refusal(backend, logits),
        "tactic": chosen_by(LIBRARY),
        "wants": wanted,
        "input_scale": input_scale,
    }


_RUNNER = Runner(
    "",
    None,
    None,
    lambda problem, device: "",
    ready=lambda prepared: flashinfer_common.kept(prepared, "flashinfer_trtllm", _layer_arguments),
)

RUNNER = _modular("flashinfer_trtllm")
MONOLITHIC = _monolithic("flashinfer_trtllm_monolithic")
FP8 = _modular(FP8_TOKENS_FOR_MXFP4)
FP8_MONOLITHIC = _monolithic(f"{FP8_TOKENS_FOR_MXFP4}_monolithic")
"""The four backends: with the tokens that the checkpoint declares, and MXFP4 weights with MXFP8 tokens."""

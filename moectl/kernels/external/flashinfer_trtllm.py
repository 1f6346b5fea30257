"""FlashInfer's TRT-LLM kernels on SM10x: MXFP4, NVFP4, MXINT4, FP8, MXFP8 and BF16.

Each kernel takes either expert ids and weights, or router logits, and then does the routing itself. Weights
are in the ``trtllm-*`` layouts. Kernels get padded sizes throughout; padded columns of the output, whose
contents are undefined, are cut off.
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
"""Prefix of the runners that use MXFP8 tokens with MXFP4 weights, whatever the checkpoint declares."""


def kernel_for(problem: MoEProblem, backend: str) -> FlashInferKernel | None:
    """The row of `TRTLLM` that `backend` uses for a problem, or None."""
    scheme = problem.scheme
    if not backend.startswith(FP8_TOKENS_FOR_MXFP4):
        return kernel_of(TRTLLM, scheme.weight, scheme.act)
    if scheme.weight != MXFP4 or scheme.act not in (A16, MXFP8_ACT):
        return None
    return kernel_of(TRTLLM, MXFP4, MXFP8_ACT)


def _kernel(problem: MoEProblem, backend: str) -> FlashInferKernel:
    """`kernel_for`; any row for unsupported formats, which are rejected later."""
    return kernel_for(problem, backend) or TRTLLM[0]


def input_scale(prepared: PreparedMoE) -> Tensor | None:
    """The layer's static scale for incoming tokens, ``[1]`` fp32; None for scales computed at run time."""
    scale = prepared.weights.get("w13_input")
    return None if scale is None else scale.flatten()[:1]


def _activation_arguments(prepared: PreparedMoE, dequant_scale: Tensor | None = None) -> Arguments:
    """alpha, beta and limit as arguments.

    With a `dequant_scale` the kernel applies the limit and SwiGLU's beta to its unscaled accumulators, so
    both are divided by that scale.
    """
    activation = function_of(prepared.problem.activation)
    parameters = flashinfer_common.activation_parameters(prepared.problem, prepared.device)
    if dequant_scale is not None and activation is not None and activation.member != "Situ":
        for name in ("beta", "limit"):
            parameter = parameters[name]
            parameters[name] = None if parameter is None else parameter / dequant_scale
    return {
        "gemm1_alpha": parameters["alpha"],
        "gemm1_beta": parameters["beta"],
        "gemm1_clamp_limit": parameters["limit"],
    }


def _output_scales(prepared: PreparedMoE, weight: str, names: tuple[str, str, str]) -> Arguments:
    """Scales of the accumulators of both GEMMs, ``[local_experts]`` fp32 each.

    `weight` is the suffix of the weight scales' roles; `names` are the arguments for the first GEMM's output,
    its gate and the second GEMM's output. For ungated experts, and for functions that are not a product with
    up, the first scale only requantizes the activations.
    """
    weights, problem = prepared.weights, prepared.problem
    w13_input, w2_input = (weights[f"{role}_input"].flatten()[:1].float() for role in ("w13", "w2"))
    gate = weights[f"w13_{weight}"].float() * w13_input
    activation = function_of(problem.activation)
    is_product = problem.activation.gated and activation is not None and activation.member != "Situ"
    first = gate / w2_input if is_product else torch.ones_like(gate) / w2_input
    second = weights[f"w2_{weight}"].float() * w2_input
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
    return {**_fp4_weights(prepared), **_activation_arguments(prepared), **dict.fromkeys(_FP4_SCALARS)}


def _nvfp4(prepared: PreparedMoE) -> Arguments:
    scales = _output_scales(prepared, "global", _FP4_SCALARS)
    return {**_fp4_weights(prepared), **_activation_arguments(prepared, scales[_FP4_SCALARS[1]]), **scales}


def _mxint4(prepared: PreparedMoE) -> Arguments:
    weights, dims = prepared.weights, flashinfer_common.padded_dims(prepared)
    blocks = {"w13": dims.padded_hidden // 32, "w2": dims.padded_intermediate // 32}
    scales = {role: weights[f"{role}_scale"].reshape(len(weights[role]), -1, n) for role, n in blocks.items()}
    return {
        "gemm1_weights": weights["w13"],
        "gemm1_weights_scale": scales["w13"],
        "gemm2_weights": weights["w2"],
        "gemm2_weights_scale": scales["w2"],
        **_activation_arguments(prepared),
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
            **_activation_arguments(prepared),
        }

    return make


def _fp8_tensor(prepared: PreparedMoE) -> Arguments:
    weights, scales = prepared.weights, _output_scales(prepared, "scale", _FP8_SCALARS)
    return {
        "gemm1_weights": weights["w13"].view(E4M3),
        "gemm2_weights": weights["w2"].view(E4M3),
        "activation_type": int(flashinfer_common.activation_member(prepared.problem)),
        "gemm1_clamp_limit": _activation_arguments(prepared, scales[_FP8_SCALARS[1]])["gemm1_clamp_limit"],
        **scales,
    }


def _bf16(prepared: PreparedMoE) -> Arguments:
    return {
        "gemm1_weights": prepared.weights["w13"],
        "gemm2_weights": prepared.weights["w2"],
        "use_shuffled_weight": True,
        "weight_layout": int(flashinfer_common.member("WeightLayout", "BlockMajorK")),
        "activation_type": int(flashinfer_common.activation_member(prepared.problem)),
        **_activation_arguments(prepared),
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
"""Builds the arguments for a layer's weights and activation function, by layout."""


def _linear_scales(tokens: QuantizedTokens, columns: int) -> Arguments:
    block = tokens.format.block[1]
    return {
        "hidden_states_scale": flashinfer_common.pad_columns(tokens.scales, columns // block).view(E4M3),
        "hidden_states_scale_layout": flashinfer_common.member("SfLayout", "layout_linear"),
    }


SCALES: Mapping[str, Callable[[QuantizedTokens, int], Arguments]] = {
    "trtllm-mxfp4": _linear_scales,
    "trtllm-nvfp4": _linear_scales,
    "trtllm-fp8-block": lambda tokens, columns: {"hidden_states_scale": tokens.scales.t().contiguous()},
    "trtllm-mxfp8": lambda tokens, columns: {
        "hidden_states_scale": flashinfer_common.pad_columns(tokens.scales, columns // 32)
    },
    "trtllm-fp8-tensor": lambda tokens, columns: {},
}
"""Builds the arguments for the scales of quantized tokens from the padded hidden size, by layout."""

UNSCALED: Mapping[str, Arguments] = {"trtllm-mxfp4": {"hidden_states_scale": None}}
"""Arguments for 16-bit tokens, of functions that also take quantized ones."""


def token_arguments(prepared: PreparedMoE, x: Tensor | QuantizedTokens) -> Arguments:
    """Tokens, padded to the weights' hidden size, and their scales."""
    columns = flashinfer_common.padded_dims(prepared).padded_hidden
    if isinstance(x, Tensor):
        return {
            "hidden_states": flashinfer_common.pad_columns(x, columns),
            **UNSCALED.get(prepared.layout, {}),
        }
    row_bytes = columns * x.format.bits // 8
    return {
        "hidden_states": flashinfer_common.pad_columns(x.values, row_bytes),
        **SCALES[prepared.layout](x, columns),
    }


def _shape_arguments(prepared: PreparedMoE) -> Arguments:
    problem = prepared.problem
    return {
        "num_experts": problem.experts,
        "top_k": problem.top_k,
        "intermediate_size": flashinfer_common.padded_dims(prepared).padded_intermediate,
        "local_expert_offset": prepared.first_expert,
        "local_num_experts": problem.local_experts,
    }


def _layer_arguments(prepared: PreparedMoE) -> Arguments:
    return {**_shape_arguments(prepared), **WEIGHTS[prepared.layout](prepared)}


def pack_topk(ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, top_k]`` int32: ids in the upper halves, weights as BF16 in the lower halves."""
    return (ids << 16) | (weights.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF)


NO_BIAS_ARGUMENT = frozenset(("trtllm-mxint4", "trtllm-bf16"))
"""Layouts whose function for expert ids has no ``routing_bias`` argument."""

PACKED_IDS = frozenset(("trtllm-mxint4",))
"""Layouts whose function takes ids and weights only as one tensor (`pack_topk`)."""


def _input_weight_arguments(prepared: PreparedMoE, on_input: bool) -> Arguments:
    """Whether the kernel multiplies tokens by the router's weights; empty for kernels without the option."""
    kernel = kernel_of(TRTLLM, prepared.problem.scheme.weight, prepared.problem.scheme.act)
    return {"use_routing_scales_on_input": on_input} if kernel and kernel.weight_on_input else {}


def routed_arguments(
    prepared: PreparedMoE, x: Tensor | QuantizedTokens, ids: Tensor, weights: Tensor
) -> Arguments:
    """Arguments of the function for local expert `ids` and weights.

    Ids outside the local experts become -1, which the kernels skip.
    """
    local = prepared.problem.local_experts
    if isinstance(x, Tensor):
        x, weights = flashinfer_common.apply_input_weights(prepared.problem, x, weights)
    is_local = (ids >= 0) & (ids < local)
    ids, weights = torch.where(is_local, ids + prepared.first_expert, -1).int(), weights.contiguous()
    return {
        **prepared.derive("flashinfer_trtllm", _layer_arguments),
        **token_arguments(prepared, x),
        **_input_weight_arguments(prepared, False),
        "topk_ids": pack_topk(ids, weights) if prepared.layout in PACKED_IDS else (ids, weights),
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
    assert method is not None, "rejected before"
    grouped = bool(routing.groups and routing.groups > 1)
    return {
        **prepared.derive("flashinfer_trtllm", _layer_arguments),
        **token_arguments(prepared, x),
        **_input_weight_arguments(prepared, routing.weight_on_input),
        "routing_logits": logits.float().contiguous(),
        "routing_bias": None if correction_bias is None else correction_bias.float().contiguous(),
        "n_group": routing.groups if grouped else None,
        "topk_group": routing.topk_groups if grouped else None,
        "routed_scaling_factor": routing.scale if method.scales else None,
        "routing_method_type": int(flashinfer_common.member("RoutingMethodType", method.member)),
        "norm_topk_prob": method.normalizes,
    }


def _refusal(backend: str, logits: bool) -> Callable[[MoEProblem, torch.device], str]:
    def reason(problem: MoEProblem, device: torch.device) -> str:
        if device.type != "cuda":
            return f"it needs a CUDA GPU; the weights are on {device.type}"
        if torch.cuda.get_device_capability(device)[0] != MAJOR:
            return "it needs compute capability 10.x"
        return problem_refusal(problem, backend, logits)

    return reason


def problem_refusal(problem: MoEProblem, backend: str, logits: bool) -> str:
    """Why `backend` does not support `problem` on SM10x, as a clause; empty if it does."""
    kernel = kernel_for(problem, backend)
    if kernel is None:
        return flashinfer_common.formats_refusal(TRTLLM, problem)
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
    def act_format(problem: MoEProblem) -> ActFormat:
        return _kernel(problem, backend).act

    fp8_tokens = backend.startswith(FP8_TOKENS_FOR_MXFP4)
    return {
        "accumulation": MXFP8_ACT.name if fp8_tokens else DECLARED,
        "layout": lambda problem: _kernel(problem, backend).layout,
        "refusal": _refusal(backend, logits),
        "tactic": chosen_by(LIBRARY),
        "wants": act_format,
        "input_scale": input_scale,
    }


_RUNNER = Runner(
    "",
    None,
    None,
    lambda problem, device: "",
    ready=lambda prepared: prepared.derive("flashinfer_trtllm", _layer_arguments),
    keeps="numbers",
)

RUNNER = _modular("flashinfer_trtllm")
MONOLITHIC = _monolithic("flashinfer_trtllm_monolithic")
FP8 = _modular(FP8_TOKENS_FOR_MXFP4)
FP8_MONOLITHIC = _monolithic(f"{FP8_TOKENS_FOR_MXFP4}_monolithic")
"""The four backends: two with the checkpoint's activation format, two that always use MXFP8 tokens."""

"""Number formats in Humming's terms: schemas, canonical tensors under its names, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...capabilities.external_kernels import HUMMING
from ...dtypes import DTYPES, MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import A16, FP8_BLOCK, FULL, ActFormat
from ...torch_dtypes import MODEL_TORCH_DTYPES
from ..tolerance import DECLARED
from .gemm_glue import ACT_ORDER_REFUSAL, INPUT_WEIGHT_REFUSAL, scale_refusal
from .grouped_formats import formats_refusal

B_DTYPES: Mapping[str, str] = {
    "int4": "uint4",
    "int8": "uint8",
    "mxfp4": "float4e2m1",
    "nvfp4": "float4e2m1",
    "mxfp8": "float8e4m3",
    "fp8": "float8e4m3",
}
"""Its dtype of the codes, by weight format. Integers without zero points are offset by half their range."""

A_DTYPES: Mapping[str, tuple[str, torch.dtype]] = {
    "fp8": ("float8e4m3", torch.float8_e4m3fn),
    "int8": ("int8", torch.int8),
}
"""Its dtype of quantized tokens, and torch's, by activation format."""

SCALE_DTYPES: Mapping[str, tuple[str, torch.dtype]] = {
    "mxfp4": ("float8e8m0", torch.float8_e8m0fnu),
    "mxfp8": ("float8e8m0", torch.float8_e8m0fnu),
    "nvfp4": ("float8e4m3", torch.float8_e4m3fn),
}
"""Its dtype of scales that are bytes, and torch's, by weight format."""


def tokens_of(problem: MoEProblem) -> ActFormat:
    """The format in which tokens enter the GEMMs: the declared one if there are such kernels, else 16-bit."""
    row = HUMMING.row_for(problem.scheme)
    return problem.scheme.act if row is not None and problem.scheme.act in row.acts else A16


def accumulation(problem: MoEProblem) -> str:
    """The row of the tolerance table: that of the tokens' format, or of 16-bit ones with rounded steps."""
    return DECLARED if tokens_of(problem).bits < 16 else "steps"


def in_blocks(problem: MoEProblem) -> bool:
    """Whether it takes a scale for each block of rows and columns, which it does with FP8 tokens."""
    return problem.scheme.weight == FP8_BLOCK and tokens_of(problem).bits == 8


def schema_arguments(problem: MoEProblem) -> dict[str, Any]:
    """Keyword arguments of ``HummingWeightSchema`` for the layer's weight format."""
    weight, model_dtype = problem.scheme.weight, DTYPES[MODEL_DTYPES[problem.dtype]].torch
    stated, _ = SCALE_DTYPES.get(weight.name, (model_dtype, None))
    arguments = {
        "b_dtype": B_DTYPES[weight.name],
        "bs_dtype": stated,
        "weight_scale_group_size": 0 if weight.group == FULL else weight.group,
        "has_zero_point": weight.zero_point,
    }
    if in_blocks(problem):
        rows, _ = weight.block
        arguments |= {
            "bs_dtype": "float32",
            "weight_scale_group_size_n": rows,
            "weight_scale_type": "block",
        }
    elif weight.name == "nvfp4":
        arguments |= {"weight_scale_2_type": "tensor"}
    return arguments


def input_arguments(problem: MoEProblem) -> dict[str, Any]:
    """Keyword arguments of ``HummingInputSchema`` for quantized tokens; empty for 16-bit ones."""
    act = tokens_of(problem)
    if act.bits == 16:
        return {}
    whole = act.block[1] == FULL
    return {
        "a_dtype": A_DTYPES[act.name][0],
        "input_scale_group_size": 0 if whole else act.block[1],
        "input_scale_dtype": "float32",
        "input_quant_mode": "dynamic_token" if whole else "dynamic_group",
    }


def source_tensors(problem: MoEProblem, roles: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    """Canonical tensors of some experts, under Humming's names.

    Codes are viewed as int32 along columns; an int32 packs the zero points of 32 / bits consecutive rows.
    Scales are bytes as they are, fp32 for blocks, and otherwise of the model's dtype.
    """
    weight, scales = problem.scheme.weight, roles[f"{role}_scale"]
    if weight.name in SCALE_DTYPES:
        scales = scales.view(SCALE_DTYPES[weight.name][1])
    elif weight.name == "fp8":
        scales = scales.float() if in_blocks(problem) else scales.to(MODEL_TORCH_DTYPES[problem.dtype])
    tensors = {"weight": roles[role].contiguous().view(torch.int32), "weight_scale": scales}
    if weight.zero_point:
        tensors["zero_point"] = pack_zeros(roles[f"{role}_zero"], weight.bits)
    if problem.bias:
        tensors["bias"] = roles[f"{role}_bias"]
    return tensors


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Zero points ``[e, n, groups]`` uint8 as ``[e, n * bits / 32, groups]`` int32, the first row lowest."""
    e, n, groups = zeros.shape
    per_word = 32 // bits
    values = zeros.view(e, n // per_word, per_word, groups).long()
    shifts = torch.arange(0, 32, bits, device=zeros.device).view(1, 1, per_word, 1)
    words = (values << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


FUSED = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}
"""SiLU of gates before ups, in the kernel that quantizes."""


def fused_activation(problem: MoEProblem) -> dict[str, str]:
    """Arguments for a quantization that applies the activation, too; empty if it comes before."""
    act = problem.activation
    plain = act.name == "silu" and act.gated and act.limit is None
    return FUSED if plain and problem.rows == "concatenated" else {}


BEFORE_SM100 = frozenset(("fp8", "mxfp8", "nvfp4"))
"""Weight formats whose layouts here are those of GPUs before SM100."""


def problem_refusal(problem: MoEProblem) -> str:
    """Why Humming does not support `problem` on any GPU, as a clause; empty if it does."""
    weight, row = problem.scheme.weight, HUMMING.row_for(problem.scheme)
    if not any(known.name == weight.name for known in HUMMING.formats):
        return f"it supports {', '.join(HUMMING.names)} weights; the layer has {weight}"
    if not HUMMING.reads(weight):
        known = dict.fromkeys(str(form) for form in HUMMING.formats if form.name == weight.name)
        return f"it supports {', '.join(known)} weights; the layer has {weight}"
    if row is None or problem.dtype not in row.dtypes:
        return formats_refusal(HUMMING, problem)
    if problem.act_order == "group":
        return ACT_ORDER_REFUSAL
    if problem.routing.weight_on_input and not HUMMING.weight_on_input:
        return INPUT_WEIGHT_REFUSAL
    multiple = FP8_BLOCK.block[1] if weight == FP8_BLOCK else HUMMING.multiple
    for name, size in (("hidden", problem.dims.hidden), ("intermediate", problem.dims.intermediate)):
        if size % multiple:
            return (
                f"its packed weights need sizes that are multiples of {multiple}; the layer's {name} "
                f"size is {size}"
            )
    reason = "" if row.own_scales else scale_refusal(problem)
    return reason or HUMMING.activation_refusal(problem.activation)


def grouped_refusal(problem: MoEProblem) -> str:
    """Why the grouped GEMMs do not support `problem` on any GPU, as a clause; empty if they do."""
    reason, act = problem_refusal(problem), tokens_of(problem)
    if reason or act.bits == 16:
        return reason
    if act.name != "fp8":
        return f"its rows are quantized to FP8 only; the layer has {act.name} tokens"
    if problem.rows == "interleaved" and problem.activation.gated:
        return "with FP8 tokens it needs gates before ups; the layer's rows alternate"
    return ""


def gpu_refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why a GPU has no kernels for the formats here, as a clause; empty if it has."""
    row = HUMMING.row_for(problem.scheme)
    major, minor = torch.cuda.get_device_capability(device)
    if (problem.scheme.weight.name in BEFORE_SM100 or tokens_of(problem).bits < 16) and major >= 10:
        return f"its layouts of {problem.scheme} are those of GPUs before SM100"
    if row is not None and row.lowest is not None and (major, minor) < row.lowest:
        needed = ".".join(map(str, row.lowest))
        return (
            f"{problem.scheme.act.name} tokens need compute capability {needed}; the GPU has {major}.{minor}"
        )
    return ""

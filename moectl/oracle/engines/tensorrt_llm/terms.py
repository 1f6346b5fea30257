"""TensorRT-LLM's names for what a layer is, and the variables that its selection reads."""

from __future__ import annotations

from ....environment import Device
from ....environment.variables import CHOICE, ONE, TEXT, Variable
from ....problem.moe_problem import MoEProblem
from ...backend import SupportQuery
from ...gpu_archs import Archs, sm

SM100F: Archs = (sm(100, 100), sm(103, 103))
"""Devices that run binaries of the SM100 family."""

USE_FLASHINFER = Variable(
    "TRTLLM_GEN_FUSED_MOE_USE_FLASHINFER",
    "takes FlashInfer's copy of the TRTLLM-Gen kernels for quantized experts",
    kind=ONE,
)
OVERRIDE = Variable(
    "OVERRIDE_QUANT_ALGO",
    "sets the activations of MXFP4 experts",
    kind=TEXT,
    default="",
    choices=("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "w4a8_mxfp4_fp8"),
)
VARIABLES = {
    variable.name: variable
    for variable in (
        USE_FLASHINFER,
        OVERRIDE,
        Variable(
            "TLLM_MOE_ENABLE_SHARED_EXPERT_FUSION",
            "computes shared experts in the routed GEMM (TRTLLM with FP8 blocks, on one rank of experts)",
            kind=ONE,
        ),
        Variable("TRTLLM_MOE_FUSED_FC2_ALPHA", "scales inside DENSEGEMM's first GEMM", kind=ONE),
        Variable(
            "MEGAMOE_COMBINE_FORMAT",
            "sets the number format in which MEGAMOE_CUTEDSL's ranks combine",
            kind=CHOICE,
            default="bf16",
            choices=("16e2m1xbf16", "32e4m3xe8m0", "bf16"),
        ),
        Variable("MEGAMOE_TACTIC_AUTOTUNE", "tunes MEGAMOE_CUTEDSL's kernels", kind=ONE),
    )
}

_ACTIVATIONS = {
    "silu": "Swiglu",
    "swigluoai": "SwigluBias",
    "gelu_tanh": "Geglu",
    "relu2": "Relu2",
    "situ": "SiTu",
}
SITU_GROUPS = {"NVFP4": 16, "W4A8_MXFP4_MXFP8": 32}
"""Sizes of the groups of scales that a slice of a SiTU expert must keep whole, by algorithm."""
RENORMALIZED = ("Renormalize", "RenormalizeNaive")
"""Routing methods that normalize the weights of the selected experts."""


def dtype(problem: MoEProblem, device: Device) -> str:
    """The model's dtype."""
    return problem.dtype


def activation(problem: MoEProblem) -> str:
    """The kind of activation function; clamps and factors are constants apart."""
    if problem.activation.name == "silu" and not problem.activation.gated:
        return "Silu"
    return _ACTIVATIONS.get(problem.activation.name, problem.activation.name)


def constants(problem: MoEProblem) -> frozenset[str]:
    """The registers of the kernels' activation functor that the layer fills."""
    filled = {"clamp"} if problem.activation.limit is not None else set[str]()
    if activation(problem) in ("SwigluBias", "SiTu"):
        filled |= {"alpha", "beta"}
    return frozenset(filled)


def gpt_oss_style(problem: MoEProblem) -> bool:
    """True for SwiGLU with alpha and beta, or expert biases."""
    return problem.bias or activation(problem) == "SwigluBias"


def routing(problem: MoEProblem) -> str:
    """The routing method's type."""
    how = problem.routing
    if how.weight_on_input:
        return "Llama4"
    if how.scoring == "sigmoid" and how.correction_bias:
        return "DeepSeekV3" if how.groups is not None else "MiniMax2"
    if how.scoring == "softmax" and not how.correction_bias and how.groups in (None, 1):
        return "Renormalize" if how.renormalize else "Default"
    return "Unspecified"


def attention_dp(ask: SupportQuery) -> bool:
    """True when attention is data-parallel over several ranks."""
    return ask.problem.parallel.dp > 1

"""vLLM's Triton backends: OpenAI's triton_kernels for MXFP4, and vLLM's integer kernels."""

from dataclasses import replace

from .....problem.moe_problem import Align
from .....problem.padding import padding
from .....problem.schemes import MXFP4, MXFP8_ACT
from ....backend import (
    ALONE,
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    NameSet,
    PackageNeed,
    SupportQuery,
    WeightForm,
    but,
    only,
)
from ....gpu_archs import CUDA, ROCM, SM90, XPU, gfx, sm
from .defaults import NO_NVLINK_EXCHANGE, SHARED, mxfp4_forms

_MXFP4 = (FormatSupport(frozenset({"mxfp4 group 32"})),)
_NEEDS = (PackageNeed("triton_kernels"),)
_ARCHS = (
    sm(90, 129),
    gfx("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1150", "gfx1151", "gfx1200", "gfx1201"),
)
OAI_FORMS = (
    WeightForm("triton-hopper", padding("triton-hopper", MXFP4), where=(SM90,)),
    WeightForm("triton-blackwell", padding("triton-blackwell", MXFP4), where=(sm(100, 129),)),
    *mxfp4_forms("triton-kernels"),
)

TRITON_MXFP4 = Backend(
    name="triton",
    engine_name="TRITON",
    variants=(
        ExpertsClass(
            "OAITritonMxfp4ExpertsMonolithic",
            Capability(
                arch=_ARCHS,
                needs=_NEEDS,
                formats=_MXFP4,
                activations=only("swigluoai"),
                ungated=False,
                routing=only("Renormalize", "RenormalizeNaive"),
                parallel=ALONE,
            ),
            monolithic=True,
        ),
        ExpertsClass(
            "OAITritonExperts",
            Capability(
                arch=_ARCHS, needs=_NEEDS, formats=_MXFP4, activations=only("swigluoai"), ungated=False
            ),
        ),
    ),
    forms=OAI_FORMS,
)
TRITON_UNFUSED = Backend(
    name="triton_unfused",
    engine_name="TRITON_UNFUSED",
    variants=(
        ExpertsClass(
            "UnfusedOAITritonExperts",
            Capability(
                arch=_ARCHS,
                needs=_NEEDS,
                formats=_MXFP4,
                activations=only("silu", "gelu", "swigluoai", "swiglustep", "swigluoai_uninterleave"),
                ungated=False,
                lora=True,
            ),
        ),
    ),
    forms=(
        WeightForm("triton-kernels", Align(256, 256), where=(gfx("gfx950"),)),
        WeightForm("triton-kernels", Align(128, 128), where=(ROCM,), activations=only("silu", "situ")),
        *OAI_FORMS,
    ),
)


def few_experts(ask: SupportQuery) -> bool:
    """True when the number of experts of all ranks, rounded up to 32, is below 1024."""
    return ask.device.platform not in ("cuda", "rocm") or -(-ask.problem.experts // 32) * 32 < 1024


FEW_EXPERTS = BackendRule(
    question="number of experts",
    group="shape",
    code="shape",
    holds=few_experts,
    wanted=lambda ask: str(ask.problem.experts),
    offered="fewer than 993 (1024 rounded up to 32)",
)

XPU_ACTIVATIONS = only(
    "silu",
    "gelu",
    "gelu_tanh",
    "swigluoai",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
)
XPU_MASKED = BackendRule(
    question="activation function on xpu",
    group="scheme",
    code="activation",
    holds=lambda ask: ask.device.platform != "xpu" or XPU_ACTIVATIONS.allows(ask.activation),
    wanted=lambda ask: ask.activation,
    offered=str(XPU_ACTIVATIONS),
)

INTEGER_CAPABILITY = Capability(
    arch=(CUDA, ROCM, XPU),
    formats=(
        FormatSupport(
            frozenset(
                {
                    "int4 group",
                    "int4 group 32",
                    "int4 group with zero points",
                    "int4 group 32 with zero points",
                    "int8 group",
                }
            ),
            NameSet(),
        ),
    ),
    activations=but("situ", "relu2"),
    parallel=NO_NVLINK_EXCHANGE,
    checkpoints=but("awq"),
    act_order=False,
    bias=False,
    lora=True,
    invariant=True,
    rules=(FEW_EXPERTS,),
)
TRITON_INT = Backend(
    name="triton",
    engine_name="TRITON",
    variants=(ExpertsClass("TritonWNA16Experts", INTEGER_CAPABILITY),),
    forms=(WeightForm("triton-wna16"),),
)

_TURING = (sm(75), ROCM, XPU)
_FP8 = (sm(89), ROCM, XPU)
_FP8_TOKENS = frozenset({"fp8 per channel"}), only("fp8 per token dynamic")
_FP8_TENSOR = (
    frozenset({"fp8 per tensor"}),
    only("fp8 per token dynamic", "fp8 per tensor static", "fp8 per tensor dynamic"),
)
_FP8_GROUPS = only("fp8 group 128 dynamic")
PLAIN_CAPABILITY = Capability(
    arch=(CUDA, ROCM, XPU),
    formats=(
        FormatSupport(frozenset({"bf16"})),
        FormatSupport(frozenset({"int8 per channel"}), only("int8 per token dynamic"), _TURING),
        FormatSupport(frozenset({"int8 per tensor"}), only("int8 per tensor dynamic"), _TURING),
        # The block is an argument of the kernel.
        FormatSupport(frozenset({"fp8 block *"}), _FP8_GROUPS, _FP8),
        FormatSupport(*_FP8_TOKENS, _FP8),
        FormatSupport(*_FP8_TENSOR, _FP8),
    ),
    activations=SHARED,
    parallel=NO_NVLINK_EXCHANGE,
    lora=True,
    invariant=True,
    rules=(FEW_EXPERTS,),
)
_PLAIN_FORMS = (
    WeightForm("plain-bf16", weights=frozenset({"bf16"})),
    WeightForm("plain-fp8", weights=frozenset({"fp8"})),
    WeightForm("plain"),
)
TRITON_PLAIN = Backend(
    name="triton",
    engine_name="TRITON",
    variants=(ExpertsClass("TritonExperts", PLAIN_CAPABILITY),),
    forms=_PLAIN_FORMS,
)

_FP8_BATCHED = (sm(89), gfx("gfx942", "gfx950", "gfx1250", "gfx1200", "gfx1201"))
BATCHED_TRITON = Backend(
    name="batched_triton",
    engine_name="BATCHED_TRITON",
    variants=(
        ExpertsClass(
            "BatchedTritonExperts",
            Capability(
                arch=(CUDA, ROCM, XPU),
                formats=(
                    FormatSupport(frozenset({"bf16"})),
                    FormatSupport(frozenset({"fp8 block 128x128"}), _FP8_GROUPS, _FP8_BATCHED),
                    FormatSupport(*_FP8_TOKENS, _FP8_BATCHED),
                    FormatSupport(*_FP8_TENSOR, _FP8_BATCHED),
                ),
                activations=SHARED,
                rules=(XPU_MASKED,),
            ),
            batched=True,
        ),
    ),
    forms=_PLAIN_FORMS,
)

MXFP8_CAPABILITY = replace(
    PLAIN_CAPABILITY, formats=(FormatSupport(frozenset({"mxfp8 group 32"}), only("mxfp8")),)
)
TRITON_MXFP8 = Backend(
    name="triton",
    engine_name="TRITON_MXFP8",
    variants=(
        ExpertsClass("Mxfp8NativeTritonExperts", replace(MXFP8_CAPABILITY, arch=(gfx("gfx950", "gfx1250"),))),
    ),
    act=MXFP8_ACT,
    forms=(WeightForm("plain"),),
)

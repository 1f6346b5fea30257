"""AITER: AMD's kernels. On other platforms they are ranked, and rejected by the device check."""

from .....problem.moe_problem import SWIGLU_OAI, Align
from .....problem.schemes import FP8_ACT_TENSOR_STATIC, MXFP4_ACT, MXFP8_ACT
from ....backend import (
    ALONE,
    Backend,
    BackendRule,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    ParallelSupport,
    RuntimeFailure,
    SupportQuery,
    WeightForm,
    only,
    weighted_input,
)
from ....gpu_archs import ROCM, gfx
from ..variables import VARIABLES
from .defaults import NO_NVLINK_EXCHANGE, mxfp4_forms
from .triton import FEW_EXPERTS

_NEEDS = (PackageNeed("aiter"),)
CDNA3 = (gfx("gfx942", "gfx950", "gfx1250"),)
"""Architectures of CDNA3 and newer, on which the engine uses AITER at all."""
_SWITCHES = (EnvironmentSwitch(VARIABLES["VLLM_ROCM_USE_AITER"]),)
_MXFP4 = frozenset({"mxfp4 group 32"})
_FORMS = mxfp4_forms("aiter-mxfp4")
_TRITON_FORMS = mxfp4_forms("aiter-triton-mxfp4")
_ROUTERS = ("Renormalize", "RenormalizeNaive")

_MOE = (*_SWITCHES, EnvironmentSwitch(VARIABLES["VLLM_ROCM_USE_AITER_MOE"]))
_ACTIVATIONS = only("silu", "gelu", "situ", "swigluoai", "swigluoai_uninterleave")


def _fused(
    experts: str, *formats: FormatSupport, runtime_failures: tuple[RuntimeFailure, ...] = ()
) -> ExpertsClass:
    """Kernels for CDNA3 and newer, enabled by environment variables."""
    return ExpertsClass(
        experts,
        Capability(
            arch=CDNA3,
            needs=_NEEDS,
            switches=_MOE,
            formats=formats,
            activations=_ACTIVATIONS,
            ungated=False,
            parallel=NO_NVLINK_EXCHANGE,
            runtime_failures=runtime_failures,
        ),
    )


AITER_PLAIN = Backend(
    name="aiter",
    engine_name="ROCm AITER",
    variants=(_fused("AiterUnquantizedExperts", FormatSupport(frozenset({"bf16"}))),),
    forms=(
        # Its kernels pick tiles of 64 or 128 by the size itself.
        WeightForm("aiter-bf16", Align(1, 64), up_to=192),
        WeightForm("aiter-bf16", Align(1, 128)),
    ),
)
AITER_W8A8 = Backend(
    name="aiter",
    engine_name="AITER",
    variants=(
        _fused(
            "AiterFp8BlockExperts",
            FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),
            runtime_failures=(weighted_input("AssertionError"),),
        ),
        _fused(
            "AiterFp8TensorExperts",
            FormatSupport(
                frozenset({"fp8 per tensor"}), only("fp8 per tensor static", "fp8 per tensor dynamic")
            ),
        ),
        _fused(
            "AiterFp8ChannelExperts",
            FormatSupport(frozenset({"fp8 per channel"}), only("fp8 per token dynamic")),
        ),
    ),
    forms=(WeightForm("aiter-fp8"),),
)

_CK = ExpertsClass(
    "AiterMxfp4Experts",
    Capability(
        arch=CDNA3,
        needs=_NEEDS,
        switches=_MOE,
        formats=(
            FormatSupport(_MXFP4, only("a16", "mxfp4"), (gfx("gfx950"),)),
            FormatSupport(frozenset({"int4 group 32"}), only("a16"), (gfx("gfx942"),)),
        ),
        activations=_ACTIVATIONS,
        ungated=False,
        parallel=NO_NVLINK_EXCHANGE,
    ),
)
AITER_BF16 = Backend(
    name="aiter",
    engine_name="AITER_MXFP4_BF16",
    variants=(_CK,),
    forms=(
        WeightForm("aiter-mxfp4", Align(128, 128), (ROCM,), activations=only("silu", "situ")),
        *_FORMS,
    ),
)
AITER_MXFP4 = Backend(
    name="aiter_mxfp4_mxfp4",
    engine_name="AITER_MXFP4_MXFP4",
    variants=(_CK,),
    act=MXFP4_ACT,
    forms=(WeightForm("aiter-mxfp4", Align(256, 128), (ROCM,)), *_FORMS),
)
AITER_TRITON_BF16 = Backend(
    name="aiter_triton_mxfp4_bf16",
    engine_name="AITER_TRITON_MXFP4_BF16",
    variants=(
        ExpertsClass(
            "AiterW4A16ExpertsMonolithic",
            Capability(
                arch=CDNA3,
                needs=_NEEDS,
                switches=_SWITCHES,
                formats=(FormatSupport(_MXFP4),),
                activations=only("silu", "swigluoai"),
                ungated=False,
                routing=only(*_ROUTERS, "DeepseekV4", "DeepSeekV3"),
                parallel=ALONE,
                hashed=True,
            ),
            monolithic=True,
        ),
    ),
    forms=_TRITON_FORMS,
)
AITER_FP8 = Backend(
    name="aiter_mxfp4_fp8",
    engine_name="AITER_MXFP4_FP8",
    variants=(
        ExpertsClass(
            "AiterW4A8ExpertsMonolithic",
            Capability(
                arch=(gfx("gfx950", "gfx1250"),),
                needs=_NEEDS,
                switches=_SWITCHES,
                formats=(FormatSupport(_MXFP4, only("fp8 per tensor static")),),
                activations=only("swigluoai"),
                ungated=False,
                routing=only(*_ROUTERS),
                parallel=ParallelSupport(eplb=False, dp=False, ep=False),
            ),
            monolithic=True,
        ),
    ),
    act=FP8_ACT_TENSOR_STATIC,
    forms=_TRITON_FORMS,
)
AITER_TRITON_MXFP4 = Backend(
    name="aiter_triton_mxfp4_mxfp4",
    engine_name="AITER_TRITON_MXFP4_MXFP4",
    variants=(
        ExpertsClass(
            "AiterW4A4ExpertsMonolithic",
            Capability(
                arch=(gfx("gfx1250"),),
                needs=_NEEDS,
                switches=_SWITCHES,
                formats=(FormatSupport(_MXFP4, only("mxfp4")),),
                activations=only("silu", "swigluoai", "swigluoai_uninterleave"),
                ungated=False,
                routing=only(*_ROUTERS, "DeepseekV4", "DeepSeekV3", "MiniMax2"),
                parallel=ALONE,
                hashed=True,
            ),
            monolithic=True,
        ),
    ),
    act=MXFP4_ACT,
    forms=_TRITON_FORMS,
)


def _published_alpha(ask: SupportQuery) -> bool:
    activation = ask.problem.activation
    return activation.name != "swigluoai" or activation.alpha in (None, SWIGLU_OAI.alpha)


AITER_MXFP8 = Backend(
    name="aiter",
    engine_name="AITER_MXFP8",
    variants=(
        ExpertsClass(
            "AiterMxfp8Experts",
            Capability(
                arch=(gfx("gfx950", "gfx1250"),),
                needs=_NEEDS,
                switches=(*_SWITCHES, EnvironmentSwitch(VARIABLES["VLLM_ROCM_USE_AITER_MOE"])),
                formats=(FormatSupport(frozenset({"mxfp8 group 32"}), only("mxfp8")),),
                activations=only("silu", "swigluoai_uninterleave"),
                lora=True,
                rules=(
                    FEW_EXPERTS,
                    BackendRule(
                        question="activation parameters",
                        group="scheme",
                        code="other",
                        holds=_published_alpha,
                        wanted=lambda ask: str(ask.problem.activation),
                        offered=f"SwiGLU of gpt-oss with alpha {SWIGLU_OAI.alpha} only",
                    ),
                ),
                codes={"activation function": "other"},
            ),
        ),
    ),
    act=MXFP8_ACT,
    forms=(WeightForm("aiter-mxfp8"),),
)

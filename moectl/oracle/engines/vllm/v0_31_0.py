"""vLLM 0.31.0, as its difference from 0.32.0."""

from ...backend import ParallelSupport, WeightForm, only
from ...gpu_archs import gfx, sm
from ...release import ClassChange, Difference, RouteChange
from ...route import MATCHED_ACT
from ..vllm_0_33_0.backends.defaults import mxfp4_forms
from .v0_32_0 import VLLM_0_32_0

_ROCM = gfx("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1150", "gfx1151", "gfx1200", "gfx1201")
_MXFP4 = ("MXFP4 of gpt-oss", "MXFP4 of Quark")
_NATIVE = (
    "native MXFP4",
    "MXFP4 experts of DeepSeek-V4",
    "MXFP4 experts of Kimi-K3",
)

DIFFERENCE = Difference(
    version="0.31.0",
    without=frozenset({"FlashInferMoeEpExperts", "DeepseekV4AiterMegaMoEExperts"}),
    backends={
        "ROCm AITER": {"forms": (WeightForm("aiter-bf16"),)},
        "AITER_MXFP4_MXFP4": {"forms": mxfp4_forms("aiter-mxfp4")},
    },
    classes=(
        ClassChange(
            ("OAITritonMxfp4ExpertsMonolithic", "OAITritonExperts", "UnfusedOAITritonExperts"),
            {"arch": (sm(90, 109), _ROCM)},
        ),
        ClassChange(
            ("AiterW4A16ExpertsMonolithic",),
            {"routing": only("Renormalize", "RenormalizeNaive", "DeepseekV4")},
        ),
        ClassChange(("AiterMxfp8Experts",), {"invariant": True}),
        ClassChange(("CutlassExpertsFp4", "CutlassExpertsMxfp4"), {"parallel": ParallelSupport(ep=False)}),
        ClassChange(
            ("TrtLlmBf16ExpertsMonolithic",),
            {
                "routing": only(
                    "DeepSeekV3", "Llama4", "Renormalize", "RenormalizeNaive", "SigmoidRenorm", "Sigmoid"
                )
            },
        ),
    ),
    routes=(
        RouteChange(unmoved=frozenset({"HUMMING"})),
        RouteChange(
            _MXFP4,
            {"act": MATCHED_ACT},
            unmoved=frozenset({"TRITON"}),
            without=frozenset({"CUTLASS_MXFP4_MXFP4"}),
            unranked=frozenset({"HUMMING"}),
            last_resorts=("XPU",),
        ),
        RouteChange(_NATIVE, unranked=frozenset({"HUMMING"}), without=frozenset({"CUTLASS_MXFP4_MXFP4"})),
        RouteChange(
            ("MXFP4 of compressed-tensors",),
            unasked=frozenset({"flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm"}),
        ),
        RouteChange(("MXFP4 experts of DeepSeek-V4",), unasked=frozenset({"aiter_mega_moe"})),
    ),
    unknown_routes=frozenset({"MXFP4 of compressed-tensors with FP8 activations"}),
)

VLLM_0_31_0 = DIFFERENCE.before(VLLM_0_32_0)

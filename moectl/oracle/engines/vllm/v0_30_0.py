"""vLLM 0.30.0, as its difference from 0.31.0."""

from dataclasses import replace

from ...backend import ALONE, ANY, PackageNeed, WeightForm, only
from ...gpu_archs import ROCM, SM90, sm
from ...release import ClassChange, Difference, RouteChange
from ...route import Condition
from ..vllm_0_33_0.backends import triton
from ..vllm_0_33_0.routes.order import AITER_DEMANDED
from ..vllm_0_33_0.routes.terms import refuses
from .v0_31_0 import VLLM_0_31_0

_PLAIN = tuple(
    replace(row, where=(sm(75), ROCM)) if any("int8" in name for name in row.weights) else row
    for row in triton.PLAIN_CAPABILITY.formats or ()
)

DIFFERENCE = Difference(
    version="0.30.0",
    without=frozenset({"ZentorchExpertsInt4", "PowerCPUExpertsInt8", "CPUExpertsFp8W8A8", "MoonEPExperts"}),
    backends={"FlashInfer TRTLLM": {"forms": (WeightForm("trtllm-bf16"),)}},
    classes=(
        ClassChange(("TritonExperts",), {"formats": _PLAIN}),
        ClassChange(("AiterW4A16ExpertsMonolithic", "AiterW4A8ExpertsMonolithic"), {"parallel": ALONE}),
        ClassChange(
            ("AiterMxfp8Experts",), {"switches": (), "needs": (PackageNeed("aiter", code="package"),)}
        ),
    ),
    routes=(
        RouteChange(
            ("unquantized experts",),
            {"switch_requests": (AITER_DEMANDED,)},
            orders={1: ("XPU",)},
        ),
        RouteChange(
            ("int4 weights with FP8 activations",),
            {
                "when": Condition(
                    "a method for SM90",
                    lambda ask: SM90.fits(ask.device),
                    lambda ask: "the method is used on SM90 only",
                ),
                "names": {},
                "ignored": ANY,
            },
            without=frozenset({"HUMMING"}),
        ),
        RouteChange(
            ("int4 weights of Quark",),
            {
                "refusals": (
                    refuses(
                        "Quark's int4 weights",
                        "Quark's INT4 experts are not supported; use INT4 of compressed-tensors",
                        "RuntimeError",
                    ),
                )
            },
        ),
        RouteChange(
            ("int4 weights with int8 activations",),
            {"acts": only("int8 per token dynamic", "fp8 per token dynamic")},
        ),
    ),
    unknown_routes=frozenset({"unquantized experts over MoonEP"}),
    variables={"VLLM_ROCM_USE_AITER_MOE_SITUV2": None},
    unread=frozenset(
        {
            "FORCE_COLOR",
            "VLLM_ENABLE_GEMM_RS",
            "VLLM_MOONCAKE_CONNECTOR_TIMEOUT",
            "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
            "VLLM_ROCM_AITER_MLA_DCP_VERIFY",
            "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
            "VLLM_ROCM_USE_AITER_MOE_SITUV2",
            "VLLM_SKIP_VERSION_SUFFIX",
            "VLLM_TRITON_JIT_WARMUP_NUM_THREADS",
            "VLLM_XPU_PP_MICROBATCH",
        }
    ),
    read=frozenset(
        {
            "VLLM_KIMI_K3_GEMM_RS",
            "VLLM_PLE_CPU_OFFLOAD",
            "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4",
            "VLLM_XPU_ENABLE_XPU_GRAPH",
        }
    ),
    policy={"exchanges": VLLM_0_31_0.policy.exchanges - {"moonep"}},
    oldest={"flashinfer": "0.6.18"},
)

VLLM_0_30_0 = DIFFERENCE.before(VLLM_0_31_0)

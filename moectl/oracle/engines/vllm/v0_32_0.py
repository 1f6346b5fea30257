"""vLLM 0.32.0, as its difference from 0.33.0."""

from dataclasses import replace

from ...backend import ExpertsClass, FormatSupport, ParallelSupport, SupportQuery, only
from ...gpu_archs import gfx
from ...release import ClassChange, Difference, RouteChange
from ...route import SwitchRequest
from ..vllm_0_33_0 import VLLM_0_33_0
from ..vllm_0_33_0.backends import aiter, cpu
from ..vllm_0_33_0.routes import fp8
from ..vllm_0_33_0.routes.order import hurt_by_deep_gemm

_QUANTIZED = tuple(row for variant in aiter.AITER_W8A8.variants for row in variant.capability.formats or ())
_AITER_FP8 = ExpertsClass(
    "AiterExperts", replace(aiter.AITER_W8A8.variants[0].capability, formats=_QUANTIZED)
)
_SILU = only("silu")


def _inaccurate(ask: SupportQuery) -> bool:
    """Qwen3.8 Flash Next with MXFP4 activations over 8 ranks of experts on gfx950."""
    problem = ask.problem
    sizes = (problem.experts, problem.dims.hidden, problem.dims.intermediate)
    quantized = ask.declared.name == "mxfp4" and gfx("gfx950").fits(ask.device)
    return quantized and problem.parallel.ep_size == 8 and sizes == (512, 2560, 640)


_DEEP_GEMM_FOR_ALL = tuple(
    RouteChange(
        (route.name,),
        {"exclusions": tuple(row for row in route.exclusions if row.when is not hurt_by_deep_gemm)},
    )
    for route in fp8.ROUTES
)


DIFFERENCE = Difference(
    version="0.32.0",
    without=frozenset({"AiterW4A4ExpertsMonolithic", "TrtLlmMxfp4LoRAExperts"}),
    backends={"AITER": {"variants": (_AITER_FP8,)}},
    classes=(
        ClassChange(("AiterUnquantizedExperts",), renamed="AiterExperts"),
        ClassChange(
            ("AiterMxfp4Experts",),
            {
                "formats": (
                    FormatSupport(frozenset({"mxfp4 group 32"}), only("a16", "mxfp4"), (gfx("gfx950"),)),
                )
            },
            renamed="AiterExperts",
        ),
        ClassChange(("AiterMxfp8Experts",), {"activations": only("swigluoai_uninterleave")}),
        ClassChange(
            ("AiterW4A16ExpertsMonolithic",),
            {"hashed": False, "parallel": ParallelSupport(eplb=False, dp=False, ep=False)},
        ),
        ClassChange(("CPUExpertsMxfp4",), {"activations": only("silu", "swigluoai")}),
        ClassChange(("CPUExpertsFp8", "CPUExpertsFp8W8A8"), {"activations": _SILU}),
        ClassChange(("CPUExpertsInt4",), {"activations": _SILU}, of=frozenset({"CPU"})),
        ClassChange(("CPUExpertsInt8",), {"activations": _SILU, "rules": (cpu.multiples(32, 32),)}),
    ),
    routes=(
        *_DEEP_GEMM_FOR_ALL,
        RouteChange(
            ("unquantized experts", "unquantized experts with adapters"),
            {"ignored": only("humming")},
        ),
        RouteChange(
            ("MXFP4 of gpt-oss", "MXFP4 of Quark"),
            {
                "switch_requests": (
                    SwitchRequest(
                        "emulation",
                        _inaccurate,
                        why="vLLM emulates Qwen3.8 Flash Next here, as AITER is inaccurate for its shape",
                    ),
                )
            },
        ),
    ),
)

VLLM_0_32_0 = DIFFERENCE.before(VLLM_0_33_0)

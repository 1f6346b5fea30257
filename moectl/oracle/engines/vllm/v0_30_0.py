"""vLLM 0.30.0, as its difference from 0.31.0."""

from dataclasses import replace

from ....problem.moe_problem import MoEProblem
from ...backend import ALONE, ANY, PackageNeed, WeightForm, only
from ...gpu_archs import ROCM, SM90, sm
from ...release import ClassChange, Difference, RouteChange
from ...route import Condition
from ..vllm_0_33_0.backends import triton
from ..vllm_0_33_0.routes.order import AITER_DEMANDED
from ..vllm_0_33_0.routes.terms import ROUTES_AS_DEEPSEEK_V4, refuses, routing
from .v0_31_0 import VLLM_0_31_0

_PLAIN = tuple(
    replace(row, where=(sm(75), ROCM)) if any("int8" in name for name in row.weights) else row
    for row in triton.PLAIN_CAPABILITY.formats or ()
)

V4_EXPERTS = "MXFP4 experts of DeepSeek-V4"


def _unscaled(problem: MoEProblem) -> str:
    """The routing method: sigmoid scores with a correction bias had a name only without a factor."""
    name = routing(problem)
    return "Unspecified" if name == "MiniMax2" and problem.routing.scale != 1.0 else name


_LOADED_AS_DEEPSEEK_V4 = replace(
    ROUTES_AS_DEEPSEEK_V4,
    holds=lambda ask: (
        ROUTES_AS_DEEPSEEK_V4.holds(ask)
        and (ask.problem.storage != "quark" or ask.problem.model_type.startswith("deepseek_v4"))
    ),
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
        # Quark's MXFP4 of that model was loaded by the model's own quantization config.
        RouteChange((V4_EXPERTS,), {"storages": only("mxfp4", "quark"), "when": _LOADED_AS_DEEPSEEK_V4}),
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
    policy={"routing": _unscaled},
)

VLLM_0_30_0 = DIFFERENCE.before(VLLM_0_31_0)

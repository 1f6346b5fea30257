"""vLLM 0.23.0 for unquantized experts, as its difference from 0.24.0."""

from ....environment.variables import CHOICE, Variable
from ...backend import SupportQuery, is_on, only
from ...release import ClassChange, Difference, RouteChange
from ...route import Exclusion, SwitchRequest
from .v0_24_0 import UNQUANTIZED, VLLM_0_24_0

FLASHINFER = Variable("VLLM_USE_FLASHINFER_MOE_FP16", "FlashInfer for BF16 experts")
KIND = Variable(
    "VLLM_FLASHINFER_MOE_BACKEND",
    "which FlashInfer kernels run experts",
    CHOICE,
    "latency",
    ("throughput", "latency", "masked_gemm"),
)
_PLAIN = next(route for route in VLLM_0_24_0.policy.routes if route.name == UNQUANTIZED)
_BACKENDS = {backend.engine_name: backend for backend in _PLAIN.backends()}
_SWITCHES = frozenset({FLASHINFER.name, KIND.name})
_BY_KIND = {"throughput": "flashinfer_cutlass", "latency": "flashinfer_trtllm"}


def wanted(ask: SupportQuery) -> bool:
    """True when the variable that requests FlashInfer is on."""
    return is_on(ask.packages, FLASHINFER)


def _named(ask: SupportQuery) -> str:
    """The request that the two variables amount to; empty for none."""
    if not wanted(ask) or KIND.name not in ask.packages.env:
        return ""
    kind = ask.packages.env[KIND.name]
    if kind == "latency" and not 100 <= ask.device.capability < 110:
        return "flashinfer_cutlass"
    return _BY_KIND.get(kind, "flashinfer_cutedsl")


def _request(name: str) -> SwitchRequest:
    return SwitchRequest(
        name,
        lambda ask: _named(ask) == name,
        why=f"{FLASHINFER.name} and {KIND.name} request {name}",
        switches=_SWITCHES,
    )


DIFFERENCE = Difference(
    version="0.23.0",
    classes=(
        ClassChange(("TrtLlmBf16Experts",), {"activations": only("silu"), "ungated": False}),
        ClassChange(("FlashInferExperts",), {"activations": only("silu", "relu2_no_mul", "swigluoai")}),
        ClassChange(
            ("TritonExperts",),
            {
                "activations": only(
                    *(_BACKENDS["TRITON"].variants[0].capability.activations.only or frozenset())
                    - {"swigluoai_uninterleave"}
                )
            },
        ),
    ),
    routes=(
        RouteChange(
            (UNQUANTIZED,),
            {
                "exclusions": (
                    Exclusion(
                        (_BACKENDS["FlashInfer TRTLLM"], _BACKENDS["FlashInfer CUTLASS"]),
                        f"only while {FLASHINFER.name} is on, or unset",
                        lambda ask: FLASHINFER.name in ask.packages.env and not wanted(ask),
                        _SWITCHES,
                    ),
                    Exclusion(
                        tuple(_BACKENDS[name] for name in ("ROCm AITER", "TRITON", "BATCHED_TRITON", "XPU")),
                        f"only while {FLASHINFER.name} is off",
                        lambda ask: wanted(ask) and not _named(ask),
                        _SWITCHES,
                    ),
                    *_PLAIN.exclusions,
                ),
                "switch_requests": (
                    *map(_request, ("flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_cutedsl")),
                    *_PLAIN.switch_requests,
                ),
            },
        ),
    ),
)

VLLM_0_23_0 = DIFFERENCE.before(VLLM_0_24_0)

"""What vLLM refuses with every method, before any layer is made."""

from ...backend import Ask, is_on
from ...backends.aiter import CDNA3
from ...route import Condition


def _moonep(ask: Ask) -> bool:
    return ask.problem.parallel.all2all == "moonep"


def _quantized(ask: Ask) -> bool:
    return ask.problem.scheme.weight.name != "bf16"


def _fused_aiter(ask: Ask) -> bool:
    switched = is_on(ask.packages, "VLLM_ROCM_USE_AITER") and is_on(ask.packages, "VLLM_ROCM_USE_AITER_MOE")
    served = any(arch.fits(ask.device) for arch in CDNA3)
    return served and ask.packages.has("aiter") and switched


REFUSALS = (
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and _quantized(ask),
        lambda ask: "MoonEP carries tokens of unquantized models only",
    ),
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and ask.dtype != "bf16",
        lambda ask: f"MoonEP carries BF16 only, the model runs in {ask.dtype}",
    ),
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and ask.problem.parallel.eplb,
        lambda ask: "MoonEP does not go with expert load balancing",
    ),
    Condition(
        "token exchange",
        lambda ask: ask.exchange.startswith("mori") and not _fused_aiter(ask),
        lambda ask: "MoRI goes with AITER's fused experts only, which are not there or not switched on",
        kind="AssertionError",
    ),
    Condition(
        "expert balancing",
        lambda ask: ask.problem.parallel.eplb and ask.problem.experts % ask.problem.parallel.ep_size > 0,
        lambda ask: (
            f"{ask.problem.experts} experts do not spread evenly over {ask.problem.parallel.ep_size} ranks, "
            "which expert load balancing needs"
        ),
    ),
    Condition(
        "batch invariance",
        lambda ask: ask.invariant and ask.device.platform == "xpu" and _quantized(ask),
        lambda ask: "batch invariance on XPU is for unquantized models only",
    ),
    Condition(
        "gating",
        lambda ask: not ask.problem.activation.gated and ask.device.platform not in ("cuda", "rocm", "xpu"),
        lambda ask: f"experts without a gate are not computed on {ask.device.platform}",
        kind="NotImplementedError",
    ),
)

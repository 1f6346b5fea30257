"""What vLLM refuses with every method, before it creates any layer."""

from ....backend import SupportQuery, is_on
from ....route import Condition
from ..backends.aiter import CDNA3
from ..variables import VARIABLES


def _moonep(ask: SupportQuery) -> bool:
    return ask.problem.parallel.all2all == "moonep"


def _quantized(ask: SupportQuery) -> bool:
    return ask.problem.scheme.weight.name != "bf16"


_A4W4 = "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"
_A4W4_MODELS = ("deepseek_v41", "deepseek_v41_text")
_SHARED = "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"


def _mori(ask: SupportQuery) -> bool:
    return ask.exchange.startswith("mori")


def _fused_aiter(ask: SupportQuery) -> bool:
    """True when vLLM runs the experts with AITER, which it does only for gated ones."""
    if not ask.problem.activation.gated:
        return False
    switched = is_on(ask.packages, VARIABLES["VLLM_ROCM_USE_AITER"]) and is_on(
        ask.packages, VARIABLES["VLLM_ROCM_USE_AITER_MOE"]
    )
    served = any(arch.fits(ask.device) for arch in CDNA3)
    return served and ask.packages.has("aiter") and switched


REFUSALS = (
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and _quantized(ask),
        lambda ask: "MoonEP supports unquantized models only",
    ),
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and ask.dtype != "bf16",
        lambda ask: f"MoonEP supports only BF16; model runs in {ask.dtype}",
    ),
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and ask.problem.parallel.eplb,
        lambda ask: "MoonEP does not support expert load balancing (EPLB)",
    ),
    Condition(
        "token exchange",
        lambda ask: _mori(ask) and not _fused_aiter(ask),
        lambda ask: "MoRI needs AITER's fused experts, which are not installed or not enabled",
        kind="AssertionError",
    ),
    Condition(
        "token exchange",
        lambda ask: _mori(ask) and _fused_aiter(ask) and is_on(ask.packages, VARIABLES[_SHARED]),
        lambda ask: f"MoRI does not support shared experts fused by AITER; set {_SHARED}=0",
        kind="AssertionError",
    ),
    Condition(
        "switch",
        lambda ask: (
            _fused_aiter(ask)
            and is_on(ask.packages, VARIABLES[_A4W4])
            and ask.problem.model_type not in _A4W4_MODELS
        ),
        lambda ask: (
            f"{_A4W4} supports only models of type {' or '.join(_A4W4_MODELS)}; "
            f"this one is {ask.problem.model_type or 'of an unknown type'}: unset it"
        ),
    ),
    Condition(
        "expert balancing",
        lambda ask: ask.problem.parallel.eplb and ask.problem.experts % ask.problem.parallel.ep_size > 0,
        lambda ask: (
            f"{ask.problem.experts} experts are not divisible by {ask.problem.parallel.ep_size} ranks, "
            "which expert load balancing (EPLB) requires"
        ),
    ),
    Condition(
        "batch invariance",
        lambda ask: ask.invariant and ask.device.platform == "xpu" and _quantized(ask),
        lambda ask: "batch invariance on XPU supports unquantized models only",
    ),
    Condition(
        "gating",
        lambda ask: not ask.problem.activation.gated and ask.device.platform not in ("cuda", "rocm", "xpu"),
        lambda ask: f"non-gated experts are not supported on {ask.device.platform}",
        kind="NotImplementedError",
    ),
)

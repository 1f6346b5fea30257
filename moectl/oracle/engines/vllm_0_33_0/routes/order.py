"""Changes of the priority order that several formats share."""

from ....backend import Backend, SupportQuery, is_on
from ....gpu_archs import SM90, Arch
from ....route import Exclusion, OrderMove, SwitchRequest
from ..backends.humming import HUMMING
from ..backends.marlin import MARLIN
from ..variables import VARIABLES

CPU, XPU, ROCM = (Arch("cpu"),), (Arch("xpu"),), (Arch("rocm"),)
TPU, OUT_OF_TREE = (Arch("tpu"),), (Arch("out-of-tree"),)

HUMMING_FIRST = OrderMove(
    HUMMING, (SM90,), before=MARLIN, why="Humming has priority over Marlin on compute capability 9.0 only"
)

_AITER, _AITER_MOE = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"
_AITER_SWITCHES = frozenset({_AITER, _AITER_MOE})


def _stated(ask: SupportQuery, switches: frozenset[str]) -> bool:
    """True when one of the environment variables is set, to any value."""
    return not switches.isdisjoint(ask.packages.env)


def _aiter_wanted(ask: SupportQuery) -> bool:
    """True when both variables are on, except on RDNA4, which has only AITER's Triton kernels."""
    rdna4 = ask.device.arch in ("gfx1200", "gfx1201") and ask.packages.has("aiter")
    on = is_on(ask.packages, VARIABLES[_AITER]) and is_on(ask.packages, VARIABLES[_AITER_MOE])
    return _stated(ask, _AITER_SWITCHES) and on and not rdna4


def _aiter_refused(ask: SupportQuery) -> bool:
    return _stated(ask, _AITER_SWITCHES) and not _aiter_wanted(ask)


AITER_DEMANDED = SwitchRequest(
    "aiter",
    _aiter_wanted,
    why=f"{_AITER} requests AITER",
    switches=_AITER_SWITCHES,
)


def without_aiter(*backends: Backend) -> Exclusion:
    """Exclude AITER's `backends` when an environment variable turns them off."""
    return Exclusion(
        backends, f"only while {_AITER} and {_AITER_MOE} are on, or unset", _aiter_refused, _AITER_SWITCHES
    )


_DEEP_GEMM, _DEEP_GEMM_MOE = "VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"
_DEEP_GEMM_SWITCHES = frozenset({_DEEP_GEMM, _DEEP_GEMM_MOE})
_HURT_BY_DEEP_GEMM = {
    # Capability families on which DeepGEMM costs these models accuracy, or latency (kolibri1).
    "qwen3_5_text": (10, 12),
    "qwen3_5_moe_text": (10, 12),
    "kolibri1": (12,),
}


def _deep_gemm_on(ask: SupportQuery) -> bool:
    return is_on(ask.packages, VARIABLES[_DEEP_GEMM]) and is_on(ask.packages, VARIABLES[_DEEP_GEMM_MOE])


def hurt_by_deep_gemm(ask: SupportQuery) -> bool:
    """True for models that DeepGEMM costs accuracy or latency on this GPU."""
    families = _HURT_BY_DEEP_GEMM.get(ask.problem.model_type, ())
    return not _stated(ask, _DEEP_GEMM_SWITCHES) and ask.device.capability // 10 in families


DEEP_GEMM_DEMANDED = SwitchRequest(
    "deep_gemm",
    lambda ask: _stated(ask, _DEEP_GEMM_SWITCHES) and _deep_gemm_on(ask),
    why=f"{_DEEP_GEMM} or {_DEEP_GEMM_MOE} is set, which requests DeepGEMM alone",
    switches=_DEEP_GEMM_SWITCHES,
)


def without_deep_gemm(*backends: Backend) -> tuple[Exclusion, ...]:
    """Exclude DeepGEMM's `backends` by environment variable, and for models that it hurts."""
    return (
        Exclusion(
            backends,
            f"only while {_DEEP_GEMM} and {_DEEP_GEMM_MOE} are on, or unset",
            lambda ask: _stated(ask, _DEEP_GEMM_SWITCHES) and not _deep_gemm_on(ask),
            _DEEP_GEMM_SWITCHES,
        ),
        Exclusion(backends, "not used for this model on Blackwell", hurt_by_deep_gemm),
    )

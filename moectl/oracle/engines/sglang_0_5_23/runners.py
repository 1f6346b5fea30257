"""SGLang's runners: with which exchanges each has kernels, and on which devices."""

from __future__ import annotations

from functools import cache

from ...backend import (
    ANY,
    Backend,
    BackendRule,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    PackageNeed,
    RuntimeFailure,
    SupportQuery,
    only,
)
from ...gpu_archs import ROCM, Archs
from .terms import AITER_EXCHANGES, USE_AITER, exchange

_FUSED = {
    "marlin": ("none",),
    "flashinfer_trtllm": ("none", "flashinfer"),
    "flashinfer_trtllm_routed": ("none", "flashinfer"),
    "flashinfer_cutlass": ("none", "flashinfer"),
    "flashinfer_mxfp4": ("none",),
    "flashinfer_cutedsl": ("none", "flashinfer", "deepep"),
    "flashinfer_megamoe": ("flashinfer_megamoe",),
    "hpc_ops": ("none",),
    "experimental_sgl_marlin": ("none",),
    "experimental_sgl_trtllm": (),
    "cutlass": (),
}
"""Runners without kernels of their own around an exchange: exchanges that they have a fused function for."""


def _exchanges(value: str, also: tuple[str, ...]) -> BackendRule | None:
    if value not in _FUSED:
        return None
    allowed = only(*_FUSED[value], *also)
    return BackendRule(
        question="token exchange",
        group="parallel",
        code="fused_func",
        holds=lambda ask: allowed.allows(exchange(ask)),
        wanted=exchange,
        offered=str(allowed),
    )


_NOT_DEEP_GEMM = BackendRule(
    question="token exchange",
    group="parallel",
    code="deepep_v2",
    holds=lambda ask: exchange(ask) != "deepep_v2",
    wanted=exchange,
    offered="any but deepep_v2",
)


@cache
def runner(
    value: str,
    experts: str,
    arch: Archs | None = None,
    also: tuple[str, ...] = (),
    rules: tuple[BackendRule, ...] = (),
    switches: tuple[EnvironmentSwitch, ...] = (),
    needs: tuple[PackageNeed, ...] = (),
    failures: tuple[RuntimeFailure, ...] = (),
    checked: bool = True,
) -> Backend:
    """The runner `value` of the method or scheme `experts`, by SGLang's name.

    `also`: exchanges that the method serves without the runner. `checked`: False for a kernel that the
    method calls itself, which no exchange is checked for.
    """
    fused = _exchanges(value, also) if checked else None
    apart = () if value == "deep_gemm" or not checked or fused else (_NOT_DEEP_GEMM,)
    capability = Capability(
        arch=arch,
        switches=switches,
        needs=needs,
        rules=(*((fused,) if fused else ()), *apart, *rules),
        runtime_failures=failures,
        activations=only("silu", "situ") if value == "deep_gemm" else ANY,
        lora=value == "triton",
    )
    return Backend(value, value, (ExpertsClass(experts, capability),))


NO_KERNEL = RuntimeFailure(lambda ask: True, "has no kernel for this format", "AttributeError")
"""Of methods that accept a runner's name without having its kernels."""


def aiter(experts: str, *rules: BackendRule) -> Backend:
    """AITER where it is chosen automatically: on ROCm, switched on, with an exchange that it supports."""
    return runner(
        "aiter", experts, (ROCM,), rules=(AITER_EXCHANGE, *rules), switches=(EnvironmentSwitch(USE_AITER),)
    )


AITER_EXCHANGE = BackendRule(
    question="token exchange",
    group="parallel",
    code="aiter",
    holds=lambda ask: exchange(ask) in AITER_EXCHANGES,
    wanted=exchange,
    offered=", ".join(sorted(AITER_EXCHANGES)),
)


def _aligned(ask: SupportQuery) -> bool:
    """True for sizes and activations that AITER's bf16 kernels support."""
    return ask.problem.dims.intermediate % 128 == 0 and not (
        ask.device.arch == "gfx950" and ask.problem.activation.name == "swigluoai"
    )


AITER_SIZES = BackendRule(
    question="AITER's kernels",
    group="shape",
    code="aiter_shape",
    holds=_aligned,
    wanted=lambda ask: (
        f"an intermediate size per rank that 128 divides, and no gpt-oss activation on gfx950; "
        f"it is {ask.problem.dims.intermediate}"
    ),
    offered="multiples of 128",
)
DEEP_GEMM_AUTO = BackendRule(
    question="token exchange",
    group="parallel",
    code="deep_gemm",
    holds=lambda ask: exchange(ask) in ("deepep", "mooncake", "nixl"),
    wanted=exchange,
    offered="deepep, mooncake, nixl",
)

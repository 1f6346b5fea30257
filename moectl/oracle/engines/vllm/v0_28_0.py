"""vLLM 0.28.0, as its difference from 0.30.0."""

from dataclasses import replace

from ....environment.variables import Variable
from ....problem.schemes import FULL
from ...backend import Backend, BackendRule, Capability, FormatSupport, NameSet, SupportQuery, is_on, only
from ...decision import Candidate
from ...gpu_archs import gfx
from ...release import ClassChange, Difference, RouteChange
from ...route import Condition, LateFailure, Route, SwitchRequest
from ..vllm_0_33_0.backends import humming, triton
from ..vllm_0_33_0.backends.defaults import SHARED
from ..vllm_0_33_0.backends.marlin import shape_fits
from ..vllm_0_33_0.routes import fp8
from ..vllm_0_33_0.routes.order import AITER_DEMANDED, DEEP_GEMM_DEMANDED
from ..vllm_0_33_0.routes.terms import (
    AWQ_HAS_4_BITS,
    AWQ_NEEDS_TURING,
    CHANNELS_WITH_MARLIN_ONLY,
    GPTQ_ZERO_POINTS,
    WHOLE_GROUPS,
)
from .v0_30_0 import VLLM_0_30_0

_FORCE_MARLIN = Variable("VLLM_TEST_FORCE_FP8_MARLIN", "Marlin for FP8")
_GEMM_TYPE = "VLLM_HUMMING_MOE_GEMM_TYPE"
_HUMMING = ("BatchedHummingGroupedExperts", "HummingGroupedExperts", "HummingIndexedExperts")
_NO_UNINTERLEAVED = frozenset({"situ", "swigluoai_uninterleave"})
_WITH_ZERO_POINTS = frozenset(
    {
        "int4 group with zero points",
        "int4 group 32 with zero points",
        "int8 group with zero points",
    }
)
_GROUP_32 = frozenset({"int4 group 32", "int4 group 32 with zero points"})


def _gemm_type(ask: SupportQuery) -> str:
    """The GEMM that the engine asks for: by switch only."""
    asked = ask.packages.env.get(_GEMM_TYPE, "").lower()
    return "grouped_contiguous" if asked in ("grouped", "grouped_contiguous") else "indexed"


def _by_switch(rule: BackendRule) -> BackendRule:
    return replace(rule, holds=lambda ask: _gemm_type(ask) == rule.offered, wanted=_gemm_type)


def _without(formats: tuple[FormatSupport, ...] | None, weights: frozenset[str]) -> tuple[FormatSupport, ...]:
    return tuple(replace(row, weights=row.weights - weights) for row in formats or ())


def _gemm_of(experts: str) -> ClassChange:
    variant = next(variant for variant in humming.HUMMING.variants if variant.experts == experts)
    capability: Capability = variant.capability
    fields = {
        "rules": tuple(map(_by_switch, capability.rules)),
        "formats": _without(capability.formats, _GROUP_32),
    }
    return ClassChange((experts,), fields)


def _backend(name: str) -> Backend:
    """The backend of the next release with that name of the engine's."""
    return next(backend for backend in VLLM_0_30_0.policy.backends() if backend.engine_name == name)


_AITER, _AITER_TRITON = _backend("AITER_MXFP4_BF16"), _backend("AITER_TRITON_MXFP4_BF16")
_AITER_MONOLITHIC = replace(
    _AITER_TRITON.variants[0],
    capability=replace(
        _AITER_TRITON.variants[0].capability, arch=(gfx("gfx950"),), activations=only("swigluoai")
    ),
)
_CPU = (
    "ArmCPUExpertsInt8",
    "ArmCPUUnquantizedExperts",
    "CPUExpertsFp8",
    "CPUExpertsInt4",
    "CPUExpertsInt8",
    "CPUExpertsMxfp4",
    "CPUUnquantizedExperts",
    "PowerCPUUnquantizedExperts",
    "X86CPUUnquantizedExperts",
)
_FP8 = ("FP8", "FP8 of ModelOpt", "FP8 blocks of ModelOpt", "FP8 of Quark", "FP8 of compressed-tensors")


def _int8(ask: SupportQuery) -> bool:
    weight = ask.problem.scheme.weight
    return weight.name == "int8"


_INT8_FAILS = Condition(
    "int8 weights",
    _int8,
    lambda ask: f"the method fails on {ask.problem.scheme.weight} weights",
    kind="AssertionError",
)


_INT8_GROUPS_FAIL = Condition(
    "int8 weights",
    lambda ask: _int8(ask) and ask.problem.scheme.weight.group != FULL,
    lambda ask: f"the method fails on {ask.problem.scheme.weight} weights",
    kind="AssertionError",
)
_MARLIN_REFUSES = Condition(
    "Marlin does not support the sizes",
    lambda ask: not shape_fits(replace(ask, pads_tiles=ask.problem.act_order != "group")),
    lambda ask: f"Marlin does not support the sizes of {ask.problem.dims}",
)


def _ordered_apart(ask: SupportQuery, chosen: Candidate | None) -> bool:
    marlin = chosen is not None and chosen.backend.engine_name in ("MARLIN", "BATCHED_MARLIN")
    return ask.problem.act_order == "group" and not marlin


_ORDER_WITH_MARLIN_ONLY = LateFailure(
    "activation order",
    _ordered_apart,
    lambda ask, chosen: (
        "the method supports activation order by group with Marlin only and fails on "
        f"{chosen.variant.experts if chosen else 'no backend'}"
    ),
    kind="AssertionError",
)
_SYMMETRIC_WITHOUT_MARLIN = LateFailure(
    "zero points",
    lambda ask, chosen: (
        ask.problem.scheme.weight.zero_point
        and (chosen is None or chosen.backend.engine_name not in ("MARLIN", "BATCHED_MARLIN"))
    ),
    lambda ask, chosen: (
        "the method supports zero points with Marlin only and fails on "
        f"{chosen.variant.experts if chosen else 'no backend'}"
    ),
    kind="AssertionError",
)
_COMPRESSED = "int4 and int8 weights of compressed-tensors"


def _with_order(route: Route) -> Route:
    """The method with activation order by group, whose sizes it does not pad."""
    return replace(
        route,
        name=f"{route.name}, with activation order",
        when=Condition(
            "activation order",
            lambda ask: ask.problem.act_order == "group",
            lambda ask: "the checkpoint has activation order by group",
        ),
        pads_tiles=False,
    )


DIFFERENCE = Difference(
    version="0.28.0",
    without=frozenset({"B12xExperts", "Rdna3WNA16Experts", "ZenCPUExpertsInt8"}),
    backends={"AITER_MXFP4_BF16": {"variants": (*_AITER.variants, _AITER_MONOLITHIC)}},
    classes=(
        *map(_gemm_of, _HUMMING),
        ClassChange(
            ("TritonWNA16Experts",),
            {
                "formats": _without(triton.INTEGER_CAPABILITY.formats, _WITH_ZERO_POINTS),
                "activations": NameSet(SHARED.only, _NO_UNINTERLEAVED),
            },
        ),
        ClassChange(
            ("BatchedTritonExperts",),
            {
                "activations": NameSet(
                    SHARED.only, frozenset({"situ", "swiglustep", "swigluoai_uninterleave"})
                )
            },
        ),
        ClassChange(_CPU, monolithic=True),
        ClassChange(("CPUExpertsFp8",), {"routing": only("Default", "Renormalize", "RenormalizeNaive")}),
    ),
    routes=(
        RouteChange(without=frozenset({"AITER_TRITON_MXFP4_BF16"})),
        RouteChange(
            ("MXFP4 of gpt-oss", "MXFP4 of Quark"),
            orders={
                0: (
                    "FLASHINFER_TRTLLM_MXFP4_BF16",
                    "FLASHINFER_TRTLLM_MXFP4_MXFP8",
                    "AITER_MXFP4_BF16",
                    "AITER_MXFP4_FP8",
                    "AITER_MXFP4_MXFP4",
                    "TRITON",
                    "FLASHINFER_CUTLASS_MXFP4_BF16",
                    "FLASHINFER_CUTLASS_MXFP4_MXFP8",
                    "MARLIN",
                    "BATCHED_MARLIN",
                    "XPU",
                    "EMULATION",
                )
            },
            last_resorts=("CPU",),
        ),
        RouteChange(
            (
                "native MXFP4",
                "MXFP4 experts of DeepSeek-V4",
                "MXFP4 experts of Kimi-K3",
            ),
            orders={2: ("FLASHINFER_TRTLLM_MXFP4_MXFP8", "DEEPGEMM_MXFP4", "MARLIN", "BATCHED_MARLIN")},
        ),
        RouteChange(("MXFP4 of compressed-tensors",), unasked=frozenset({"b12x"})),
        RouteChange(
            _FP8,
            {
                "fit_shard": None,
                "switch_requests": (
                    SwitchRequest(
                        "marlin",
                        lambda ask: is_on(ask.packages, _FORCE_MARLIN),
                        why=f"{_FORCE_MARLIN.name} requests Marlin",
                        switches=frozenset({_FORCE_MARLIN.name}),
                    ),
                    DEEP_GEMM_DEMANDED,
                    AITER_DEMANDED,
                ),
            },
        ),
        RouteChange(("FP8", "FP8 blocks of ModelOpt"), {"key": fp8.blocks_alike}),
        RouteChange(
            (_COMPRESSED,),
            {
                "refusals": (_INT8_FAILS,),
                "late_failures": (
                    CHANNELS_WITH_MARLIN_ONLY,
                    _ORDER_WITH_MARLIN_ONLY,
                    _SYMMETRIC_WITHOUT_MARLIN,
                    WHOLE_GROUPS,
                ),
            },
        ),
        RouteChange(("GPTQ",), {"refusals": (GPTQ_ZERO_POINTS,)}),
        RouteChange(
            ("GPTQ and AWQ with sizes that Marlin does not support",),
            {
                "refusals": (GPTQ_ZERO_POINTS, AWQ_HAS_4_BITS, AWQ_NEEDS_TURING, _INT8_GROUPS_FAIL),
                "when": _MARLIN_REFUSES,
                "passes_act_order": False,
            },
        ),
    ),
    split={_COMPRESSED: _with_order},
)

VLLM_0_28_0 = DIFFERENCE.before(VLLM_0_30_0)

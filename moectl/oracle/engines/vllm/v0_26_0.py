"""vLLM 0.26.0, as its difference from 0.28.0."""

from dataclasses import replace

from ....problem.moe_problem import Align
from ...backend import (
    ANY,
    Backend,
    Capability,
    ExpertsClass,
    FormatSupport,
    NameSet,
    SupportQuery,
    WeightForm,
    only,
)
from ...gpu_archs import CUDA, ROCM, SM10X, SM90, X86_AMX, Arch, Archs, gfx, sm
from ...release import ClassChange, Difference, RouteChange
from ...route import Assignment, Condition, Order, Route
from ..vllm_0_33_0.backends import aiter, cpu, triton, trtllm_bf16, trtllm_fp8
from ..vllm_0_33_0.backends.defaults import NO_NVLINK_EXCHANGE, SHARED, mxfp4_forms
from ..vllm_0_33_0.backends.marlin import shape_fits
from ..vllm_0_33_0.backends.trtllm_fp8 import ROUTED_EXPERTS
from ..vllm_0_33_0.routes.order import CPU
from ..vllm_0_33_0.routes.terms import AWQ_HAS_4_BITS, AWQ_NEEDS_TURING, GPTQ_ZERO_POINTS, WHOLE_GROUPS
from .v0_28_0 import VLLM_0_28_0
from .v0_30_0 import V4_EXPERTS

_COMPRESSED = "int4 and int8 weights of compressed-tensors"
_ORDERED = f"{_COMPRESSED}, with activation order"
_INT8 = "int8 weights and activations"
_FLYDSL = "int4 weights of compressed-tensors, FlyDSL asked for"
_ASSIGNED = "GPTQ and AWQ with sizes that Marlin does not support"
_GPT_OSS = ("MXFP4 of gpt-oss", "MXFP4 of Quark")
_DEEPSEEK_V4 = "MXFP4 experts of DeepSeek-V4"
_PLAIN = ("unquantized experts", "unquantized experts with adapters")
_MXFP8 = ("MXFP8 of ModelOpt", "MXFP8 under its own name", "MXFP8 of compressed-tensors", "MXFP8 of Quark")


def _route(name: str) -> Route:
    """The route of the next release."""
    return next(route for route in VLLM_0_28_0.policy.routes if route.name == name)


def _backends(route: str) -> dict[str, Backend]:
    """The backends of a route of the next release, by the engine's names."""
    return {backend.engine_name: backend for backend in _route(route).backends()}


def _unchecked(backend: Backend, where: Archs | None = None) -> Assignment:
    return Assignment(backend, backend.variants[0], backend.engine_name, where)


# ------------------------------------------------------------------------------- experts classes

_NO_SITU = only(*(SHARED.only or frozenset()) - {"situ"})
_X86 = (Arch("cpu"),)


def _activations(*experts: str, names: NameSet) -> ClassChange:
    return ClassChange(experts, {"activations": names})


_CLASSES = (
    ClassChange(
        ("MarlinExperts", "BatchedMarlinExperts"),
        {"activations": _NO_SITU, "parallel": NO_NVLINK_EXCHANGE, "rules": ()},
    ),
    ClassChange(
        ("BatchedHummingGroupedExperts", "HummingGroupedExperts", "HummingIndexedExperts"),
        {
            "activations": only(*(_NO_SITU.only or frozenset()) - {"swigluoai_uninterleave"}),
            "invariant": False,
        },
    ),
    ClassChange(
        ("TritonExperts",),
        {
            "activations": _NO_SITU,
            "rules": (),
            "formats": tuple(
                replace(row, where=(sm(75),)) if "int8 per channel" in row.weights else row
                for row in triton.PLAIN_CAPABILITY.formats or ()
                if "int8 per tensor" not in row.weights
            ),
        },
    ),
    ClassChange(
        (
            "Int4EmulationTritonExperts",
            "Mxfp8EmulationTritonExperts",
            "Mxfp8NativeTritonExperts",
            "OCP_MXQuantizationEmulationTritonExperts",
        ),
        {"activations": _NO_SITU, "rules": (), "needs": ()},
    ),
    ClassChange(
        ("BatchedTritonExperts",),
        {
            "arch": (CUDA, ROCM),
            "formats": tuple(
                replace(row, where=(sm(89), gfx("gfx90a", "gfx942", "gfx950"))) if row.where else row
                for row in triton.BATCHED_TRITON.variants[0].capability.formats or ()
            ),
        },
    ),
    *(
        ClassChange(
            (variant.experts,),
            {"rules": tuple(rule for rule in variant.capability.rules if rule is not ROUTED_EXPERTS)},
        )
        for backend in (trtllm_bf16.TRTLLM_PLAIN, trtllm_fp8.TRTLLM_FP8)
        for variant in backend.variants
    ),
    ClassChange(
        ("CPUExpertsFp8", "CPUExpertsInt4", "CPUExpertsMxfp4"), {"arch": _X86}, of=frozenset({"CPU"})
    ),
    ClassChange(("CPUExpertsInt8",), {"arch": _X86, "rules": ()}),
    ClassChange(("HPCExperts",), {"arch": (SM90, SM10X)}),
    ClassChange(
        ("AiterMxfp8Experts",),
        {"activations": aiter.AITER_MXFP8.variants[0].capability.activations, "rules": ()},
    ),
    ClassChange(("TrtLlmMxint4ExpertsMonolithic",), {"zero_points": True, "bias": True}),
    ClassChange(("TrtLlmMxfp4ExpertsMonolithic",), {"routing": only("Renormalize", "RenormalizeNaive")}),
    _activations(
        "TrtLlmMxfp4ExpertsMonolithic", "TrtLlmMxfp4ExpertsModular", names=only("silu", "swigluoai")
    ),
    ClassChange(("FlashInferCuteDSLExperts",), {"activations": only("silu"), "ungated": False}),
    _activations("FlashInferExperts", names=only("silu", "gelu_tanh", "relu2_no_mul", "swigluoai")),
    _activations("FlashInferB12xExperts", names=only("silu", "relu2_no_mul")),
    _activations("DeepGemmFP4Experts", names=only("silu", "swiglustep")),
    _activations("AiterExperts", names=only("silu", "gelu", "swigluoai", "swigluoai_uninterleave")),
    ClassChange(
        ("CutlassExpertsFp4",),
        {
            "activations": only(*(_NO_SITU.only or frozenset()) - {"swigluoai_uninterleave"}),
            "invariant": False,
        },
    ),
    _activations(
        "CutlassExpertsMxfp4",
        names=only("silu", "gelu", "swigluoai", "swiglustep", "silu_no_mul", "gelu_no_mul", "relu2_no_mul"),
    ),
    _activations(
        "TritonOrCutlassExperts",
        "CutlassBatchedExpertsFp8",
        names=only("silu", "gelu", "gelu_tanh", "swigluoai"),
    ),
    _activations("CutlassExpertsW4A8Fp8", names=only("silu", "gelu", "swigluoai")),
    ClassChange(
        ("XPUExpertsMxFp4",), {"formats": (FormatSupport(frozenset({"mxfp4 group 32"}), only("a16")),)}
    ),
)

# ------------------------------------------------------------------------------------- routes

_CPU_KERNELS = Capability(formats=cpu.CPU_BF16.variants[0].capability.formats, arch=_X86)

_UNFUSED_ON_ROCM = replace(
    triton.TRITON_UNFUSED,
    variants=tuple(
        replace(
            variant,
            capability=replace(
                variant.capability,
                arch=tuple(arch for arch in variant.capability.arch or () if arch.platform == "rocm"),
            ),
        )
        for variant in triton.TRITON_UNFUSED.variants
    ),
)


_CPU_BF16 = replace(
    cpu.CPU_BF16,
    variants=(
        ExpertsClass("SGLFusedMOE", replace(_CPU_KERNELS, arch=(X86_AMX,)), monolithic=True),
        ExpertsClass("CPUFusedMOE", _CPU_KERNELS, monolithic=True),
    ),
)
"""Chosen by platform alone; the class is created after the weights are loaded."""

_TRITON_INT = _unchecked(_backends(_COMPRESSED)["TRITON"])
_PLAIN_INT8, _MXFP8_ROUTE = _backends(_INT8), _backends(_MXFP8[0])
_TRITON_MXFP8, _EMULATION_MXFP8 = _MXFP8_ROUTE["TRITON_MXFP8"], _MXFP8_ROUTE["EMULATION"]


def _misfits(ask: SupportQuery) -> bool:
    """True when Marlin does not support the sizes, which are not padded with activation order."""
    return not shape_fits(replace(ask, pads_tiles=ask.problem.act_order != "group"))


def _beside_marlin(route: Route) -> Route:
    """The separate method for sizes that Marlin does not support, which runs Triton without asking."""
    return replace(
        route,
        name=f"{_COMPRESSED} with sizes that Marlin does not support",
        method="CompressedTensorsWNA16MoEMethod",
        when=Condition(
            "Marlin does not support the sizes",
            lambda ask: _misfits(ask) and not (ask.device.platform == "rocm" and ask.request == "emulation"),
            lambda ask: f"Marlin does not support the sizes of {ask.problem.dims}",
        ),
        orders=(),
        moves=(),
        names={},
        pads_tiles=False,
        assigned=(_TRITON_INT,),
        refusals=(
            Condition(
                "activation order",
                lambda ask: ask.problem.act_order == "group",
                lambda ask: "the method does not support activation order by group; use a checkpoint without",
            ),
            Condition(
                "scale groups",
                lambda ask: ask.problem.scheme.weight.group <= 0 or ask.zero_points,
                lambda ask: f"the method supports only symmetric groups, not {ask.problem.scheme.weight}",
                kind="AssertionError",
            ),
        ),
        late_failures=(WHOLE_GROUPS,),
    )


def _on_cpu(route: Route) -> Route:
    """Unquantized experts on CPUs, whose kernels are used without checks, whatever is requested."""
    kernels = [
        Assignment(_CPU_BF16, variant, _CPU_BF16.engine_name, variant.capability.arch)
        for variant in _CPU_BF16.variants
    ]
    return replace(
        route,
        name="unquantized experts on CPUs",
        when=Condition(
            "a CPU",
            lambda ask: ask.device.platform == "cpu",
            lambda ask: "experts run on a CPU",
        ),
        assigned=tuple(kernels),
    )


def _native_as_gpt_oss() -> RouteChange:
    """Native MXFP4 had the method of gpt-oss."""
    oss = _route(_GPT_OSS[0])
    shared = ("method", "act", "orders", "moves", "last_resorts", "rounds_by_activation")
    return RouteChange(("native MXFP4",), {name: getattr(oss, name) for name in shared})


DIFFERENCE = Difference(
    version="0.26.0",
    without=frozenset({"AiterW4A16ExpertsMonolithic", "ArmCPUExpertsInt8"}),
    classes=_CLASSES,
    backends={
        "FLASHINFER_TRTLLM_MXFP4_BF16": {"forms": (WeightForm("trtllm-mxfp4", Align(256, 256)),)},
        "FLASHINFER_TRTLLM_MXFP4_MXFP8": {"forms": (WeightForm("trtllm-mxfp4", Align(256, 256)),)},
        "AITER_MXFP4_BF16": {"forms": mxfp4_forms("aiter-mxfp4")},
        "TRITON_MXFP8": {
            "variants": (*_TRITON_MXFP8.variants, *_EMULATION_MXFP8.variants),
        },
    },
    routes=(
        RouteChange((V4_EXPERTS,), {"storages": only("mxfp4")}),
        RouteChange((), {"platforms": ANY}),
        RouteChange(_PLAIN, {"batched_requests": frozenset()}, names={"batched_triton": ()}),
        RouteChange(
            ("FP8 of ModelOpt", "FP8 blocks of ModelOpt"),
            {"minimum": 89},
        ),
        RouteChange(_MXFP8, without=frozenset({"EMULATION"})),
        RouteChange(
            _MXFP8,
            {
                "fallbacks": (
                    _unchecked(_TRITON_MXFP8, _TRITON_MXFP8.variants[0].capability.arch),
                    _unchecked(_EMULATION_MXFP8, (ROCM,)),
                ),
            },
            unranked=frozenset({"TRITON_MXFP8"}),
        ),
        _native_as_gpt_oss(),
        RouteChange((*_GPT_OSS, "native MXFP4"), last_resorts=("TRITON_UNFUSED",), more=(_UNFUSED_ON_ROCM,)),
        RouteChange((_DEEPSEEK_V4,), orders={0: ("AITER_MXFP4_BF16",)}),
        RouteChange(
            (_COMPRESSED, _ORDERED, "GPTQ", "AWQ"), {"wordless": "KeyError"}, without=frozenset({"TRITON"})
        ),
        RouteChange((_COMPRESSED, _ORDERED), {"refusals": (), "late_failures": (WHOLE_GROUPS,)}),
        RouteChange(("GPTQ",), {"refusals": (GPTQ_ZERO_POINTS,)}),
        RouteChange(
            (_ASSIGNED,),
            {
                "orders": (),
                "moves": (),
                "names": {},
                "assigned": (_TRITON_INT,),
                "refusals": (GPTQ_ZERO_POINTS, AWQ_HAS_4_BITS, AWQ_NEEDS_TURING),
            },
        ),
        RouteChange(
            (_INT8,),
            {
                "orders": (
                    Order(tuple(_PLAIN_INT8[name] for name in ("CPU", "TRITON", "HUMMING")), CPU),
                    *_route(_INT8).orders,
                )
            },
        ),
        RouteChange(
            (f"{_INT8} of Quark",),
            {
                "orders": (),
                "names": {},
                "assigned": (_unchecked(_PLAIN_INT8["TRITON"]),),
            },
        ),
    ),
    unknown_routes=frozenset(
        {
            "MXFP4 experts of Kimi-K3",
            "MXFP4 experts of Kimi-K3 with AITER",
        }
    ),
    split={_ORDERED: _beside_marlin, "unquantized experts with adapters": _on_cpu},
)

VLLM_0_26_0 = DIFFERENCE.before(VLLM_0_28_0)

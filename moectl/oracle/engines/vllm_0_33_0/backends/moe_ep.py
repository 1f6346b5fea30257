"""FlashInfer's MoE-EP kernels: dispatch, both GEMMs and combine in one launch; taken on request only."""

from dataclasses import replace

from ....backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    ParallelSupport,
    WeightForm,
    but,
    only,
)
from ....gpu_archs import sm

_CAPABILITY = Capability(
    arch=(sm(100, 100), sm(103, 103)),
    needs=(PackageNeed("flashinfer", code="other"),),
    formats=(
        FormatSupport(frozenset({"mxfp4 group 32"}), only("a16")),
        FormatSupport(frozenset({"nvfp4 group 16"}), only("nvfp4")),
    ),
    activations=only("silu"),
    ungated=False,
    parallel=ParallelSupport(exchange=but("deepep_low_latency", "nixl_ep"), alone=False),
    bias=False,
    dtypes=only("bf16"),
    codes={"expert bias": "other"},
    rules=(
        BackendRule(
            question="activation parameters",
            group="scheme",
            code="other",
            holds=lambda ask: ask.problem.activation.alpha is None,
            wanted=lambda ask: str(ask.problem.activation),
            offered="a plain or clamped SiLU",
        ),
    ),
)
MOE_EP_CUTEDSL = Backend(
    name="flashinfer_moe_ep_cutedsl",
    engine_name="FLASHINFER_MOE_EP_CUTEDSL",
    variants=(ExpertsClass("FlashInferMoeEpExperts", _CAPABILITY),),
    forms=(WeightForm("plain"),),
)
MOE_EP_DEEP_GEMM = Backend(
    name="flashinfer_moe_ep_mega_deep_gemm",
    engine_name="FLASHINFER_MOE_EP_DEEP_GEMM",
    variants=(
        ExpertsClass(
            "FlashInferMoeEpExperts",
            replace(
                _CAPABILITY,
                formats=(FormatSupport(frozenset({"mxfp4 group 32"}), only("a16")),),
                routing=only("DeepseekV4"),
                parallel=replace(_CAPABILITY.parallel, eplb=False),
                codes={"expert bias": "other", "routing method": "other", "expert balancing": "other"},
            ),
        ),
    ),
    forms=(WeightForm("plain"),),
)

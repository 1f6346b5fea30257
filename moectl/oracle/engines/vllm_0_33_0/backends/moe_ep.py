"""FlashInfer's MoE-EP kernels: dispatch, both GEMMs and combine in one launch; taken on request only."""

from dataclasses import replace

from ....archs import sm
from ....backend import Backend, Capability, Form, Need, Offer, Rule, Spread, Variant, but, only

_CAPABILITY = Capability(
    arch=(sm(100, 100), sm(103, 103)),
    needs=(Need("flashinfer", code="other"),),
    offers=(
        Offer(frozenset({"mxfp4 group 32"}), only("a16")),
        Offer(frozenset({"nvfp4 group 16"}), only("nvfp4")),
    ),
    activations=only("silu"),
    ungated=False,
    spread=Spread(exchange=but("deepep_low_latency", "nixl_ep"), alone=False),
    bias=False,
    dtypes=only("bf16"),
    codes={"expert bias": "other"},
    rules=(
        Rule(
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
    variants=(Variant("FlashInferMoeEpExperts", _CAPABILITY),),
    forms=(Form("plain"),),
)
MOE_EP_DEEP_GEMM = Backend(
    name="flashinfer_moe_ep_mega_deep_gemm",
    engine_name="FLASHINFER_MOE_EP_DEEP_GEMM",
    variants=(
        Variant(
            "FlashInferMoeEpExperts",
            replace(
                _CAPABILITY,
                offers=(Offer(frozenset({"mxfp4 group 32"}), only("a16")),),
                routing=only("DeepseekV4"),
                spread=replace(_CAPABILITY.spread, eplb=False),
                codes={"expert bias": "other", "routing method": "other", "expert balancing": "other"},
            ),
        ),
    ),
    forms=(Form("plain"),),
)

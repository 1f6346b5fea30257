"""Intel GPU kernels."""

from dataclasses import replace

from ....archs import XPU
from ....backend import Backend, Capability, Form, Offer, Variant, only
from .defaults import mxfp4_forms

_ACTIVATIONS = only("silu", "gelu", "gelu_tanh", "swigluoai", "relu2_no_mul")

_PLAIN = Capability(
    arch=(XPU,),
    offers=(Offer(frozenset({"fp8 per tensor"}), only("a16", "fp8 per tensor dynamic")),),
    activations=_ACTIVATIONS,
)
XPU_FP8 = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        Variant("XPUExpertsFp8", _PLAIN),
        Variant(
            "XPUExpertsMxFp8",
            replace(_PLAIN, offers=(Offer(frozenset({"mxfp8 group 32"}), only("a16", "mxfp8")),)),
        ),
        Variant(
            "XPUExpertsBlockFp8",
            replace(_PLAIN, offers=(Offer(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),)),
        ),
    ),
    forms=(Form("xpu-fp8"),),
)
XPU_MXFP4 = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        Variant(
            "XPUExpertsMxFp4",
            Capability(
                arch=(XPU,),
                offers=(Offer(frozenset({"mxfp4 group 32"}), only("a16", "mxfp4")),),
                activations=_ACTIVATIONS,
            ),
        ),
    ),
    forms=mxfp4_forms("xpu-mxfp4"),
)
XPU_INT4 = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        Variant(
            "XPUExpertsWNA16",
            Capability(
                arch=(XPU,),
                offers=(Offer(frozenset({"int4 group", "int4 group 32"})),),
                activations=_ACTIVATIONS,
            ),
        ),
    ),
    forms=(Form("xpu-int4"),),
)

XPU_PLAIN = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        Variant("XPUExperts", replace(_PLAIN, offers=(Offer(frozenset({"bf16"})), *(_PLAIN.offers or ())))),
    ),
    forms=(Form("xpu-transposed"),),
)

"""Intel GPU kernels."""

from dataclasses import replace

from ..backend import XPU, Backend, Capability, Form, Offer, Variant, only
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
    forms=(Form("plain"),),
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


def _standard(experts: str, *offers: Offer) -> Variant:
    return Variant(experts, Capability(arch=(XPU,), offers=offers, activations=_ACTIVATIONS))


_TENSOR = Offer(frozenset({"fp8 per tensor"}), only("a16", "fp8 per tensor dynamic"))

XPU_PLAIN = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(_standard("XPUExperts", Offer(frozenset({"bf16"})), _TENSOR),),
    forms=(Form("xpu-transposed"),),
)
XPU_FP8 = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        _standard("XPUExpertsFp8", _TENSOR),
        _standard("XPUExpertsMxFp8", Offer(frozenset({"mxfp8 group 32"}), only("a16", "mxfp8"))),
        _standard(
            "XPUExpertsBlockFp8",
            Offer(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),
        ),
    ),
    forms=(Form("xpu-fp8"),),
)

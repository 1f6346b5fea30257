"""Intel GPU kernels."""

from ...problem import Align
from ..backend import XPU, Backend, Capability, Offer, Rounding, Variant, only

_ACTIVATIONS = only("silu", "gelu", "gelu_tanh", "swigluoai", "relu2_no_mul")

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
    rounding=(Rounding(Align(1, 64), weights=frozenset({"mxfp4"})),),
    layout="xpu-mxfp4",
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
    layout="xpu-int4",
)

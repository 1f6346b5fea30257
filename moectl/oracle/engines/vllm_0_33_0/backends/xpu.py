"""Intel GPU kernels."""

from dataclasses import replace

from ....backend import Backend, Capability, ExpertsClass, FormatSupport, WeightForm, only
from ....gpu_archs import XPU
from .defaults import mxfp4_forms

_ACTIVATIONS = only("silu", "gelu", "gelu_tanh", "swigluoai", "relu2_no_mul")

_PLAIN = Capability(
    arch=(XPU,),
    formats=(FormatSupport(frozenset({"fp8 per tensor"}), only("a16", "fp8 per tensor dynamic")),),
    activations=_ACTIVATIONS,
)
XPU_FP8 = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        ExpertsClass("XPUExpertsFp8", _PLAIN),
        ExpertsClass(
            "XPUExpertsMxFp8",
            replace(_PLAIN, formats=(FormatSupport(frozenset({"mxfp8 group 32"}), only("a16", "mxfp8")),)),
        ),
        ExpertsClass(
            "XPUExpertsBlockFp8",
            replace(
                _PLAIN,
                formats=(FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),),
            ),
        ),
    ),
    forms=(WeightForm("xpu-fp8"),),
)
XPU_MXFP4 = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        ExpertsClass(
            "XPUExpertsMxFp4",
            Capability(
                arch=(XPU,),
                formats=(FormatSupport(frozenset({"mxfp4 group 32"}), only("a16", "mxfp4")),),
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
        ExpertsClass(
            "XPUExpertsWNA16",
            Capability(
                arch=(XPU,),
                formats=(FormatSupport(frozenset({"int4 group", "int4 group 32"})),),
                activations=_ACTIVATIONS,
            ),
        ),
    ),
    forms=(WeightForm("xpu-int4"),),
)

XPU_PLAIN = Backend(
    name="xpu",
    engine_name="XPU",
    variants=(
        ExpertsClass(
            "XPUExperts",
            replace(_PLAIN, formats=(FormatSupport(frozenset({"bf16"})), *(_PLAIN.formats or ()))),
        ),
    ),
    forms=(WeightForm("xpu-transposed"),),
)

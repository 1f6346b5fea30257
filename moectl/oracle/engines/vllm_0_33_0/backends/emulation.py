"""Emulation: weights are dequantized and multiplied in 16 bits. Slow, but runs almost everywhere."""

from dataclasses import replace

from .....problem.moe_problem import Align
from .....problem.schemes import MXFP8_ACT
from ....backend import Backend, ExpertsClass, FormatSupport, PackageNeed, WeightForm, but
from ....gpu_archs import CUDA, ROCM
from .triton import MXFP8_CAPABILITY, PLAIN_CAPABILITY

EMULATION_MX = Backend(
    name="emulation",
    engine_name="EMULATION",
    variants=(
        ExpertsClass(
            "OCP_MXQuantizationEmulationTritonExperts",
            replace(PLAIN_CAPABILITY, formats=None, needs=(PackageNeed("quark", code="package"),)),
        ),
    ),
    follows_declared=True,
    forms=(WeightForm("plain", Align(32, 32)),),
)
EMULATION_MXFP8 = Backend(
    name="emulation",
    engine_name="EMULATION",
    variants=(ExpertsClass("Mxfp8EmulationTritonExperts", replace(MXFP8_CAPABILITY, arch=None)),),
    act=MXFP8_ACT,
    forms=(WeightForm("plain"),),
)
EMULATION_INT4 = Backend(
    name="emulation",
    engine_name="EMULATION",
    variants=(
        ExpertsClass(
            "Int4EmulationTritonExperts",
            replace(
                PLAIN_CAPABILITY,
                arch=(CUDA, ROCM),
                formats=(
                    FormatSupport(
                        frozenset(
                            {
                                "int4 group",
                                "int4 group 32",
                                "int4 group with zero points",
                                "int4 group 32 with zero points",
                            }
                        )
                    ),
                ),
                checkpoints=but("moe_wna16"),
            ),
        ),
    ),
    forms=(WeightForm("plain"),),
)

"""Emulation: weights are decoded and multiplied in 16 bits; slow, and almost everywhere."""

from dataclasses import replace

from .....problem import Align
from .....schemes import MXFP8_ACT
from ....archs import CUDA, ROCM
from ....backend import Backend, Form, Need, Offer, Variant, but
from .triton import MXFP8_CAPABILITY, PLAIN_CAPABILITY

EMULATION_MX = Backend(
    name="emulation",
    engine_name="EMULATION",
    variants=(
        Variant(
            "OCP_MXQuantizationEmulationTritonExperts",
            replace(PLAIN_CAPABILITY, offers=None, needs=(Need("quark", code="package"),)),
        ),
    ),
    follows_declared=True,
    forms=(Form("plain", Align(32, 32)),),
)
EMULATION_MXFP8 = Backend(
    name="emulation",
    engine_name="EMULATION",
    variants=(Variant("Mxfp8EmulationTritonExperts", replace(MXFP8_CAPABILITY, arch=None)),),
    act=MXFP8_ACT,
    forms=(Form("plain"),),
)
EMULATION_INT4 = Backend(
    name="emulation",
    engine_name="EMULATION",
    variants=(
        Variant(
            "Int4EmulationTritonExperts",
            replace(
                PLAIN_CAPABILITY,
                arch=(CUDA, ROCM),
                offers=(
                    Offer(
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
    forms=(Form("plain"),),
)

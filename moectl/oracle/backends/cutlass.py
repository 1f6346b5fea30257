"""vLLM's own CUTLASS grouped GEMM for MXFP4 weights and activations."""

from ...problem import Align
from ...schemes import MXFP4_ACT
from ..backend import Backend, Capability, Form, Offer, Spread, Variant, but, only, sm
from .defaults import SHARED

CUTLASS_MXFP4 = Backend(
    name="cutlass",
    engine_name="CUTLASS_MXFP4_MXFP4",
    variants=(
        Variant(
            "CutlassExpertsMxfp4",
            Capability(
                # What the compiled library of the release supports.
                arch=(sm(100, 119),),
                offers=(Offer(frozenset({"mxfp4 group 32"}), only("mxfp4")),),
                activations=SHARED,
                spread=Spread(
                    exchange=but(
                        "flashinfer_nvlink_two_sided",
                        "flashinfer_all2allv",
                        "flashinfer_nvlink_one_sided",
                        "deepep_high_throughput",
                    )
                ),
            ),
        ),
    ),
    act=MXFP4_ACT,
    forms=(Form("cutlass-sm100", Align(128, 128)),),
)

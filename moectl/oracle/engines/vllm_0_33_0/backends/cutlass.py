"""vLLM's own CUTLASS grouped GEMMs: FP8, int4 with FP8 activations, MXFP4."""

from dataclasses import replace

from .....padding import padding
from .....schemes import MXFP4, MXFP4_ACT
from ....archs import SM90, sm
from ....backend import Backend, Capability, Form, Offer, Spread, Variant, but, only
from .defaults import SHARED

_STANDARD_EXCHANGE = Spread(
    exchange=but(
        "flashinfer_nvlink_two_sided",
        "flashinfer_all2allv",
        "flashinfer_nvlink_one_sided",
        "deepep_high_throughput",
    )
)
_FP8 = Capability(
    # The compiled library groups GEMMs from SM90 on, its Python wrapper ends at SM109.
    arch=(sm(90, 109),),
    offers=(
        Offer(frozenset({"fp8 per channel"}), only("fp8 per token dynamic")),
        Offer(frozenset({"fp8 per tensor"}), only("fp8 per tensor dynamic", "fp8 per tensor static")),
    ),
    activations=SHARED,
    ungated=False,
)

CUTLASS_FP8 = Backend(
    name="cutlass",
    engine_name="VLLM_CUTLASS",
    variants=(
        # Small batches go to Triton at run time, so both must serve the deployment.
        Variant("TritonOrCutlassExperts", replace(_FP8, spread=_STANDARD_EXCHANGE)),
    ),
    forms=(Form("plain-fp8"),),
)
BATCHED_CUTLASS_FP8 = Backend(
    name="batched_cutlass",
    engine_name="BATCHED_VLLM_CUTLASS",
    variants=(Variant("CutlassBatchedExpertsFp8", _FP8, batched=True),),
    forms=(Form("plain-fp8"),),
)
CUTLASS_W4A8 = Backend(
    name="cutlass",
    engine_name="CUTLASS",
    variants=(
        Variant(
            "CutlassExpertsW4A8Fp8",
            Capability(
                arch=(SM90,),
                offers=(Offer(frozenset({"int4 group"}), only("fp8 per token dynamic")),),
                activations=SHARED,
                ungated=False,
                dtypes=only("bf16"),
            ),
        ),
    ),
    forms=(Form("cutlass-w4a8"),),
)
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
                spread=_STANDARD_EXCHANGE,
            ),
        ),
    ),
    act=MXFP4_ACT,
    forms=(Form("cutlass-mxfp4", padding("cutlass-mxfp4", MXFP4)),),
)

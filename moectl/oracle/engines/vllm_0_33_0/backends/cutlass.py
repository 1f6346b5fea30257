"""vLLM's own CUTLASS grouped GEMMs: FP8, int4 with FP8 activations, MXFP4."""

from dataclasses import replace

from .....problem.padding import padding
from .....problem.schemes import MXFP4, MXFP4_ACT
from ....backend import (
    Backend,
    Capability,
    ExpertsClass,
    FormatSupport,
    ParallelSupport,
    WeightForm,
    but,
    only,
)
from ....gpu_archs import SM90, sm
from .defaults import SHARED

_STANDARD_EXCHANGE = ParallelSupport(
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
    formats=(
        FormatSupport(frozenset({"fp8 per channel"}), only("fp8 per token dynamic")),
        FormatSupport(frozenset({"fp8 per tensor"}), only("fp8 per tensor dynamic", "fp8 per tensor static")),
    ),
    activations=SHARED,
    ungated=False,
)

CUTLASS_FP8 = Backend(
    name="cutlass",
    engine_name="VLLM_CUTLASS",
    variants=(
        # Small batches go to Triton at run time, so both must serve the deployment.
        ExpertsClass("TritonOrCutlassExperts", replace(_FP8, parallel=_STANDARD_EXCHANGE)),
    ),
    forms=(WeightForm("plain-fp8"),),
)
BATCHED_CUTLASS_FP8 = Backend(
    name="batched_cutlass",
    engine_name="BATCHED_VLLM_CUTLASS",
    variants=(ExpertsClass("CutlassBatchedExpertsFp8", _FP8, batched=True),),
    forms=(WeightForm("plain-fp8"),),
)
CUTLASS_W4A8 = Backend(
    name="cutlass",
    engine_name="CUTLASS",
    variants=(
        ExpertsClass(
            "CutlassExpertsW4A8Fp8",
            Capability(
                arch=(SM90,),
                formats=(FormatSupport(frozenset({"int4 group"}), only("fp8 per token dynamic")),),
                activations=SHARED,
                ungated=False,
                dtypes=only("bf16"),
            ),
        ),
    ),
    forms=(WeightForm("cutlass-w4a8"),),
)
CUTLASS_MXFP4 = Backend(
    name="cutlass",
    engine_name="CUTLASS_MXFP4_MXFP4",
    variants=(
        ExpertsClass(
            "CutlassExpertsMxfp4",
            Capability(
                # What the compiled library of the release supports.
                arch=(sm(100, 119),),
                formats=(FormatSupport(frozenset({"mxfp4 group 32"}), only("mxfp4")),),
                activations=SHARED,
                parallel=_STANDARD_EXCHANGE,
            ),
        ),
    ),
    act=MXFP4_ACT,
    forms=(WeightForm("cutlass-mxfp4", padding("cutlass-mxfp4", MXFP4)),),
)

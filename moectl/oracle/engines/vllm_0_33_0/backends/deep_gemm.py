"""DeepGEMM: FP8 activations with FP8 weights in blocks, or with FP4 weights on Blackwell."""

from .....problem.moe_problem import Align
from .....problem.schemes import FP8_ACT_GROUP_128, MXFP8_ACT
from ....backend import (
    Backend,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    WeightForm,
    only,
)
from ....gpu_archs import SM10X, SM12X, SM90
from ..variables import VARIABLES
from .defaults import NO_NVLINK_EXCHANGE

_NEEDS = (PackageNeed("deep_gemm"),)
_SWITCHES = (EnvironmentSwitch(VARIABLES["VLLM_USE_DEEP_GEMM"]),)
_FP8 = (FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),)
_FORMS = (WeightForm("deep-gemm-fp8"),)

PLAIN_DEEP_GEMM = ExpertsClass(
    "DeepGemmExperts",
    Capability(
        arch=(SM90, SM10X, SM12X),
        needs=_NEEDS,
        switches=_SWITCHES,
        formats=(
            FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),
            FormatSupport(frozenset({"mxfp8 group 32"}), only("mxfp8"), (SM10X,)),
        ),
        activations=only("silu", "swiglustep", "swigluoai_uninterleave"),
        ungated=False,
        parallel=NO_NVLINK_EXCHANGE,
    ),
)
"""DeepGEMM alone, without the engine's fallback to Triton for small layers."""
DEEP_GEMM_MXFP8 = Backend(
    name="deep_gemm",
    engine_name="DEEPGEMM",
    variants=(PLAIN_DEEP_GEMM,),
    act=MXFP8_ACT,
    forms=(WeightForm("deep-gemm"),),
)
DEEP_GEMM_FP8 = Backend(
    name="deep_gemm",
    engine_name="DEEPGEMM",
    variants=(
        ExpertsClass(
            # Small batches go to Triton at run time, so both must serve the deployment.
            "TritonOrDeepGemmExperts",
            Capability(
                arch=(SM90, SM10X, SM12X),
                needs=_NEEDS,
                switches=_SWITCHES,
                formats=_FP8,
                activations=only("silu", "swiglustep", "swigluoai_uninterleave"),
                ungated=False,
                parallel=NO_NVLINK_EXCHANGE,
            ),
        ),
    ),
    forms=_FORMS,
)
BATCHED_DEEP_GEMM = Backend(
    name="batched_deep_gemm",
    engine_name="BATCHED_DEEPGEMM",
    variants=(
        ExpertsClass(
            "BatchedDeepGemmExperts",
            Capability(
                arch=(SM90, SM10X, SM12X),
                needs=_NEEDS,
                switches=_SWITCHES,
                formats=_FP8,
                activations=only("silu"),
                ungated=False,
            ),
            batched=True,
        ),
    ),
    forms=_FORMS,
)
DEEP_GEMM_MXFP4 = Backend(
    name="deep_gemm",
    engine_name="DEEPGEMM_MXFP4",
    variants=(
        ExpertsClass(
            "DeepGemmFP4Experts",
            Capability(
                arch=(SM10X, SM12X),
                needs=_NEEDS,
                switches=_SWITCHES,
                formats=(FormatSupport(frozenset({"mxfp4 group 32"}), only("fp8 group 128 dynamic")),),
                activations=only("silu", "swiglustep", "situ"),
                ungated=False,
                parallel=NO_NVLINK_EXCHANGE,
            ),
        ),
    ),
    act=FP8_ACT_GROUP_128,
    forms=(WeightForm("deep-gemm", Align(128, 128)),),
)

"""Model-specific megakernels: dispatch, both GEMMs and combine in one launch, without the expert layer.

Only DeepSeek-V4 and Kimi-K3 have them, and only when asked for by name.
"""

from .....problem.schemes import MXFP8_ACT
from ....backend import (
    Backend,
    BackendRule,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    ParallelSupport,
    WeightForm,
    only,
)
from ....gpu_archs import SM10X, gfx
from ..variables import VARIABLES

_MULTIPLE = 128
_MXFP4 = frozenset({"mxfp4 group 32"})

DEEP_GEMM_MEGA = Backend(
    name="deep_gemm_mega_moe",
    engine_name="DEEPGEMM_MEGA_MOE",
    variants=(
        ExpertsClass(
            "DeepGemmMegaMoEExperts",
            Capability(
                arch=(SM10X,),
                needs=(PackageNeed("deep_gemm"),),
                formats=(FormatSupport(_MXFP4, only("mxfp8")),),
                activations=only("silu", "situ"),
                ungated=False,
                routing=only("DeepseekV4", "DeepSeekV3"),
                parallel=ParallelSupport(alone=False),
                rules=(
                    BackendRule(
                        question="sizes",
                        group="shape",
                        code="shape",
                        holds=lambda ask: (
                            not (
                                ask.problem.dims.hidden % _MULTIPLE
                                or ask.problem.dims.intermediate % _MULTIPLE
                            )
                        ),
                        wanted=lambda ask: (
                            f"hidden {ask.problem.dims.hidden}, intermediate {ask.problem.dims.intermediate}"
                        ),
                        offered=f"multiples of {_MULTIPLE}",
                    ),
                    BackendRule(
                        question="expert groups",
                        group="scheme",
                        code="routing_method",
                        holds=lambda ask: ask.problem.routing.groups in (None, 1),
                        wanted=lambda ask: str(ask.problem.routing.groups or 1),
                        offered="1",
                    ),
                ),
            ),
        ),
    ),
    act=MXFP8_ACT,
    forms=(WeightForm("deep-gemm-mega"),),
)
AITER_MEGA = Backend(
    name="aiter_mega_moe",
    engine_name="AITER_MEGA_MOE",
    variants=(
        ExpertsClass(
            "DeepseekV4AiterMegaMoEExperts",
            Capability(
                arch=(gfx("gfx950"),),
                needs=(PackageNeed("aiter"),),
                switches=(
                    EnvironmentSwitch(VARIABLES["VLLM_ROCM_USE_AITER"]),
                    EnvironmentSwitch(VARIABLES["VLLM_ROCM_USE_AITER_MOE"]),
                ),
                formats=(FormatSupport(_MXFP4),),
                activations=only("silu"),
                ungated=False,
                routing=only("DeepseekV4"),
                parallel=ParallelSupport(
                    exchange=only("mori_high_throughput", "mori_low_latency"), eplb=False, alone=False
                ),
                rules=(
                    BackendRule(
                        question="tensor parallel ranks",
                        group="parallel",
                        code="parallel",
                        holds=lambda ask: ask.problem.parallel.tp == 1,
                        wanted=lambda ask: str(ask.problem.parallel.tp),
                        offered="1",
                    ),
                ),
            ),
        ),
    ),
    forms=(WeightForm("aiter-mega"),),
)

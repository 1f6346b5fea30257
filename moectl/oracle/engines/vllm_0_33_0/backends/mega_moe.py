"""Megakernels of models' own: dispatch, both GEMMs and combine in one launch, without the expert layer.

Only DeepSeek-V4 and Kimi-K3 have them, and only when asked for by name.
"""

from .....schemes import MXFP8_ACT
from ....archs import SM10X, gfx
from ....backend import Backend, Capability, Form, Need, Offer, Rule, Spread, Switch, Variant, only
from ..variables import VARIABLES

_MULTIPLE = 128
_MXFP4 = frozenset({"mxfp4 group 32"})

DEEP_GEMM_MEGA = Backend(
    name="deep_gemm_mega_moe",
    engine_name="DEEPGEMM_MEGA_MOE",
    variants=(
        Variant(
            "DeepGemmMegaMoEExperts",
            Capability(
                arch=(SM10X,),
                needs=(Need("deep_gemm"),),
                offers=(Offer(_MXFP4, only("mxfp8")),),
                activations=only("silu", "situ"),
                ungated=False,
                routing=only("DeepseekV4", "DeepSeekV3"),
                spread=Spread(alone=False),
                rules=(
                    Rule(
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
                    Rule(
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
    forms=(Form("deep-gemm-mega"),),
)
AITER_MEGA = Backend(
    name="aiter_mega_moe",
    engine_name="AITER_MEGA_MOE",
    variants=(
        Variant(
            "DeepseekV4AiterMegaMoEExperts",
            Capability(
                arch=(gfx("gfx950"),),
                needs=(Need("aiter"),),
                switches=(
                    Switch(VARIABLES["VLLM_ROCM_USE_AITER"]),
                    Switch(VARIABLES["VLLM_ROCM_USE_AITER_MOE"]),
                ),
                offers=(Offer(_MXFP4),),
                activations=only("silu"),
                ungated=False,
                routing=only("DeepseekV4"),
                spread=Spread(
                    exchange=only("mori_high_throughput", "mori_low_latency"), eplb=False, alone=False
                ),
                rules=(
                    Rule(
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
    forms=(Form("aiter-mega"),),
)

"""b12x: FP4 kernels for SM12x that the engine takes only when asked for by name."""

from dataclasses import replace

from .....problem.schemes import MXFP8_ACT, NVFP4_ACT
from ....backend import (
    Backend,
    BackendRule,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    ParallelSupport,
    SupportQuery,
    WeightForm,
    only,
)
from ....gpu_archs import SM12X
from ..variables import VARIABLES


def _rule(question: str, offered: str, multiple_of_hidden: int) -> BackendRule:
    def holds(ask: SupportQuery) -> bool:
        dims = ask.problem.dims
        return dims.intermediate % 32 == 0 and dims.hidden % multiple_of_hidden == 0

    def wanted(ask: SupportQuery) -> str:
        return f"hidden {ask.problem.dims.hidden}, intermediate {ask.problem.dims.intermediate} per rank"

    return BackendRule(question, "shape", "shape", holds, wanted, offered)


def _situ_fits(ask: SupportQuery) -> bool:
    activation = ask.problem.activation
    return activation.name != "situ" or (activation.beta, activation.linear_beta) == (4.0, 25.0)


_SITU = BackendRule(
    question="activation parameters",
    group="scheme",
    code="other",
    holds=_situ_fits,
    wanted=lambda ask: str(ask.problem.activation),
    offered="SiTU with beta 4 and linear beta 25",
)
_BF16 = Capability(
    arch=(SM12X,),
    needs=(PackageNeed("b12x"),),
    formats=(FormatSupport(frozenset({"mxfp4 group 32"}), only("a16", "mxfp8")),),
    activations=only("silu", "situ", "swigluoai_uninterleave", "relu2_no_mul"),
    parallel=ParallelSupport(exchange=only("none"), eplb=False, ep=False),
    bias=False,
    rules=(_SITU, _rule("sizes", "intermediate a multiple of 32", 1)),
)
_NVFP4 = replace(
    _BF16,
    formats=(FormatSupport(frozenset({"nvfp4 group 16"}), only("a16", "nvfp4")),),
    activations=only("silu", "situ", "relu2_no_mul", "swigluoai_uninterleave"),
    rules=(_SITU,),
)
_MXFP8 = replace(
    _BF16,
    activations=only("silu", "situ"),
    switches=(EnvironmentSwitch(VARIABLES["VLLM_B12X_MOE_FP4_FORCE_A16"], wanted=False),),
    rules=(_SITU, _rule("sizes", "hidden a multiple of 256, intermediate of 32", 256)),
)

B12X_BF16 = Backend(
    name="b12x",
    engine_name="B12X_MXFP4_BF16",
    variants=(ExpertsClass("B12xExperts", _BF16),),
    forms=(WeightForm("b12x-mxfp4"),),
)
B12X_MXFP8 = Backend(
    name="b12x",
    engine_name="B12X_MXFP4_MXFP8",
    variants=(ExpertsClass("B12xExperts", _MXFP8),),
    act=MXFP8_ACT,
    forms=(WeightForm("b12x-mxfp4"),),
)
B12X_NVFP4 = Backend(
    name="b12x",
    engine_name="B12X",
    variants=(ExpertsClass("B12xExperts", _NVFP4),),
    act=NVFP4_ACT,
    forms=(WeightForm("b12x-nvfp4"),),
)

"""b12x: FP4 kernels for SM12x that the engine takes only when asked for by name."""

from dataclasses import replace

from ...schemes import ActFormat
from ..backend import SM12X, Ask, Backend, Capability, Form, Need, Offer, Rule, Spread, Switch, Variant, only


def _rule(question: str, offered: str, multiple_of_hidden: int) -> Rule:
    def holds(ask: Ask) -> bool:
        dims = ask.problem.dims
        return dims.intermediate % 32 == 0 and dims.hidden % multiple_of_hidden == 0

    def wanted(ask: Ask) -> str:
        return f"hidden {ask.problem.dims.hidden}, intermediate {ask.problem.dims.intermediate} per rank"

    return Rule(question, "shape", "shape", holds, wanted, offered)


_BF16 = Capability(
    arch=(SM12X,),
    needs=(Need("b12x"),),
    offers=(Offer(frozenset({"mxfp4 group 32"}), only("a16", "mxfp8")),),
    activations=only("silu", "situ", "swigluoai_uninterleave", "relu2_no_mul"),
    spread=Spread(exchange=only("none"), eplb=False, ep=False),
    bias=False,
    rules=(_rule("sizes", "intermediate a multiple of 32", 1),),
)
_MXFP8 = replace(
    _BF16,
    activations=only("silu", "situ"),
    switches=(Switch("VLLM_B12X_MOE_FP4_FORCE_A16", wanted=False),),
    rules=(_rule("sizes", "hidden a multiple of 256, intermediate of 32", 256),),
)

B12X_BF16 = Backend(
    name="b12x",
    engine_name="B12X_MXFP4_BF16",
    variants=(Variant("B12xExperts", _BF16),),
    forms=(Form("b12x-mxfp4"),),
)
B12X_MXFP8 = Backend(
    name="b12x",
    engine_name="B12X_MXFP4_MXFP8",
    variants=(Variant("B12xExperts", _MXFP8),),
    act=ActFormat("mxfp8", 8, (1, 32)),
    forms=(Form("b12x-mxfp4"),),
)

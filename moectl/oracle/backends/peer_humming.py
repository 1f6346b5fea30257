"""Humming's kernels as moectl calls them, from the package humming-kernels."""

from ...capabilities.external_kernels import HUMMING
from ...environment.peers import PREFIX
from ..archs import SM90
from ..backend import NAIVE, Ask, Backend, Capability, Need, Rule, Variant
from .native import GATE
from .peer_rules import SCALE_DTYPE, archs_of, model_dtype, offers_of, scales_of, weighting


def _words(ask: Ask) -> bool:
    dims = ask.problem.dims
    return dims.hidden % HUMMING.multiple == 0 and dims.intermediate % HUMMING.multiple == 0


PEER_HUMMING = Backend(
    name="humming",
    engine_name="humming",
    variants=(
        Variant(
            "indexed",
            Capability(
                arch=archs_of(HUMMING),
                needs=(Need("humming", "forward.humming_forward", instead=(f"{PREFIX}humming",)),),
                offers=offers_of(HUMMING),
                spread=NAIVE,
                act_order=False,
                scales=scales_of(HUMMING),
                rules=(
                    GATE,
                    Rule(
                        question="sizes",
                        group="shape",
                        vllm_code="other",
                        holds=_words,
                        wanted=lambda ask: f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}",
                        offered=f"multiples of {HUMMING.multiple}",
                    ),
                    model_dtype(HUMMING),
                    SCALE_DTYPE,
                    *weighting(HUMMING),
                ),
            ),
        ),
    ),
    runner="humming",
    verified=(SM90,),
    note="Humming's indexed GEMMs: weights are laid out by its own transformation when a layer is prepared, "
    "and kernels are compiled when a number of tokens first asks for them.",
)

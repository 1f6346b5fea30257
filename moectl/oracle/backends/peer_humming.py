"""Humming's kernels as moectl calls them, from the package humming-kernels."""

from itertools import product

from ...environment.peers import PREFIX
from ...schemes import FULL, MXFP4, int_format
from ..archs import SM90, sm
from ..backend import NAIVE, Ask, Backend, Capability, Need, Offer, Rule, Variant, only
from ..keys import exact_key
from .native import GATE
from .peer_rules import MODEL_DTYPE, WEIGHT_AT_THE_END

_INTEGERS = (
    int_format(bits, group, zero_point=zero)
    for bits, group, zero in product((4, 8), (32, 64, 128, FULL), (False, True))
)


def _words(ask: Ask) -> bool:
    dims = ask.problem.dims
    return dims.hidden % 32 == 0 and dims.intermediate % 32 == 0


PEER_HUMMING = Backend(
    name="humming",
    engine_name="humming",
    variants=(
        Variant(
            "indexed",
            Capability(
                arch=(sm(80),),
                needs=(Need("humming", "forward.humming_forward", instead=(f"{PREFIX}humming",)),),
                offers=(Offer(frozenset(map(exact_key, (MXFP4, *_INTEGERS)))),),
                spread=NAIVE,
                act_order=False,
                scales=only("E8M0", "BF16", "F16"),
                rules=(
                    GATE,
                    Rule(
                        question="sizes",
                        group="shape",
                        vllm_code="other",
                        holds=_words,
                        wanted=lambda ask: f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}",
                        offered="multiples of 32",
                    ),
                    MODEL_DTYPE,
                    WEIGHT_AT_THE_END,
                ),
            ),
        ),
    ),
    runner="humming",
    verified=(SM90,),
    note="Humming's indexed GEMMs: weights are laid out by its own transformation when a layer is prepared, "
    "and kernels are compiled when a number of tokens first asks for them.",
)

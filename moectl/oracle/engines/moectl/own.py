"""What moectl runs itself: its own Triton kernels on two layouts, and plain torch as the slow twin."""

from functools import partial
from itertools import product

from ....padding import padding, size_rule
from ....schemes import FULL, MXFP4, int_format
from ...archs import CPU, CUDA, ROCM, SM90, sm
from ...backend import Ask, Backend, Capability, Form, Offer, Rule, Spread, Variant, only
from ...keys import exact_key

NAIVE = Spread(exchange=only("none", "allgather_reducescatter"), eplb=False)
"""Ranks that gather all tokens and scatter the sums, around experts that skip those of other ranks.

No expert moves between calls: there is no balancing.
"""

INTEGERS = tuple(
    int_format(bits, group, zero_point=zero)
    for bits, group, zero in product((4, 8), (32, 64, 128, FULL), (False, True))
)
_OFFERS = (Offer(frozenset(map(exact_key, (MXFP4, *INTEGERS)))),)
_GATED, _UNGATED = only("silu", "swigluoai", "gelu_tanh"), only("relu2")


def _with_its_gate(ask: Ask) -> bool:
    known = _GATED if ask.problem.activation.gated else _UNGATED
    return known.allows(ask.problem.activation.name)


GATE = Rule(
    question="activation and gate",
    group="scheme",
    code="other",
    holds=_with_its_gate,
    wanted=lambda ask: str(ask.problem.activation),
    offered=f"gated {_GATED}; not gated {_UNGATED}",
)

TRITON = Backend(
    name="triton",
    engine_name="triton",
    variants=(
        Variant(
            "grouped_gemm",
            Capability(
                arch=(sm(80),),
                offers=_OFFERS,
                spread=NAIVE,
                act_order=False,
                scales=only("E8M0", "BF16", "F16"),
                rules=(GATE,),
            ),
        ),
    ),
    forms=(Form("moectl-mtile64", partial(padding, "moectl-mtile64")),),
    runner="triton",
    verified=(SM90,),
)
_MARLIN = "marlin-int4"
_MARLIN_WEIGHTS = (
    int_format(4, group, zero_point=zero) for group, zero in product((32, 64, 128, FULL), (False, True))
)


def _marlin_sizes(ask: Ask) -> bool:
    """True when the layout can hold the hidden size, which it does not round up."""
    problem = ask.problem
    gated, hidden = problem.activation.gated, problem.dims.hidden
    return hidden % size_rule(_MARLIN, problem.scheme.weight, gated, hidden).needs.hidden == 0


TRITON_MARLIN = Backend(
    name="triton_marlin",
    engine_name="triton_marlin",
    variants=(
        Variant(
            "marlin",
            Capability(
                arch=(sm(80),),
                offers=(Offer(frozenset(map(exact_key, _MARLIN_WEIGHTS))),),
                spread=NAIVE,
                act_order=False,
                dtypes=only("bf16", "fp16"),
                scales=only("BF16", "F16"),
                rules=(
                    GATE,
                    Rule(
                        question="hidden size",
                        group="shape",
                        code="other",
                        holds=_marlin_sizes,
                        wanted=lambda ask: f"{ask.problem.dims.hidden}, {ask.problem.scheme.weight}",
                        offered="a multiple of 128 and of the scales' group",
                    ),
                ),
            ),
        ),
    ),
    forms=(Form(_MARLIN, partial(padding, _MARLIN)),),
    runner="triton_marlin",
    verified=(SM90,),
    note="Reads weights in Marlin's layout as they lie, for decode: a folder converted for Marlin runs "
    "without being laid out anew. With many tokens per expert the triton backend is faster.",
)
TORCH = Backend(
    name="torch",
    engine_name="torch",
    variants=(Variant("torch", Capability(arch=(CUDA, ROCM, CPU), spread=NAIVE, act_order=False)),),
    runner="torch",
    verified=(SM90, CPU),
    note="Plain torch: the reference for correctness, and the only choice without a supported GPU. "
    "Weights are decoded, activations stay in the model's dtype whatever the checkpoint declares.",
)
EMULATION = Backend(
    name="emulation",
    engine_name="emulation",
    variants=(Variant("emulation", Capability(arch=(CUDA, ROCM, CPU), spread=NAIVE, act_order=False)),),
    runner="emulation",
    note="The slow twin of kernels that quantize activations: weights are decoded, activations rounded to "
    "the format that the checkpoint declares.",
    verified=(SM90, CPU),
)

"""vLLM's Marlin MoE kernels as moectl calls them: the library file alone, without the engine."""

from functools import partial

from ...capabilities.external_kernels import MARLIN
from ...environment.peers import PREFIX
from ...environment.probes import MARLIN_LIBRARY
from ...padding import padding, size_rule
from ..archs import SM90
from ..backend import NAIVE, Ask, Backend, Capability, Form, Need, Rule, Variant
from .native import GATE
from .peer_rules import SCALE_DTYPE, archs_of, model_dtype, offers_of

_LAYOUTS = {row.formats[0].name: row.layout for row in MARLIN.weights}


def _sizes(ask: Ask) -> bool:
    """True when the layout can hold the hidden size, which is rounded up for MXFP4 alone."""
    problem = ask.problem
    weight, gated, hidden = problem.scheme.weight, problem.activation.gated, problem.dims.hidden
    name = _LAYOUTS.get(weight.name)
    return name is None or hidden % size_rule(name, weight, gated, hidden).needs.hidden == 0


def _weight_on_input(ask: Ask) -> bool:
    return not (ask.problem.routing.weight_on_input and ask.problem.bias)


PEER_MARLIN = Backend(
    name="marlin",
    engine_name="marlin",
    variants=(
        Variant(
            "moe_wna16_marlin_gemm",
            Capability(
                arch=archs_of(MARLIN),
                needs=(Need("vllm", MARLIN_LIBRARY, instead=(f"{PREFIX}vllm",)),),
                offers=offers_of(MARLIN),
                spread=NAIVE,
                act_order=False,
                rules=(
                    GATE,
                    Rule(
                        question="hidden size",
                        group="shape",
                        vllm_code="other",
                        holds=_sizes,
                        wanted=lambda ask: f"{ask.problem.dims.hidden}, {ask.problem.scheme.weight}",
                        offered="a multiple of 128 (integers) or 64 and of the scales' group; any for MXFP4",
                    ),
                    model_dtype(MARLIN),
                    SCALE_DTYPE,
                    Rule(
                        question="router's weight on the input",
                        group="scheme",
                        vllm_code="other",
                        holds=_weight_on_input,
                        wanted=lambda ask: "with a bias",
                        offered="without a bias",
                    ),
                ),
            ),
        ),
    ),
    forms=tuple(
        Form(layout, partial(padding, layout), weights=frozenset({name})) for name, layout in _LAYOUTS.items()
    ),
    runner="marlin",
    verified=(SM90,),
    note="vLLM's Marlin GEMM, from the engine's library file; its kernels are compiled when they are first "
    "called, which takes minutes where the library has none for the GPU.",
)

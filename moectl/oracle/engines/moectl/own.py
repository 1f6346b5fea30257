"""moectl's own backends: Triton kernels, and plain torch."""

from functools import partial

from ....capabilities import own_kernels
from ....problem.padding import padding, size_rule
from ...backend import (
    ANY,
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    ParallelSupport,
    SupportQuery,
    WeightForm,
    only,
)
from ...format_keys import act_key, exact_key
from ...gpu_archs import CPU, SM90, Arch
from .kernel_rules import archs_of, formats_of, scales_by_weights, scales_of

NAIVE = ParallelSupport(exchange=only("none", "allgather_reducescatter"), eplb=False)
"""Ranks that all-gather tokens and reduce-scatter the sums around experts that skip other ranks' tokens.

Experts do not move between calls: no EPLB.
"""

_GATED, _UNGATED = only(*own_kernels.GATED), only(*own_kernels.UNGATED)


def _supports_gate(ask: SupportQuery) -> bool:
    names = _GATED if ask.problem.activation.gated else _UNGATED
    return names.allows(ask.problem.activation.name)


GATE = BackendRule(
    question="activation and gate",
    group="scheme",
    code="other",
    holds=_supports_gate,
    wanted=lambda ask: str(ask.problem.activation),
    offered=f"gated {_GATED}; not gated {_UNGATED}",
)

TRITON = Backend(
    name="moectl",
    engine_name="moectl",
    variants=(
        ExpertsClass(
            "grouped_gemm",
            Capability(
                arch=archs_of(own_kernels.TRITON),
                formats=formats_of(own_kernels.TRITON),
                parallel=NAIVE,
                act_order=False,
                scales=scales_of(own_kernels.TRITON),
                rules=(GATE, scales_by_weights(own_kernels.TRITON)),
            ),
        ),
    ),
    forms=tuple(
        WeightForm(
            row.layout,
            partial(padding, row.layout),
            scaled=only(*map(exact_key, row.formats)),
            declared=ANY if row.any_act else only(*map(act_key, row.acts)),
        )
        for row in own_kernels.TRITON.weights
    ),
    runner="moectl",
    verified=(SM90,),
    untried_with=own_kernels.TRITON.untried,
)
_MARLIN = own_kernels.TRITON_MARLIN.weights[0].layout


def _marlin_sizes(ask: SupportQuery) -> bool:
    """True when the layout supports the hidden size, which is not padded."""
    problem = ask.problem
    gated, hidden = problem.activation.gated, problem.dims.hidden
    return hidden % size_rule(_MARLIN, problem.scheme.weight, gated, hidden).needs.hidden == 0


TRITON_MARLIN = Backend(
    name="moectl_marlin",
    engine_name="moectl_marlin",
    variants=(
        ExpertsClass(
            "marlin",
            Capability(
                arch=archs_of(own_kernels.TRITON_MARLIN),
                formats=formats_of(own_kernels.TRITON_MARLIN),
                parallel=NAIVE,
                act_order=False,
                dtypes=only(*own_kernels.TRITON_MARLIN.weights[0].dtypes),
                scales=scales_of(own_kernels.TRITON_MARLIN),
                rules=(
                    GATE,
                    BackendRule(
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
    forms=(WeightForm(_MARLIN, partial(padding, _MARLIN)),),
    runner="moectl_marlin",
    verified=(SM90,),
    note="Reads weights in Marlin's layout in place, for decode: a directory converted for Marlin runs "
    "without being repacked. With many tokens per expert the moectl backend is faster.",
)
TORCH_ARCHS = tuple(map(Arch, own_kernels.TORCH_PLATFORMS))
TORCH = Backend(
    name="torch",
    engine_name="torch",
    variants=(ExpertsClass("torch", Capability(arch=TORCH_ARCHS, parallel=NAIVE, act_order=False)),),
    runner="torch",
    verified=(SM90, CPU),
    note="Plain torch: the reference for correctness, and the only choice without a supported GPU. "
    "Weights are dequantized, activations stay in the model's dtype whatever the checkpoint declares.",
)
EMULATION = Backend(
    name="emulation",
    engine_name="emulation",
    variants=(ExpertsClass("emulation", Capability(arch=TORCH_ARCHS, parallel=NAIVE, act_order=False)),),
    runner="emulation",
    note="Emulates kernels that quantize activations, slowly: weights are dequantized, activations rounded "
    "to the format that the checkpoint declares.",
    verified=(SM90, CPU),
)

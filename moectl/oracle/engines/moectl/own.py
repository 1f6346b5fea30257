"""What moectl runs itself: its own Triton kernels on two layouts, and plain torch as the slow twin."""

from functools import partial

from ....capabilities import own_kernels
from ....problem.padding import padding, size_rule
from ...backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    ParallelSupport,
    SupportQuery,
    WeightForm,
    only,
)
from ...gpu_archs import CPU, SM90, Arch
from .kernel_rules import archs_of, offers_of, scales_of

NAIVE = ParallelSupport(exchange=only("none", "allgather_reducescatter"), eplb=False)
"""Ranks that gather all tokens and scatter the sums, around experts that skip those of other ranks.

No expert moves between calls: there is no balancing.
"""

_GATED, _UNGATED = only(*own_kernels.GATED), only(*own_kernels.UNGATED)


def _with_its_gate(ask: SupportQuery) -> bool:
    known = _GATED if ask.problem.activation.gated else _UNGATED
    return known.allows(ask.problem.activation.name)


GATE = BackendRule(
    question="activation and gate",
    group="scheme",
    code="other",
    holds=_with_its_gate,
    wanted=lambda ask: str(ask.problem.activation),
    offered=f"gated {_GATED}; not gated {_UNGATED}",
)

_MTILE64 = own_kernels.TRITON.weights[0].layout
TRITON = Backend(
    name="triton",
    engine_name="triton",
    variants=(
        ExpertsClass(
            "grouped_gemm",
            Capability(
                arch=archs_of(own_kernels.TRITON),
                offers=offers_of(own_kernels.TRITON),
                spread=NAIVE,
                act_order=False,
                scales=scales_of(own_kernels.TRITON),
                rules=(GATE,),
            ),
        ),
    ),
    forms=(WeightForm(_MTILE64, partial(padding, _MTILE64)),),
    runner="triton",
    verified=(SM90,),
)
_MARLIN = own_kernels.TRITON_MARLIN.weights[0].layout


def _marlin_sizes(ask: SupportQuery) -> bool:
    """True when the layout can hold the hidden size, which it does not round up."""
    problem = ask.problem
    gated, hidden = problem.activation.gated, problem.dims.hidden
    return hidden % size_rule(_MARLIN, problem.scheme.weight, gated, hidden).needs.hidden == 0


TRITON_MARLIN = Backend(
    name="triton_marlin",
    engine_name="triton_marlin",
    variants=(
        ExpertsClass(
            "marlin",
            Capability(
                arch=archs_of(own_kernels.TRITON_MARLIN),
                offers=offers_of(own_kernels.TRITON_MARLIN),
                spread=NAIVE,
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
    runner="triton_marlin",
    verified=(SM90,),
    note="Reads weights in Marlin's layout as they lie, for decode: a folder converted for Marlin runs "
    "without being laid out anew. With many tokens per expert the triton backend is faster.",
)
TORCH_ARCHS = tuple(map(Arch, own_kernels.TORCH_PLATFORMS))
TORCH = Backend(
    name="torch",
    engine_name="torch",
    variants=(ExpertsClass("torch", Capability(arch=TORCH_ARCHS, spread=NAIVE, act_order=False)),),
    runner="torch",
    verified=(SM90, CPU),
    note="Plain torch: the reference for correctness, and the only choice without a supported GPU. "
    "Weights are decoded, activations stay in the model's dtype whatever the checkpoint declares.",
)
EMULATION = Backend(
    name="emulation",
    engine_name="emulation",
    variants=(ExpertsClass("emulation", Capability(arch=TORCH_ARCHS, spread=NAIVE, act_order=False)),),
    runner="emulation",
    note="The slow twin of kernels that quantize activations: weights are decoded, activations rounded to "
    "the format that the checkpoint declares.",
    verified=(SM90, CPU),
)

"""External kernels that moectl calls: Humming, vLLM's Marlin without the engine, triton_kernels."""

from functools import partial

from ....capabilities import external_kernels as kernels
from ....capabilities.kernel_packages import MARLIN_LIBRARY
from ....capabilities.unpacked_libraries import PREFIX
from ....problem.padding import padding, size_rule
from ...backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    PackageNeed,
    SupportQuery,
    WeightForm,
    only,
)
from ...gpu_archs import SM90, sm
from .kernel_rules import SCALE_DTYPE, archs_of, formats_of, model_dtype, scales_of, weighting
from .own import GATE, NAIVE


def _whole_words(ask: SupportQuery) -> bool:
    dims = ask.problem.dims
    return dims.hidden % kernels.HUMMING.multiple == 0 and dims.intermediate % kernels.HUMMING.multiple == 0


_BEFORE_SM100 = sm(80, 99)

HUMMING = Backend(
    name="humming",
    engine_name="humming",
    variants=(
        ExpertsClass(
            "indexed",
            Capability(
                arch=archs_of(kernels.HUMMING),
                needs=(PackageNeed("humming", "forward.humming_forward", instead=(f"{PREFIX}humming",)),),
                formats=formats_of(kernels.HUMMING),
                parallel=NAIVE,
                act_order=False,
                scales=scales_of(kernels.HUMMING),
                rules=(
                    GATE,
                    BackendRule(
                        question="sizes",
                        group="shape",
                        code="other",
                        holds=_whole_words,
                        wanted=lambda ask: f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}",
                        offered=f"multiples of {kernels.HUMMING.multiple}",
                    ),
                    model_dtype(kernels.HUMMING),
                    SCALE_DTYPE,
                    *weighting(kernels.HUMMING),
                ),
            ),
        ),
    ),
    forms=tuple(
        WeightForm(
            row.layout,
            partial(padding, row.layout),
            (_BEFORE_SM100,) if row.formats[0].name == "mxfp4" else None,
            frozenset({row.formats[0].name}),
        )
        for row in kernels.HUMMING.weights
    ),
    runner="humming",
    verified=(SM90,),
    note="Humming's indexed GEMMs: kernels are compiled at the first call with a new number of tokens. "
    "On SM100 and newer, Humming repacks MXFP4 weights when a layer is prepared.",
)

_MARLIN_LAYOUTS = {row.formats[0].name: row.layout for row in kernels.MARLIN.weights}


def _marlin_sizes(ask: SupportQuery) -> bool:
    """True when the layout supports the hidden size, which is padded only for MXFP4."""
    problem = ask.problem
    weight, gated, hidden = problem.scheme.weight, problem.activation.gated, problem.dims.hidden
    name = _MARLIN_LAYOUTS.get(weight.name)
    return name is None or hidden % size_rule(name, weight, gated, hidden).needs.hidden == 0


def _without_bias(ask: SupportQuery) -> bool:
    return not (ask.problem.routing.weight_on_input and ask.problem.bias)


MARLIN = Backend(
    name="marlin",
    engine_name="marlin",
    variants=(
        ExpertsClass(
            "moe_wna16_marlin_gemm",
            Capability(
                arch=archs_of(kernels.MARLIN),
                needs=(PackageNeed("vllm", MARLIN_LIBRARY, instead=(f"{PREFIX}vllm",)),),
                formats=formats_of(kernels.MARLIN),
                parallel=NAIVE,
                act_order=False,
                rules=(
                    GATE,
                    BackendRule(
                        question="hidden size",
                        group="shape",
                        code="other",
                        holds=_marlin_sizes,
                        wanted=lambda ask: f"{ask.problem.dims.hidden}, {ask.problem.scheme.weight}",
                        offered="a multiple of 128 (integers) or 64 and of the scales' group; any for MXFP4",
                    ),
                    model_dtype(kernels.MARLIN),
                    SCALE_DTYPE,
                    BackendRule(
                        question="router's weight on the input",
                        group="scheme",
                        code="other",
                        holds=_without_bias,
                        wanted=lambda ask: "with a bias",
                        offered="without a bias",
                    ),
                ),
            ),
        ),
    ),
    forms=tuple(
        WeightForm(layout, partial(padding, layout), weights=frozenset({name}))
        for name, layout in _MARLIN_LAYOUTS.items()
    ),
    runner="marlin",
    verified=(SM90,),
    note="vLLM's Marlin GEMM, from the engine's library file; kernels that it lacks for the GPU "
    "are compiled at the first call, which takes minutes.",
)

_HOPPER = kernels.TRITON_KERNELS.weights[0].layout

TRITON_KERNELS = Backend(
    name="triton_kernels",
    engine_name="triton_kernels",
    variants=(
        ExpertsClass(
            "matmul_ogs",
            Capability(
                arch=archs_of(kernels.TRITON_KERNELS),
                needs=(
                    PackageNeed(
                        "triton_kernels", "routing.compute_expt_data", instead=(f"{PREFIX}triton_kernels",)
                    ),
                ),
                formats=formats_of(kernels.TRITON_KERNELS),
                ungated=bool(kernels.TRITON_KERNELS.ungated),
                parallel=NAIVE,
                act_order=False,
                dtypes=only(*kernels.TRITON_KERNELS.weights[0].dtypes),
                rules=(
                    GATE,
                    *weighting(kernels.TRITON_KERNELS),
                ),
            ),
        ),
    ),
    forms=(WeightForm(_HOPPER, partial(padding, _HOPPER)),),
    runner="triton_kernels",
    verified=(SM90,),
    note="vLLM's copy, or that of Triton's repository if it has the same functions.",
)

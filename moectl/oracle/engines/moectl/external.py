"""External kernels that moectl calls: Humming, vLLM's Marlin without the engine, triton_kernels."""

from collections.abc import Iterator
from functools import partial

from ....capabilities import external_kernels as kernels
from ....capabilities.kernel_packages import MARLIN_LIBRARY
from ....capabilities.unpacked_libraries import PREFIX
from ....problem.padding import padding, size_rule
from ....problem.schemes import A16, FP8_BLOCK
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
from .kernel_rules import SCALE_DTYPE, archs_of, formats_of, model_dtype, weighting
from .own import GATE, NAIVE


def _whole_words(ask: SupportQuery) -> bool:
    dims, weight = ask.problem.dims, ask.problem.scheme.weight
    multiple = FP8_BLOCK.block[1] if weight == FP8_BLOCK else kernels.HUMMING.multiple
    return dims.hidden % multiple == 0 == dims.intermediate % multiple


def _sizes(ask: SupportQuery) -> str:
    return f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}"


_BEFORE_SM100 = sm(80, 99)

_BEFORE_SM100_ONLY = frozenset(("fp8", "mxfp8", "nvfp4"))


def _laid_out(ask: SupportQuery) -> bool:
    """False for layouts on SM100 and newer that are those of older GPUs."""
    return ask.device.capability < 100 or not (
        ask.problem.scheme.weight.name in _BEFORE_SM100_ONLY or ask.act != "a16"
    )


def _humming_forms() -> Iterator[WeightForm]:
    for row in kernels.HUMMING.weights:
        if row.layout and A16 in row.acts:
            name = row.formats[0].name
            where = (_BEFORE_SM100,) if name in {"mxfp4", *_BEFORE_SM100_ONLY} else None
            yield WeightForm(row.layout, partial(padding, row.layout), where, frozenset({name}))


def _humming(name: str, gemm: str, note: str, *rules: BackendRule) -> Backend:
    """A backend of Humming with one kind of GEMM."""
    return Backend(
        name=name,
        engine_name=name,
        variants=(
            ExpertsClass(
                gemm,
                Capability(
                    arch=archs_of(kernels.HUMMING),
                    needs=(PackageNeed("humming", "forward.humming_forward", instead=(f"{PREFIX}humming",)),),
                    formats=formats_of(kernels.HUMMING),
                    parallel=NAIVE,
                    act_order=False,
                    rules=(
                        GATE,
                        BackendRule(
                            question="sizes",
                            group="shape",
                            code="other",
                            holds=_whole_words,
                            wanted=lambda ask: (
                                f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}"
                            ),
                            offered=f"multiples of {kernels.HUMMING.multiple}, of 128 for FP8 in blocks",
                        ),
                        BackendRule(
                            question="layout by GPU",
                            group="arch",
                            code="other",
                            holds=_laid_out,
                            wanted=lambda ask: f"{ask.problem.scheme} on {ask.device.arch}",
                            offered="those of GPUs before SM100 for these formats",
                        ),
                        model_dtype(kernels.HUMMING),
                        SCALE_DTYPE,
                        *weighting(kernels.HUMMING),
                        *rules,
                    ),
                ),
            ),
        ),
        forms=tuple(_humming_forms()),
        runner=name,
        verified=(SM90,) if name == "humming" else (),
        untried_with=kernels.HUMMING.untried,
        note=note,
    )


HUMMING = _humming(
    "humming",
    "indexed",
    "Humming's indexed GEMMs: kernels are compiled at the first call with a new number of tokens. "
    "On SM100 and newer, Humming repacks MXFP4 weights when a layer is prepared.",
)


def _in_rows(ask: SupportQuery) -> bool:
    """True for tokens that can be quantized in their rows: to FP8, with gates before ups."""
    problem, declared = ask.problem, ask.problem.scheme.act
    alternate = problem.rows == "interleaved" and problem.activation.gated
    quantized = declared.bits < 16 and any(
        problem.scheme.weight in row.formats and declared in row.acts for row in kernels.HUMMING.weights
    )
    return not quantized or (declared.name == "fp8" and not alternate)


HUMMING_GROUPED = _humming(
    "humming_grouped",
    "grouped_contiguous",
    "Humming's grouped GEMMs, on tokens in rows by expert.",
    BackendRule(
        question="tokens in rows",
        group="scheme",
        code="other",
        holds=_in_rows,
        wanted=lambda ask: f"{ask.problem.scheme.act}, rows {ask.problem.rows}",
        offered="16-bit tokens, or FP8 ones and gates before ups",
    ),
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

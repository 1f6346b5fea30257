"""Grouped GEMMs of other libraries, on weights as checkpoints have them, gates before ups."""

from functools import partial

from ....capabilities import external_kernels as kernels
from ....capabilities.kernel_support import KernelSupport
from ....capabilities.unpacked_libraries import PREFIX
from ....problem.padding import padding
from ...backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    SupportQuery,
    WeightForm,
    only,
)
from ...format_keys import exact_key
from ...gpu_archs import CPU, SM90
from .kernel_rules import archs_of, formats_of, weighting
from .own import GATE, NAIVE


def _sizes(support: KernelSupport) -> BackendRule:
    """A rule for the divisor of both sizes."""

    def holds(ask: SupportQuery) -> bool:
        dims = ask.problem.dims
        return dims.hidden % support.multiple == 0 == dims.intermediate % support.multiple

    return BackendRule(
        question="sizes",
        group="shape",
        code="other",
        holds=holds,
        wanted=lambda ask: f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}",
        offered=f"multiples of {support.multiple}",
    )


def _forms(support: KernelSupport) -> tuple[WeightForm, ...]:
    """The layouts, by the key of the weights."""
    return tuple(
        WeightForm(row.layout, partial(padding, row.layout), scaled=only(*map(exact_key, row.formats)))
        for row in support.weights
    )


TORCH_GROUPED = Backend(
    name="torch_grouped",
    engine_name="torch_grouped",
    variants=(
        ExpertsClass(
            "torch_grouped",
            Capability(
                arch=(*archs_of(kernels.TORCH_GROUPED), CPU),
                formats=tuple(
                    FormatSupport(offer.weights, offer.acts, None if offer.acts.allows("a16") else (SM90,))
                    for offer in formats_of(kernels.TORCH_GROUPED)
                ),
                parallel=NAIVE,
                act_order=False,
                bias=False,
                dtypes=only(*kernels.TORCH_GROUPED.weights[0].dtypes),
                rules=(GATE, _sizes(kernels.TORCH_GROUPED), *weighting(kernels.TORCH_GROUPED)),
            ),
        ),
    ),
    forms=_forms(kernels.TORCH_GROUPED),
    runner="torch_grouped",
    verified=(SM90, CPU),
    note="torch's grouped products, which need no package: FP8 on SM90, BF16 also on a CPU, where the torch "
    "backend comes first.",
)

SONIC_MOE = Backend(
    name="sonic_moe",
    engine_name="sonic_moe",
    variants=(
        ExpertsClass(
            "moe_general_routing_inputs",
            Capability(
                arch=archs_of(kernels.SONIC_MOE),
                needs=(PackageNeed("sonicmoe", "moe_general_routing_inputs"),),
                formats=formats_of(kernels.SONIC_MOE),
                parallel=NAIVE,
                act_order=False,
                bias=False,
                activations=only(*kernels.SONIC_MOE.gated),
                ungated=bool(kernels.SONIC_MOE.ungated),
                dtypes=only(*kernels.SONIC_MOE.weights[0].dtypes),
                rules=(GATE, _sizes(kernels.SONIC_MOE), *weighting(kernels.SONIC_MOE)),
            ),
        ),
    ),
    forms=_forms(kernels.SONIC_MOE),
    runner="sonic_moe",
    note="SonicMoE's grouped GEMMs in CuTe DSL, compiled at the first call.",
)

_NVCC = PackageNeed("nvcc")
"""DeepGEMM compiles its kernels at the first call of a shape."""


def _deep_gemm(name: str, form: str, note: str) -> Backend:
    """A backend of DeepGEMM whose rows lie in `form`."""
    return Backend(
        name=name,
        engine_name=name,
        variants=(
            ExpertsClass(
                f"m_grouped_gemm_nt_{form}",
                Capability(
                    arch=archs_of(kernels.DEEP_GEMM),
                    needs=(
                        PackageNeed(
                            "deep_gemm",
                            "m_grouped_bf16_gemm_nt_contiguous",
                            instead=(f"{PREFIX}deep_gemm",),
                        ),
                        _NVCC,
                    ),
                    formats=formats_of(kernels.DEEP_GEMM),
                    parallel=NAIVE,
                    act_order=False,
                    bias=False,
                    dtypes=only(*kernels.DEEP_GEMM.weights[0].dtypes),
                    rules=(GATE, _sizes(kernels.DEEP_GEMM), *weighting(kernels.DEEP_GEMM)),
                ),
            ),
        ),
        forms=_forms(kernels.DEEP_GEMM),
        runner=name,
        verified=(SM90,),
        note=note,
    )


DEEP_GEMM = _deep_gemm(
    "deep_gemm",
    "contiguous",
    "DeepGEMM's contiguous grouped GEMMs, of its own package or vLLM's copy; nvcc compiles them at the first "
    "call of a shape.",
)
BATCHED_DEEP_GEMM = _deep_gemm(
    "batched_deep_gemm",
    "masked",
    "DeepGEMM's masked grouped GEMMs, for tokens batched by expert; otherwise every expert has rows for all "
    "tokens.",
)

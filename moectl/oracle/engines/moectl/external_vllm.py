"""Experts of vLLM that moectl calls without the engine: its Triton kernel, and its CUTLASS GEMMs for FP8."""

from functools import partial

from ....capabilities import external_kernels as kernels
from ....capabilities.kernel_packages import CUTLASS_LIBRARY, TRITON_SYMBOL
from ....capabilities.kernel_support import KernelSupport
from ....capabilities.unpacked_libraries import CUTLASS_PEER, PREFIX, TRITON_EXPERTS_PEER
from ....problem.padding import padding
from ....problem.schemes import FP8_BLOCK
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
from ...format_keys import exact_key
from ...gpu_archs import SM90
from .kernel_rules import archs_of, formats_of, weighting
from .own import GATE, NAIVE


def _forms(support: KernelSupport) -> tuple[WeightForm, ...]:
    """The layouts by weight format: FP8 per tensor has one of its own."""
    return tuple(
        WeightForm(row.layout, partial(padding, row.layout), scaled=only(*map(exact_key, row.formats)))
        for row in support.weights
    )


def _whole_blocks(ask: SupportQuery) -> bool:
    (rows, columns), dims = FP8_BLOCK.block, ask.problem.dims
    blocks = ask.problem.scheme.weight == FP8_BLOCK
    return not blocks or (dims.hidden % columns == 0 == dims.intermediate % rows)


def _whole_rows(ask: SupportQuery) -> bool:
    dims, multiple = ask.problem.dims, kernels.VLLM_CUTLASS.multiple
    return dims.hidden % multiple == 0 == dims.intermediate % multiple


def _sizes(holds: object, offered: str) -> BackendRule:
    return BackendRule(
        question="sizes",
        group="shape",
        code="other",
        holds=holds,  # type: ignore[arg-type]
        wanted=lambda ask: f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}",
        offered=offered,
    )


VLLM_TRITON = Backend(
    name="triton",
    engine_name="triton",
    variants=(
        ExpertsClass(
            "fused_moe_kernel",
            Capability(
                arch=archs_of(kernels.VLLM_TRITON),
                needs=(PackageNeed("vllm", TRITON_SYMBOL, instead=(f"{PREFIX}{TRITON_EXPERTS_PEER}",)),),
                formats=formats_of(kernels.VLLM_TRITON),
                parallel=NAIVE,
                act_order=False,
                rules=(
                    GATE,
                    _sizes(_whole_blocks, "multiples of 128 for FP8 in blocks"),
                    BackendRule(
                        question="router's weight on the input",
                        group="scheme",
                        code="other",
                        holds=lambda ask: not (ask.problem.routing.weight_on_input and ask.problem.bias),
                        wanted=lambda ask: "with a bias",
                        offered="without a bias",
                    ),
                ),
            ),
        ),
    ),
    forms=_forms(kernels.VLLM_TRITON),
    runner="triton",
    verified=(SM90,),
    note="vLLM's Triton experts, out of their source file, with vLLM's tuned launches or those in "
    "VLLM_TUNED_CONFIG_FOLDER. Kernels are compiled at the first call with a new launch.",
)

VLLM_CUTLASS = Backend(
    name="cutlass",
    engine_name="cutlass",
    variants=(
        ExpertsClass(
            "cutlass_moe_mm",
            Capability(
                arch=archs_of(kernels.VLLM_CUTLASS),
                needs=(PackageNeed("vllm", CUTLASS_LIBRARY, instead=(f"{PREFIX}{CUTLASS_PEER}",)),),
                formats=formats_of(kernels.VLLM_CUTLASS),
                ungated=bool(kernels.VLLM_CUTLASS.ungated),
                parallel=NAIVE,
                act_order=False,
                bias=False,
                rules=(
                    GATE,
                    _sizes(_whole_rows, f"multiples of {kernels.VLLM_CUTLASS.multiple}"),
                    *weighting(kernels.VLLM_CUTLASS),
                ),
            ),
        ),
    ),
    forms=_forms(kernels.VLLM_CUTLASS),
    runner="cutlass",
    verified=(SM90,),
    note="vLLM's grouped CUTLASS GEMMs, from the engine's library file.",
)

"""FlashInfer's fused MoE as moectl calls it: CUTLASS on SM90, TRT-LLM on SM10x with or without routing."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ....capabilities.flashinfer import (
    CHECKS,
    CUTLASS,
    TRTLLM,
    FlashInferKernel,
    kernel_of,
    unfit_activation,
    unfit_bias,
    unfit_count,
    unfit_dtype,
    unfit_sizes,
    unfit_weighting,
    unrouted,
    unweighted_input,
)
from ....environment.variables import Variable
from ....problem.moe_problem import MoEProblem
from ....problem.padding import padding
from ....problem.schemes import A16, MXFP4, MXFP8_ACT
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
from ...format_keys import act_key, exact_key
from ...gpu_archs import SM10X, SM90
from .own import NAIVE

KERNELS = PackageNeed(
    "flashinfer_cubin",
    instead=("nvcc", "ninja"),
    switch=Variable("VLLM_HAS_FLASHINFER_CUBIN", "assumes that FlashInfer's kernels are installed"),
)
"""Precompiled kernels, or the tools to compile them at run time."""

Kernels = tuple[FlashInferKernel, ...]
Find = Callable[[MoEProblem], FlashInferKernel | None]
Unfit = Callable[[FlashInferKernel, MoEProblem], str]

_NAMED: Mapping[Unfit, tuple[str, str]] = {
    unfit_activation: ("activation in FlashInfer", "scheme"),
    unfit_bias: ("bias in FlashInfer", "scheme"),
    unfit_sizes: ("sizes in FlashInfer", "shape"),
    unfit_dtype: ("model dtype in FlashInfer", "scheme"),
    unfit_weighting: ("weight on the input in FlashInfer", "scheme"),
    unfit_count: ("experts in FlashInfer", "shape"),
}
"""The question and group of each check of a kernel."""

_TO_ROUTERS: Mapping[Unfit, tuple[str, str]] = {
    lambda kernel, problem: unrouted(problem): ("routing in FlashInfer", "scheme"),
    unweighted_input: ("routed weight on the input in FlashInfer", "scheme"),
}
"""The same for kernels with fused routing."""


def _needs(functions: Iterable[str]) -> tuple[PackageNeed, ...]:
    """FlashInfer with these fused-MoE functions, and kernels precompiled or compilable."""
    return (*(PackageNeed("flashinfer", f"fused_moe.{name}") for name in sorted(set(functions))), KERNELS)


def _offers(kernels: Kernels) -> tuple[FormatSupport, ...]:
    """The weight and activation formats of `kernels`."""
    return tuple(FormatSupport(frozenset({exact_key(k.weight)}), only(act_key(k.act))) for k in kernels)


def _forms(kernels: Kernels) -> tuple[WeightForm, ...]:
    """The layouts of `kernels`, by the key of their weights."""
    return tuple(
        WeightForm(layout, partial(padding, layout), scaled=only(exact_key(kernel.weight)))
        for layout, kernel in {kernel.layout: kernel for kernel in kernels}.items()
    )


def _rules(find: Find, *, routes: bool = False) -> tuple[BackendRule, ...]:
    """A rule per check of the kernel that `find` gives for a problem; with `routes`, also of its routing."""
    asked: list[tuple[Unfit, tuple[str, str]]] = [(unfit, _NAMED[unfit]) for unfit in CHECKS]
    if routes:
        asked.extend(_TO_ROUTERS.items())
    return tuple(_rule(find, unfit, *named) for unfit, named in asked)


def _rule(find: Find, unfit: Unfit, question: str, group: str) -> BackendRule:
    def why(ask: SupportQuery) -> str:
        kernel = find(ask.problem)
        return "" if kernel is None else unfit(kernel, ask.problem)

    return BackendRule(
        question=question,
        group=group,
        code="other",
        holds=lambda ask: not why(ask),
        wanted=lambda ask: why(ask) or "what its kernels compute",
        offered="what its kernels compute",
    )


def _declared(kernels: Kernels) -> Find:
    """The kernel for the activations that a checkpoint declares."""
    return lambda problem: kernel_of(kernels, problem.scheme.weight, problem.scheme.act)


FLASHINFER_CUTLASS = Backend(
    name="flashinfer_cutlass",
    engine_name="flashinfer_cutlass",
    variants=(
        ExpertsClass(
            "cutlass_fused_moe",
            Capability(
                arch=(SM90,),
                needs=_needs(kernel.routed for kernel in CUTLASS),
                formats=_offers(CUTLASS),
                parallel=NAIVE,
                act_order=False,
                rules=_rules(_declared(CUTLASS)),
            ),
        ),
    ),
    forms=_forms(CUTLASS),
    runner="flashinfer_cutlass",
    verified=(SM90,),
    note="FlashInfer compiles these kernels at the first call, which takes many minutes unless they are in "
    "its cache: lowest priority unless requested.",
)

_MXFP4_FP8 = tuple(kernel for kernel in TRTLLM if (kernel.weight, kernel.act) == (MXFP4, MXFP8_ACT))


def _with_fp8_tokens(problem: MoEProblem) -> FlashInferKernel | None:
    """The kernel for MXFP4 weights and MXFP8 tokens, also of a checkpoint that declares 16-bit ones."""
    scheme = problem.scheme
    return kernel_of(_MXFP4_FP8, scheme.weight, MXFP8_ACT) if scheme.act in (A16, MXFP8_ACT) else None


def _backend(
    name: str,
    kernels: tuple[FlashInferKernel, ...],
    find: Find,
    pairs: tuple[FormatSupport, ...],
    *,
    logits: bool,
    note: str,
) -> Backend:
    functions: Iterable[str] = ((kernel.logits if logits else kernel.routed) for kernel in kernels)
    return Backend(
        name=name,
        engine_name=name,
        variants=(
            ExpertsClass(
                "logits" if logits else "ids and weights",
                Capability(
                    arch=(SM10X,),
                    needs=_needs(functions),
                    formats=pairs,
                    parallel=NAIVE,
                    act_order=False,
                    rules=_rules(find, routes=logits),
                ),
                monolithic=logits,
            ),
        ),
        forms=_forms(kernels),
        runner=name,
        note=note,
    )


_ANY_TOKENS = (FormatSupport(frozenset({exact_key(MXFP4)}), only("a16", "mxfp8")),)
_FP8_NOTE = (
    "Tokens are quantized to MXFP8, which the checkpoint does not declare: only when requested by name."
)

FLASHINFER_TRTLLM = _backend(
    "flashinfer_trtllm", TRTLLM, _declared(TRTLLM), _offers(TRTLLM), logits=False, note=""
)
FLASHINFER_TRTLLM_MONOLITHIC = _backend(
    "flashinfer_trtllm_monolithic", TRTLLM, _declared(TRTLLM), _offers(TRTLLM), logits=True, note=""
)
FLASHINFER_TRTLLM_FP8 = _backend(
    "flashinfer_trtllm_afp8", _MXFP4_FP8, _with_fp8_tokens, _ANY_TOKENS, logits=False, note=_FP8_NOTE
)
FLASHINFER_TRTLLM_FP8_MONOLITHIC = _backend(
    "flashinfer_trtllm_afp8_monolithic",
    _MXFP4_FP8,
    _with_fp8_tokens,
    _ANY_TOKENS,
    logits=True,
    note=_FP8_NOTE,
)

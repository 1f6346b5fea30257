"""What moectl's own policy asks of FlashInfer's fused MoE functions, from the table of their kernels."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ...capabilities.flashinfer import (
    QUESTIONS,
    Kernel,
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
from ...padding import padding
from ...problem import MoEProblem
from ..backend import Ask, Form, Need, Offer, Rule, only
from ..keys import act_key, exact_key
from .flashinfer import KERNELS

Kernels = tuple[Kernel, ...]
Find = Callable[[MoEProblem], Kernel | None]
Unfit = Callable[[Kernel, MoEProblem], str]

_NAMED: Mapping[Unfit, tuple[str, str]] = {
    unfit_activation: ("activation in FlashInfer", "scheme"),
    unfit_bias: ("bias in FlashInfer", "scheme"),
    unfit_sizes: ("sizes in FlashInfer", "shape"),
    unfit_dtype: ("model dtype in FlashInfer", "scheme"),
    unfit_weighting: ("weight on the input in FlashInfer", "scheme"),
    unfit_count: ("experts in FlashInfer", "shape"),
}
"""Each question to a kernel: its name and its group."""

_TO_ROUTERS: Mapping[Unfit, tuple[str, str]] = {
    lambda kernel, problem: unrouted(problem): ("routing in FlashInfer", "scheme"),
    unweighted_input: ("routed weight on the input in FlashInfer", "scheme"),
}
"""Questions to kernels that route by themselves."""


def needs(functions: Iterable[str]) -> tuple[Need, ...]:
    """FlashInfer with these functions of its fused MoE, and kernels that are compiled or can be."""
    return (*(Need("flashinfer", f"fused_moe.{name}") for name in sorted(set(functions))), KERNELS)


def offers(kernels: Kernels) -> tuple[Offer, ...]:
    """The pairs of number formats of `kernels`."""
    return tuple(Offer(frozenset({exact_key(k.weight)}), only(act_key(k.act))) for k in kernels)


def forms(kernels: Kernels) -> tuple[Form, ...]:
    """The layouts of `kernels`, by the key of their weights."""
    return tuple(
        Form(layout, partial(padding, layout), scaled=only(exact_key(kernel.weight)))
        for layout, kernel in {kernel.layout: kernel for kernel in kernels}.items()
    )


def rules(find: Find, *, routes: bool = False) -> tuple[Rule, ...]:
    """A rule for each question to the kernel that `find` has for a problem; `routes`: of its routing, too."""
    asked: list[tuple[Unfit, tuple[str, str]]] = [(unfit, _NAMED[unfit]) for unfit in QUESTIONS]
    if routes:
        asked.extend(_TO_ROUTERS.items())
    return tuple(_rule(find, unfit, *named) for unfit, named in asked)


def _rule(find: Find, unfit: Unfit, question: str, group: str) -> Rule:
    def why(ask: Ask) -> str:
        kernel = find(ask.problem)
        return "" if kernel is None else unfit(kernel, ask.problem)

    return Rule(
        question=question,
        group=group,
        vllm_code="other",
        holds=lambda ask: not why(ask),
        wanted=lambda ask: why(ask) or "what its kernels compute",
        offered="what its kernels compute",
    )


def declared(kernels: Kernels) -> Find:
    """The kernel for the activations that a checkpoint declares."""
    return lambda problem: kernel_of(kernels, problem.scheme.weight, problem.scheme.act)

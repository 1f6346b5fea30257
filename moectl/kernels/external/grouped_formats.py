"""What backends with grouped GEMMs refuse, and which row of their support a layer takes."""

from __future__ import annotations

from ...capabilities.kernel_support import KernelSupport
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, ActFormat
from ..tolerance import DECLARED
from .gemm_glue import ACT_ORDER_REFUSAL, INPUT_WEIGHT_REFUSAL

BIAS_REFUSAL = "its products add no bias; the layer has biases"


def act_words(act: ActFormat) -> str:
    """An activation format in words: ``16-bit``, ``fp8 dynamic per token``."""
    if act.bits == 16:
        return "16-bit"
    if act.number.block:
        return act.name
    extent = {(FULL, FULL): "per tensor", (1, FULL): "per token"}.get(act.block, f"group {act.block[1]}")
    return f"{act} {extent}"


def formats_refusal(support: KernelSupport, problem: MoEProblem) -> str:
    """Why weights, tokens and model dtype are not supported, as a clause; empty if they are."""
    weight, act = problem.scheme.weight, problem.scheme.act
    rows = [row for row in support.weights if weight in row.formats]
    if not rows:
        known = dict.fromkeys(map(str, support.formats))
        return f"it supports {', '.join(known)} weights; the layer has {weight}"
    row = support.row_for(problem.scheme)
    if row is None:
        words = dict.fromkeys(act_words(form) for it in rows for form in it.acts)
        return (
            f"with {weight} weights it takes {' or '.join(words)} tokens; the layer has {act_words(act)} ones"
        )
    if problem.dtype not in row.dtypes:
        return (
            f"with {weight.name} weights it supports {' and '.join(row.dtypes)} models; this one is "
            f"{problem.dtype}"
        )
    return ""


def grouped_refusal(support: KernelSupport, problem: MoEProblem) -> str:
    """Why grouped GEMMs in the plain layouts do not support `problem` on any GPU; empty if they do."""
    if reason := formats_refusal(support, problem):
        return reason
    if problem.act_order == "group":
        return ACT_ORDER_REFUSAL
    if problem.bias:
        return BIAS_REFUSAL
    if problem.routing.weight_on_input and not support.weight_on_input:
        return INPUT_WEIGHT_REFUSAL
    for name, size in (("hidden", problem.dims.hidden), ("intermediate", problem.dims.intermediate)):
        if size % support.multiple:
            return (
                f"it needs sizes that are multiples of {support.multiple}; the layer's {name} size is {size}"
            )
    return support.activation_refusal(problem.activation)


def accumulation(problem: MoEProblem) -> str:
    """The row of the tolerance table: that of the declared tokens, or of 16-bit ones with rounded steps."""
    return DECLARED if problem.scheme.act.bits < 16 else "steps"

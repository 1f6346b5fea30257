"""Questions that moectl's own policy puts to kernels of others."""

from ..backend import Ask, Rule


def _dtype(ask: Ask) -> bool:
    return ask.dtype == "bf16" or (ask.dtype == "fp16" and ask.problem.scheme.weight.name.startswith("int"))


MODEL_DTYPE = Rule(
    question="model dtype by weights",
    group="scheme",
    vllm_code="other",
    holds=_dtype,
    wanted=lambda ask: f"{ask.dtype}, {ask.problem.scheme.weight}",
    offered="bf16, and fp16 for integers",
)
WEIGHT_AT_THE_END = Rule(
    question="router's weight",
    group="scheme",
    vllm_code="other",
    holds=lambda ask: not ask.problem.routing.weight_on_input,
    wanted=lambda ask: "on the input" if ask.problem.routing.weight_on_input else "at the end",
    offered="at the end",
)

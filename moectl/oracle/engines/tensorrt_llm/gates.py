"""Checks of implementations that no field of `Capability` expresses, with TensorRT-LLM's reason codes."""

from __future__ import annotations

from collections.abc import Collection

from ...backend import BackendRule, SupportQuery
from .terms import attention_dp, constants, gpt_oss_style

CODES = {
    "device": "sm_unsupported",
    "activation function": "activation_unsupported",
    "model dtype": "dtype_unsupported",
    "routing method": "routing_unsupported",
    "expert parallel": "topology_unsupported",
    "data parallel ranks": "topology_unsupported",
    "expert balancing": "eplb_unsupported",
    "adapters on experts": "lora_unsupported",
}
"""Reason codes of common questions."""


def quantization(algorithm: str, supported: Collection[str]) -> BackendRule:
    """The experts' quantization is one of those `supported`."""
    *others, last = supported
    return BackendRule(
        question="quantization",
        group="scheme",
        code="quant_unsupported",
        holds=lambda ask: algorithm in supported,
        wanted=lambda ask: algorithm or f"{ask.problem.storage}, which is not read",
        offered=f"{', '.join(others)} or {last}" if others else last,
    )


def takes_constants(supported: frozenset[str]) -> BackendRule:
    """The kernels have parameters for all constants of the activation function."""
    return BackendRule(
        question="activation constants",
        group="scheme",
        code="activation_unsupported",
        holds=lambda ask: constants(ask.problem) <= supported,
        wanted=lambda ask: " and ".join(sorted(constants(ask.problem))) or "none",
        offered=" and ".join(sorted(supported)) or "none",
    )


def _style(problem_style: bool) -> str:
    return "gpt-oss' bias, alpha and beta" if problem_style else "no bias, alpha or beta"


NO_GPT_OSS = BackendRule(
    question="SwiGLU style",
    group="scheme",
    code="activation_unsupported",
    holds=lambda ask: not gpt_oss_style(ask.problem),
    wanted=lambda ask: _style(gpt_oss_style(ask.problem)),
    offered=_style(False),
)
GPT_OSS_ONLY = BackendRule(
    question="SwiGLU style",
    group="scheme",
    code="activation_unsupported",
    holds=lambda ask: gpt_oss_style(ask.problem),
    wanted=lambda ask: _style(gpt_oss_style(ask.problem)),
    offered=_style(True),
)
NO_BIAS = BackendRule(
    question="bias of experts",
    group="scheme",
    code="activation_unsupported",
    holds=lambda ask: not ask.problem.bias,
    wanted=lambda ask: "a bias" if ask.problem.bias else "none",
    offered="none",
)
GATED = BackendRule(
    question="gated experts",
    group="scheme",
    code="activation_unsupported",
    holds=lambda ask: ask.problem.activation.gated,
    wanted=lambda ask: "gated" if ask.problem.activation.gated else "not gated",
    offered="gated",
)


def _fc1_rows(ask: SupportQuery) -> int:
    """Rows of the first matrix of gated experts on one rank; 0 for others, which have no halves to split."""
    return 2 * ask.problem.dims.intermediate if ask.problem.activation.gated else 0


NVFP4_ROWS = BackendRule(
    question="rows of gate and up",
    group="shape",
    code="shape_unaligned",
    holds=lambda ask: _fc1_rows(ask) % 128 == 0,
    wanted=lambda ask: f"{_fc1_rows(ask)} on each rank",
    offered="multiples of 128",
)
"""NVFP4's scales are stored in tiles of 128 rows."""


def _intermediate(ask: SupportQuery) -> int:
    """The whole intermediate size, over all ranks."""
    return ask.problem.dims.intermediate * ask.problem.parallel.tp_size


def intermediate(step: int) -> BackendRule:
    """`step` divides the whole intermediate size."""
    return BackendRule(
        question="intermediate size",
        group="shape",
        code="shape_unaligned",
        holds=lambda ask: _intermediate(ask) % step == 0,
        wanted=lambda ask: str(_intermediate(ask)),
        offered=f"multiples of {step}",
    )


def shard(step: int, constant: str = "") -> BackendRule:
    """`step` divides one rank's intermediate size; with `constant`, only for activations that have it."""
    return BackendRule(
        question="intermediate size per rank",
        group="shape",
        code="shape_unaligned",
        holds=lambda ask: (
            ask.problem.dims.intermediate % step == 0
            or (bool(constant) and constant not in constants(ask.problem))
        ),
        wanted=lambda ask: str(ask.problem.dims.intermediate),
        offered=f"multiples of {step}",
    )


def hidden(step: int, constant: str = "") -> BackendRule:
    """`step` divides the hidden size; with `constant`, only for activations that have it."""
    return BackendRule(
        question="hidden size",
        group="shape",
        code="shape_unaligned",
        holds=lambda ask: (
            ask.problem.dims.hidden % step == 0 or (bool(constant) and constant not in constants(ask.problem))
        ),
        wanted=lambda ask: str(ask.problem.dims.hidden),
        offered=f"multiples of {step}",
    )


WHOLE_EXPERTS = BackendRule(
    question="slices of an expert",
    group="parallel",
    code="topology_unsupported",
    holds=lambda ask: ask.problem.parallel.tp_size == 1,
    wanted=lambda ask: str(ask.problem.parallel.tp_size),
    offered="1",
)

ONE_EXPERT_RANK = BackendRule(
    question="expert parallel",
    group="parallel",
    code="topology_unsupported",
    holds=lambda ask: ask.problem.parallel.ep_size == 1,
    wanted=lambda ask: str(ask.problem.parallel.ep_size > 1).lower(),
    offered="false",
)


def experts_divide(code: str) -> BackendRule:
    """Every rank has as many experts."""
    return BackendRule(
        question="experts on a rank",
        group="parallel",
        code=code,
        holds=lambda ask: ask.problem.experts % ask.problem.parallel.ep_size == 0,
        wanted=lambda ask: f"{ask.problem.experts} over {ask.problem.parallel.ep_size}",
        offered="as many on every rank",
    )


def _ranks(ask: SupportQuery) -> str:
    parallel = ask.problem.parallel
    tokens = "their own" if attention_dp(ask) else "the same"
    return f"{parallel.ranks} with {tokens} tokens, {parallel.ep_size} with experts"


OWN_TOKENS = BackendRule(
    question="ranks",
    group="parallel",
    code="topology_unsupported",
    holds=lambda ask: (
        ask.problem.parallel.ranks == 1
        or (attention_dp(ask) and ask.problem.parallel.ep_size == ask.problem.parallel.ranks)
    ),
    wanted=_ranks,
    offered="attention data parallelism over all ranks with experts, or one rank",
)
"""Kernels that exchange tokens themselves and expect each rank to bring its own."""
AS_MANY_EXPERT_RANKS = BackendRule(
    question="ranks",
    group="parallel",
    code="topology_unsupported",
    holds=lambda ask: not attention_dp(ask) or ask.problem.parallel.ep_size == ask.problem.parallel.ranks,
    wanted=_ranks,
    offered="with attention data parallelism, all of them with experts",
)

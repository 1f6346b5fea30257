"""GPTQ and AWQ experts."""

from __future__ import annotations

from dataclasses import replace

from .....problem.schemes import FULL
from ....backend import SupportQuery, only
from ....route import Condition, Order, Route
from ..runners import runner
from .bf16 import PLAIN
from .shared import LATE_FAILURES, every, without_deepep_v2, without_hpc_ops


def _only_auto(method: str) -> Condition:
    return Condition(
        "runner",
        lambda ask: bool(ask.request),
        lambda ask: f"{method} takes no runner by name; leave --moe-runner-backend at auto",
        kind="AssertionError",
    )


def _refusals(method: str) -> tuple[Condition, ...]:
    return without_hpc_ops(method), without_deepep_v2(method), _only_auto(method)


_GPTQ, _AWQ = "GPTQMarlinMoEScheme", "AWQMoEScheme"
_GPTQ_METHOD, _AWQ_METHOD = "GPTQMarlinMoEMethod", "AWQMoEMethod"
GPTQ = Route(
    name="GPTQ",
    method=_GPTQ_METHOD,
    storages=only("gptq"),
    weights=frozenset({"int4", "int8"}),
    orders=(Order((runner("marlin", _GPTQ),)),),
    names=every(runner("marlin", _GPTQ), {}),
    platforms=only("cuda"),
    minimum=80,
    refusals=_refusals(_GPTQ_METHOD),
    late_failures=LATE_FAILURES,
)


def _marlin_sizes(ask: SupportQuery) -> bool:
    dims, group = ask.problem.dims, ask.problem.scheme.weight.group
    return (
        dims.hidden % 128 == 0
        and dims.intermediate % max(64, group) == 0
        and group in (FULL, 32, 64, 128)
        and ask.activation in ("silu", "situ")
        and not ask.problem.routing.weight_on_input
    )


AWQ = replace(
    GPTQ,
    name="AWQ",
    method=_AWQ_METHOD,
    storages=only("awq"),
    orders=(Order((runner("marlin", _AWQ),)),),
    names=every(runner("marlin", _AWQ), {}),
    refusals=_refusals(_AWQ_METHOD),
)
_WNA = "MoeWNA16Method"
AWQ_TRITON = replace(
    AWQ,
    name="AWQ in sizes without Marlin tiles",
    method=_WNA,
    orders=(Order((runner("triton", _WNA),)),),
    names=every(runner("triton", _WNA), {}),
    when=Condition(
        "sizes", lambda ask: not _marlin_sizes(ask), lambda ask: "sizes that Marlin's tiles do not divide"
    ),
    refusals=(without_hpc_ops(_WNA), without_deepep_v2(_WNA)),
)

AWQ_ELSEWHERE = replace(
    PLAIN,
    name="AWQ outside of CUDA, as unquantized experts",
    storages=only("awq"),
    weights=frozenset({"int4"}),
    when=Condition("not CUDA", lambda ask: ask.device.platform != "cuda", lambda ask: "no CUDA device"),
)
"""SGLang has no method for AWQ experts there: it creates unquantized ones, and fails on the weights."""

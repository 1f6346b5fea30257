"""Experts of Quark."""

from __future__ import annotations

from dataclasses import replace

from ....backend import LOADING, RuntimeFailure, only
from ....route import Order, Route
from ..runners import AITER_EXCHANGE, aiter, runner
from ..terms import uses_aiter
from .shared import LATE_FAILURES, every, without_deepep_v2, without_hpc_ops

_Q, _W4 = "QuarkFusedMoEMethod", "QuarkW4A4MXFp4MoE"
_UNSHUFFLED = RuntimeFailure(
    lambda ask: not uses_aiter(ask),
    "shuffles scales by AITER's function, which is imported on ROCm with SGLANG_USE_AITER=1 only",
    "NameError",
    LOADING,
)
"""The method takes AITER's runner on every device."""
QUARK_MXFP4 = Route(
    name="MXFP4 of Quark",
    method=_Q,
    storages=only("quark"),
    weights=frozenset({"mxfp4"}),
    orders=(Order((runner("aiter", _W4, rules=(AITER_EXCHANGE,), failures=(_UNSHUFFLED,)),)),),
    names={"aiter": (runner("aiter", _W4, failures=(_UNSHUFFLED,)),)},
    minimum=70,
    refusals=(without_hpc_ops(_Q), without_deepep_v2(_Q)),
    late_failures=LATE_FAILURES,
    fails_by_name="NotImplementedError",
)
_Q8 = "QuarkW8A8FP8MoE"
QUARK_FP8 = replace(
    QUARK_MXFP4,
    name="FP8 of Quark",
    weights=frozenset({"fp8"}),
    orders=(Order((aiter(_Q8), runner("triton", _Q8))),),
    names=every(runner("triton", _Q8), {"aiter": (aiter(_Q8), runner("triton", _Q8))}),
)

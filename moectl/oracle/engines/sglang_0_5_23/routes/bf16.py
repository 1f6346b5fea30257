"""Unquantized experts."""

from __future__ import annotations

from ....backend import only
from ....route import Condition, Order, Route
from ..runners import AITER_SIZES, aiter, runner
from ..terms import AITER_EXCHANGES, exchange, uses_aiter
from .shared import LATE_FAILURES, TRTLLM_NAMES, every, without_hpc_ops

_BF16 = "UnquantizedFusedMoEMethod"
_BF16_TRITON, _BF16_TRTLLM = runner("triton", _BF16), runner("flashinfer_trtllm", _BF16)
_BF16_AITER = aiter(_BF16, AITER_SIZES)
PLAIN = Route(
    name="unquantized",
    method=_BF16,
    storages=only("plain"),
    weights=frozenset({"bf16", "fp16"}),
    orders=(Order((_BF16_AITER, _BF16_TRITON)),),
    names=every(
        _BF16_TRITON,
        {
            **dict.fromkeys(TRTLLM_NAMES, (_BF16_TRTLLM,)),
            "flashinfer_trtllm_routed": (runner("flashinfer_trtllm_routed", _BF16),),
            "flashinfer_cutlass": (runner("flashinfer_cutlass", _BF16),),
            "deep_gemm": (runner("deep_gemm", _BF16),),
            "triton_kernel": (runner("triton_kernel", _BF16),),
            "aiter": (_BF16_AITER, _BF16_TRITON),
        },
    ),
    refusals=(
        without_hpc_ops(_BF16),
        Condition(
            "aiter",
            lambda ask: (
                ask.request == "aiter"
                and uses_aiter(ask)
                and exchange(ask) in AITER_EXCHANGES
                and not AITER_SIZES.holds(ask)
            ),
            lambda ask: f"aiter does not support this layer: it needs {AITER_SIZES.wanted(ask)}",
        ),
    ),
    late_failures=LATE_FAILURES,
    fails="NotImplementedError",
    fails_by_name="NotImplementedError",
)

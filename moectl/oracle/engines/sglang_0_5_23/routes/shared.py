"""What routes share: names of runners, refusals of a method, and failures after its choice."""

from __future__ import annotations

from collections.abc import Mapping

from ....backend import Backend, SupportQuery
from ....decision import Candidate
from ....route import Condition, LateFailure
from ..terms import DEEPEP_LIKE, exchange, has_deep_gemm

RunnerNames = Mapping[str, tuple[Backend, ...]]
TRTLLM_NAMES = ("flashinfer_trtllm", "experimental_sgl_trtllm")
RUNNER_NAMES = (
    "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_trtllm_routed",
    "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl", "flashinfer_megamoe", "cutlass", "aiter",
    "marlin", "humming", "experimental_sgl_trtllm", "experimental_sgl_marlin",
)  # fmt: skip


def every(backend: Backend, but_for: RunnerNames) -> RunnerNames:
    """Every request selects `backend`, except those in `but_for`."""
    return {**dict.fromkeys(RUNNER_NAMES, (backend,)), **but_for}


def without_hpc_ops(method: str) -> Condition:
    """The refusal of `hpc_ops` by a method without it."""
    return Condition(
        "hpc_ops",
        lambda ask: ask.request == "hpc_ops",
        lambda ask: f"hpc_ops is for FP8 blocks and tensors (Fp8MoEMethod); this layer uses {method}",
    )


def without_deepep_v2(method: str) -> Condition:
    """The refusal of DeepEP v2 by a method without it."""
    return Condition(
        "deepep_v2",
        lambda ask: exchange(ask) == "deepep_v2",
        lambda ask: f"DeepEP v2 needs FP8 blocks of 128x128, MXFP8 or unquantized experts; this is {method}",
    )


def _old_deepep(ask: SupportQuery, chosen: Candidate | None) -> bool:
    """True for layers whose older DeepEP path needs DeepGEMM on a device without it."""
    if exchange(ask) not in DEEPEP_LIKE or ask.device.platform == "rocm" or chosen is None:
        return False
    if chosen.engine_name == "humming" or has_deep_gemm(ask):
        return False
    if ask.problem.storage == "plain":
        return chosen.engine_name == "deep_gemm" and exchange(ask) in ("deepep", "pplx")
    modelopt_cutedsl = ask.problem.storage == "modelopt" and chosen.engine_name == "flashinfer_cutedsl"
    return not modelopt_cutedsl


_OLD_DEEPEP = LateFailure(
    "DeepEP",
    _old_deepep,
    lambda ask, chosen: f"{exchange(ask)} needs DeepGEMM, which needs SM90 or newer",
    kind="AssertionError",
)


def _uneven(ask: SupportQuery, chosen: Candidate | None) -> bool:
    problem = ask.problem
    return bool(problem.experts % problem.parallel.ep_size)


_UNEVEN = LateFailure(
    "experts per rank",
    _uneven,
    lambda ask, chosen: f"{ask.problem.experts} experts cannot be spread evenly over ranks",
    kind="AssertionError",
)
LATE_FAILURES = (_OLD_DEEPEP, _UNEVEN)
"""What fails with every method."""

"""The sonic_moe backend: SonicMoE's grouped GEMMs (CuTe DSL, Dao-AILab), BF16 on SM90.

A call hands SonicMoE the tokens, the flat ids and the router's weights; it gathers, multiplies, applies
SwiGLU in the first GEMM's epilogue, multiplies and sums. Weights are read as they lie in the plain layout:
its tensors are ``[rows, columns, experts]`` with experts outermost in memory. It compiles its kernels at the
first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from inspect import signature
from types import ModuleType

import torch
from torch import Tensor

from ...capabilities.external_kernels import SONIC_MOE
from ...errors import Unavailable
from ...problem.moe_problem import MoEProblem
from ..prepared_layer import PreparedMoE
from ..runner import Runner, check_dtype
from .gemm_glue import device_refusal
from .grouped_formats import accumulation, grouped_refusal
from .import_library import failing_as, module, package, unavailable_reason

NAME, PACKAGE = "sonic_moe", "sonicmoe"
FUNCTION, LAYOUT = "moe_general_routing_inputs", "concat_layout"
"""The function, and its argument for gates before ups instead of in turns."""


@cache
def library() -> ModuleType:
    """The package; Unavailable without it, or if it does not take gates before ups."""
    sonic = package(PACKAGE)
    function = getattr(sonic, FUNCTION, None)
    if function is None or LAYOUT not in signature(function).parameters:
        raise Unavailable(
            f"this version of {PACKAGE} lacks {FUNCTION}(..., {LAYOUT}=...)",
            hint="pip install 'sonic-moe>=0.1.2'",
        )
    return sonic


@dataclass(frozen=True)
class SonicMatrices:
    """Expert matrices ``[2 * intermediate, hidden, experts]`` and ``[hidden, intermediate, experts]``."""

    w13: Tensor
    w2: Tensor


def ready(prepared: PreparedMoE) -> SonicMatrices:
    """The layer's two matrices: views of its tensors."""
    return SonicMatrices(*(prepared.weights[role].permute(1, 2, 0) for role in ("w13", "w2")))


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`.

    Every id must be an expert's: skipped ones become expert 0 with weight 0, and tokens that have no other
    id are zeroed, whatever they hold.
    """
    problem = prepared.problem
    check_dtype(problem, x)
    if not len(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    valid = (ids >= 0) & (ids < problem.local_experts)
    tokens = torch.arange(ids.numel(), dtype=torch.int32, device=x.device) // ids.shape[1]
    matrices, swiglu = ready(prepared), module(f"{PACKAGE}.enums").ActivationType.SWIGLU
    with failing_as(NAME, x.device), torch.no_grad():
        y, _ = getattr(library(), FUNCTION)(
            x.contiguous(),
            torch.where(valid, weights, 0.0).float().view(-1),
            tokens,
            torch.where(valid, ids, 0).int().view(-1),
            matrices.w13,
            None,
            matrices.w2,
            None,
            E=problem.local_experts,
            stream_id=_stream(x.device),
            activation_type=swiglu,
            is_inference_mode_enabled=True,
            **{LAYOUT: True},
        )
    assert isinstance(y, Tensor)
    return y.masked_fill_(~valid.any(1, keepdim=True), 0.0)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def problem_refusal(problem: MoEProblem) -> str:
    """Why SonicMoE does not support `problem` on any device, as a clause; empty if it does."""
    return grouped_refusal(SONIC_MOE, problem)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why SonicMoE cannot run `problem` on `device`, as a clause; empty if it can."""
    return device_refusal(device, SONIC_MOE) or problem_refusal(problem) or unavailable_reason(library)


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """The function that is called; its own choice of a tile is not reported."""
    return FUNCTION


def _layout(problem: MoEProblem) -> str:
    return SONIC_MOE.layout_of(problem.scheme)


RUNNER = Runner(
    NAME, _layout, compute, refusal, accumulation=accumulation, ready=ready, tactic=tactic, keeps="numbers"
)

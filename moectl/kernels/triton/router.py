"""Host code of the router's kernel: one launch from logits to expert ids and weights."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...problem.moe_problem import MoEProblem
from ..reference import SMALLEST_SUM, limits
from . import router_kernels as kernels
from .sort_and_combine import launch_options

FEWEST_PLACES, MOST_PLACES = 32, 1024
"""Among which a warp chooses: one a lane, and as many as its registers hold."""

WARPS = 1
"""Of a program. On an H200 the fastest at 1 to 8192 tokens, 32 to 384 experts: more wait for each other."""


def route(
    logits: Tensor,
    problem: MoEProblem,
    correction_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    *,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor]:
    """`kernels.reference.route` in fp32 for arguments already checked; `warps` of a program, for tuning.

    Nothing is read back and memory comes from torch.empty alone: a call can be captured in a CUDA graph.
    """
    routing, experts, k = problem.routing, problem.experts, problem.top_k
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty((len(logits), k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((len(logits), k), dtype=torch.float32, device=logits.device)
    if not len(logits):
        return ids, weights
    groups, kept = (routing.groups or 1, routing.topk_groups or 1) if limits(routing) else (1, 1)
    padded = triton.next_power_of_2(groups)
    size = max(FEWEST_PLACES // padded, triton.next_power_of_2(experts // groups))
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        kernels._route_kernel[(len(logits),)](
            LOGITS=logits,
            BIAS=_there(correction_bias, logits),
            FACTORS=_there(expert_scale, logits),
            TABLE=_there(table, ids),
            TOKENS=_there(token_ids, ids),
            IDS=ids,
            WEIGHTS=weights,
            stride=logits.stride(0),
            vocabulary=0 if table is None else len(table),
            scale=routing.scale,
            smallest_sum=SMALLEST_SUM,
            E=experts,
            GROUPS=groups,
            KEPT=kept,
            GPAD=padded,
            SPAD=size,
            K=k,
            KPAD=triton.next_power_of_2(k),
            SCORING=routing.scoring,
            AFTER=routing.after_topk,
            RENORMALIZE=routing.renormalize,
            BIASED=correction_bias is not None,
            FACTOR=expert_scale is not None,
            HASHED=table is not None,
            num_warps=max(warps, padded * size // MOST_PLACES),
            **launch_options(),
        )
    return ids, weights


def _there(t: Tensor | None, other: Tensor) -> Tensor:
    """`t` without gaps; `other`, which is not read, where the routing has none."""
    return other if t is None else t.contiguous()

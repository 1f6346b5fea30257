"""Host code of the router kernel: one launch from logits to expert ids and weights."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...problem.moe_problem import MoEProblem
from ..reference import SMALLEST_SUM, limits
from . import router_kernels as kernels
from .sort_and_combine import launch_options

MIN_PLACES, MAX_PLACES = 32, 1024
"""Places per warp: at least one per lane, at most what its registers hold."""

WARPS = 1
"""Warps per program: the fastest on an H200 at 1 to 8192 tokens and 32 to 384 experts; more synchronize."""


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
    """`kernels.reference.route` in fp32, for arguments that are already checked; `warps` is for tuning.

    Nothing is copied from the GPU and memory is allocated with torch.empty only, so that a call can be
    captured in a CUDA graph.
    """
    routing, experts, k = problem.routing, problem.experts, problem.top_k
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty((len(logits), k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((len(logits), k), dtype=torch.float32, device=logits.device)
    if not len(logits):
        return ids, weights
    groups, chosen_groups = (routing.groups or 1, routing.topk_groups or 1) if limits(routing) else (1, 1)
    padded_groups = triton.next_power_of_2(groups)
    group_size = max(MIN_PLACES // padded_groups, triton.next_power_of_2(experts // groups))
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        kernels._route_kernel[(len(logits),)](
            LOGITS=logits,
            BIAS=_or_unused(correction_bias, logits),
            FACTORS=_or_unused(expert_scale, logits),
            TABLE=_or_unused(table, ids),
            TOKENS=_or_unused(token_ids, ids),
            IDS=ids,
            WEIGHTS=weights,
            stride=logits.stride(0),
            vocabulary=0 if table is None else len(table),
            scale=routing.scale,
            smallest_sum=SMALLEST_SUM,
            E=experts,
            GROUPS=groups,
            KEPT=chosen_groups,
            GPAD=padded_groups,
            SPAD=group_size,
            K=k,
            KPAD=triton.next_power_of_2(k),
            SCORING=routing.scoring,
            AFTER=routing.after_topk,
            RENORMALIZE=routing.renormalize,
            BIASED=correction_bias is not None,
            FACTOR=expert_scale is not None,
            HASHED=table is not None,
            num_warps=max(warps, padded_groups * group_size // MAX_PLACES),
            **launch_options(),
        )
    return ids, weights


def _or_unused(t: Tensor | None, placeholder: Tensor) -> Tensor:
    """`t`, contiguous; if it is None `placeholder`, which the kernel does not read."""
    return placeholder if t is None else t.contiguous()

"""A grouped GEMM over plain weights, with the six launch parameters of an engine's tuned files.

No layer of moectl runs on it: it is only timed, in place of the engine's kernel that reads such files.
Weights are ``[experts, n, k]``; assignments are sorted by expert and each expert's are padded to whole
blocks of `GemmConfig.block_m` rows. Both GEMMs of a layer use the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..errors import UsageError
from .grouped_gemm_kernels import _plain_gemm_kernel

SPAN = 128
"""Columns that share a scale, and rows of weights."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One launch configuration: tile sizes, row blocks per L2 group (GROUP_SIZE_M), warps, stages."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PaddedAssignments:
    """Assignments by expert, in blocks of one size.

    Attributes:
        order: int32 assignment of every row; the number of assignments in padding rows.
        experts: int32 expert of every block.
        filled: int32 ``[1]``, rows of the blocks that have assignments.
        assignments: number of assignments.
        most: upper bound on the rows that any routing of this many assignments fills.
    """

    order: Tensor
    experts: Tensor
    filled: Tensor
    assignments: int
    most: int


def sort(ids: Tensor, experts: int, block_m: int) -> PaddedAssignments:
    """``[tokens, top_k]`` expert ids, -1 for none, sorted into blocks of `block_m`. Waits for the GPU."""
    flat = ids.flatten().long()
    hit = min(len(flat), experts)
    most = (hit + (len(flat) - hit) // block_m) * block_m
    by_expert = flat.argsort(stable=True)
    by_expert = by_expert[flat[by_expert] >= 0]
    of = flat[by_expert]
    counts = torch.bincount(of, minlength=experts)
    whole = (counts + block_m - 1) // block_m * block_m
    begins = whole.cumsum(0) - whole
    within = torch.arange(len(of), device=ids.device) - (counts.cumsum(0) - counts)[of]
    order = torch.full((most,), len(flat), dtype=torch.int32, device=ids.device)
    order[begins[of] + within] = by_expert.int()
    of_block = torch.repeat_interleave(torch.arange(experts, device=ids.device), whole // block_m)
    padded = torch.zeros(most // block_m, dtype=torch.int32, device=ids.device)
    padded[: len(of_block)] = of_block.int()
    return PaddedAssignments(order, padded, whole.sum().int().view(1), len(flat), most)


def plain_gemm(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    rows: PaddedAssignments,
    blocks: GemmConfig,
    scales: tuple[Tensor, Tensor] | None = None,
    swapped: bool = False,
) -> Tensor:
    """``y[a] = x[a // share] @ weight[expert of a].T`` for assignments a; share is assignments / rows of x.

    Args:
        swapped: weights are the left operand (swap-AB).
        scales: fp32 ``[rows of x, k / 128]`` and ``[experts, n / 128, k / 128]``, for FP8 operands.

    Raises UsageError if `rows` are sorted into blocks of another size, and for a block_k that is not a
    divisor of the scales' block.
    """
    n, k = weight.shape[1:]
    if rows.most % blocks.block_m or len(rows.experts) * blocks.block_m != rows.most:
        raise UsageError(f"rows are sorted into other blocks than of {blocks.block_m}")
    if scales is not None and (SPAN % blocks.block_k or k % SPAN):
        raise UsageError(f"a depth of {blocks.block_k} of {k} cuts across spans of {SPAN} that share a scale")
    count = rows.most // blocks.block_m
    grid = (count * triton.cdiv(n, blocks.block_n),)
    x_scale, weight_scale = scales if scales is not None else (x, weight)
    _plain_gemm_kernel[grid](
        x,
        weight,
        y,
        x_scale,
        weight_scale,
        rows.order,
        rows.experts,
        rows.filled,
        n,
        k,
        count,
        rows.assignments,
        rows.assignments // len(x),
        SCALED=scales is not None,
        SWAPPED=swapped,
        BLOCK_M=blocks.block_m,
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        GROUP_M=blocks.group_m,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return y

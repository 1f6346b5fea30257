"""What surrounds the GEMMs of other libraries, with one's own kernels: blocks of slots, activation, sum.

Libraries give GEMMs, and leave these steps to whoever calls them. Grids depend on sizes alone, nothing is
read back, and skipped assignments (ids that are no expert here) are left out by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...capabilities.kernel_support import KernelSupport
from ...dtypes import MODEL_DTYPES
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem
from ...torch_dtypes import MODEL_TORCH_DTYPES
from ..triton.kernel_family import activation_numbers
from ..triton.sort_and_combine import FEW, INTERPRETED, SUMS, launch_options, sort_by_expert
from . import gemm_glue_kernels as kernels

PARTS = 8
"""Programs that share the blocks of one expert, where there are many slots."""

WHOLE = {"PDL": False}
"""Options of a launch that begins and ends by itself."""

COLUMNS = 1024
"""Columns of a program of the activation."""


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Assignments in blocks of one expert each, as indexed GEMMs take them.

    Attributes:
        slots: int32, by expert; blocks are filled up with the number of assignments.
        experts: int32, of each block.
        total: ``[1]`` int32, how many entries of `slots` count.
        size: slots of a block.
        locks: int32 words that are zero, for GEMMs whose programs wait for each other.
    """

    slots: Tensor
    experts: Tensor
    total: Tensor
    size: int
    locks: Tensor


def most_slots(assignments: int, experts: int, size: int) -> int:
    """Entries that `ExpertBlocks.slots` needs at most: whole blocks, whatever the routing is."""
    hit = min(assignments, experts)
    return size * min(assignments, (assignments + hit * (size - 1)) // size)


def blocks_of(ids: Tensor, experts: int, size: int, locks: int, whole: bool = False) -> ExpertBlocks:
    """Assignments ``[T]`` int32 in blocks of `size`, with so many zeroed `locks`; one launch for a few.

    What lies behind `total` in `slots` and `experts` is not set. `whole`: the next kernel starts when all is
    written; else one that is launched to start early must wait before it reads any of it.
    """
    t = ids.numel()
    most = most_slots(t, experts, size)
    made = ExpertBlocks(
        ids.new_empty(most), ids.new_empty(most // size), ids.new_empty(1), size, ids.new_empty(locks)
    )
    into = (made.slots, made.experts, made.total, made.locks, t)
    shared = {
        "E": experts,
        "BINS": max(16, triton.next_power_of_2(experts)),
        "BLOCK": size,
        "PAD": triton.next_power_of_2(size),
        "LOCKED": locks,
        "BL": 128,
        **(WHOLE if whole else launch_options()),
    }
    if t <= FEW:
        bt = max(16, triton.next_power_of_2(t))
        warps = min(4, max(1, bt // 64))
        most_blocks = triton.next_power_of_2(triton.cdiv(t, size))
        kernels._align_few_kernel[(experts,)](ids, *into, BT=bt, MOST=most_blocks, num_warps=warps, **shared)
    else:
        kernels._align_sorted_kernel[(experts, PARTS)](*sort_by_expert(ids, experts), *into, BT=256, **shared)
    return made


@dataclass(frozen=True, slots=True)
class SortedAssignments:
    """Assignments sorted by expert, without blocks.

    Attributes:
        slots: ``[T]`` int32, the slot at each place; -1 behind the last.
        places: ``[T]`` int32, the place of each slot; -1 for skipped ones.
        weights: ``[T]`` fp32, by place.
        counts: ``[experts]`` int32.
    """

    slots: Tensor
    places: Tensor
    weights: Tensor
    counts: Tensor


def ragged_of(ids: Tensor, weights: Tensor, experts: int) -> SortedAssignments:
    """Assignments ``[T]`` int32 with their weights ``[T]`` fp32, sorted by expert."""
    t = ids.numel()
    slots, offsets = sort_by_expert(ids, experts)
    made = SortedAssignments(slots, torch.empty_like(ids), torch.empty_like(weights), ids.new_empty(experts))
    block = 256
    kernels._ragged_kernel[(triton.cdiv(max(t, experts), block),)](
        ids, weights, slots, offsets, made.places, made.weights, made.counts, t,
        E=experts, BT=block, **launch_options(),
    )  # fmt: skip
    return made


def activate(x: Tensor, y: Tensor, problem: MoEProblem, pairs: bool | None = None) -> None:
    """`y` ``[rows, n]``: the problem's activation of `x` ``[rows, 2 * n]``, or ``[rows, n]`` without gates.

    `pairs`: gates and ups lie in pairs; None where they lie as in the problem.
    """
    rows, n = y.shape
    in_pairs = problem.rows == "interleaved" if pairs is None else pairs
    act = problem.activation
    numbers = activation_numbers(act)
    kernels._activation_kernel[(rows, triton.cdiv(n, COLUMNS))](
        x, y, n, numbers["alpha"], numbers["limit"],
        ACT=act.name, GATED=act.gated, PAIRS=in_pairs,
        BLOCK=COLUMNS, INTERP=INTERPRETED, **launch_options(),
    )  # fmt: skip


def weighted_sum(parts: Tensor, y: Tensor, ids: Tensor, experts: int, weights: Tensor | None = None) -> None:
    """Writes `y` ``[tokens, hidden]``: the sum of each token's rows of `parts`, times `weights` if given.

    Args:
        parts: ``[T, at least hidden]``; only the rows of valid `ids` ``[T]`` int32 are read.
        weights: ``[T]`` fp32; None where `parts` are multiplied already.
    """
    tokens, hidden = y.shape
    launch = next(found for most, found in SUMS if tokens <= most)
    grid = (triton.cdiv(tokens, launch.rows), triton.cdiv(hidden, launch.columns))
    kernels._weighted_sum_kernel[grid](
        parts, y, ids, ids if weights is None else weights, tokens, hidden, parts.shape[1],
        E=experts, TOP_K=ids.numel() // tokens, WEIGH=weights is not None,
        ROWS=launch.rows, BH=launch.columns, INTERP=INTERPRETED, num_warps=launch.warps, **launch_options(),
    )  # fmt: skip


def device_refusal(device: torch.device, support: KernelSupport) -> str:
    """Why a library's kernels do not run on `device`; empty when they do."""
    if device.type != "cuda":
        return f"it needs a CUDA GPU, the weights are on {device.type}"
    there = torch.cuda.get_device_capability(device)
    if support.runs_on(there):
        return ""
    return f"it needs compute capability {support.capability}, the GPU has {there[0]}.{there[1]}"


def scale_refusal(problem: MoEProblem) -> str:
    """Why scales of 16 bits are refused that are not of the model's own dtype; empty where they are."""
    weight, wanted = problem.scheme.weight, MODEL_DTYPES[problem.dtype]
    if weight.scale_dtype in ("", "E8M0", wanted):
        return ""
    return f"it reads scales in the model's dtype, {wanted}, the layer has {weight.scale_dtype}"


def check_dtype(problem: MoEProblem, x: Tensor) -> None:
    """UsageError when tokens are not of the model's dtype, which scales and biases have too."""
    expected = MODEL_TORCH_DTYPES[problem.dtype]
    if x.dtype != expected:
        raise UsageError(f"x must be {expected}, the model's dtype, got {x.dtype}; cast it before the call")

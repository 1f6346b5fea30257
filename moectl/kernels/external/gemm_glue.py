"""The steps around the GEMMs of external kernels: blocks of assignments, activation, weighted sum.

External libraries provide the GEMMs only; these steps run in moectl's own kernels. Grids depend on sizes
only, nothing is copied from the GPU, and every kernel skips assignments whose id is not a local expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...capabilities.kernel_support import KernelSupport
from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ..choice.launch import FEW
from ..triton.kernel_family import activation_numbers
from ..triton.sort_and_combine import INTERPRETED, launch_options, sort_by_expert
from . import gemm_glue_kernels as kernels

PROGRAMS_PER_EXPERT = 8
"""Programs that share the blocks of one expert if there are many assignments."""

NO_OVERLAP = {"PDL": False}
"""Options of a launch without programmatic dependent launch."""

COLUMNS = 1024
"""Columns per program of the activation kernel."""

SUMS = ((16, (256, 1)), (64, (512, 4)), (float("inf"), (2048, 8)))
"""(maximum tokens, columns and warps per program) of the weighted sum; the first match is used. Measured on
an H200."""


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Assignments in blocks of one expert each, as indexed GEMMs take them (vLLM: ``moe_align_block_size``).

    Attributes:
        slots: int32, sorted by expert; blocks are padded with the number of assignments.
        experts: int32, the expert of each block.
        total: ``[1]`` int32, the number of valid entries of `slots`.
        size: slots per block.
        locks: zeroed int32 words for GEMMs whose programs synchronize with each other.
    """

    slots: Tensor
    experts: Tensor
    total: Tensor
    size: int
    locks: Tensor


def max_slots(assignments: int, experts: int, size: int) -> int:
    """Upper bound on the entries of `ExpertBlocks.slots`, a multiple of `size`, for any routing."""
    active = min(assignments, experts)
    return size * min(assignments, (assignments + active * (size - 1)) // size)


def align_blocks(ids: Tensor, experts: int, size: int, locks: int, overlap: bool = True) -> ExpertBlocks:
    """The assignments `ids` ``[T]`` int32 in blocks of `size`, with `locks` zeroed words.

    One launch for up to `FEW` assignments. Entries of `slots` and `experts` beyond `total` are undefined.

    Args:
        overlap: the next kernel may start early (programmatic dependent launch), and then has to wait
            before it reads the blocks; otherwise it starts after they are written.
    """
    t = ids.numel()
    bound = max_slots(t, experts, size)
    blocks = ExpertBlocks(
        ids.new_empty(bound), ids.new_empty(bound // size), ids.new_empty(1), size, ids.new_empty(locks)
    )
    outputs = (blocks.slots, blocks.experts, blocks.total, blocks.locks, t)
    options = {
        "E": experts,
        "BINS": max(16, triton.next_power_of_2(experts)),
        "BLOCK": size,
        "PAD": triton.next_power_of_2(size),
        "LOCKED": locks,
        "BL": 128,
        **(launch_options() if overlap else NO_OVERLAP),
    }
    if t <= FEW:
        bt = max(16, triton.next_power_of_2(t))
        warps = min(4, max(1, bt // 64))
        most_blocks = triton.next_power_of_2(triton.cdiv(t, size))
        kernels._align_few_kernel[(experts,)](
            ids, *outputs, BT=bt, MOST=most_blocks, num_warps=warps, **options
        )
    else:
        grid = (experts, PROGRAMS_PER_EXPERT)
        kernels._align_sorted_kernel[grid](*sort_by_expert(ids, experts), *outputs, BT=256, **options)
    return blocks


@dataclass(frozen=True, slots=True)
class SortedAssignments:
    """Assignments sorted by expert, not padded to blocks.

    Attributes:
        slots: ``[T]`` int32, the slot at each sorted position; -1 beyond the last.
        positions: ``[T]`` int32, the sorted position of each slot; -1 for skipped assignments.
        weights: ``[T]`` fp32, in sorted order.
        counts: ``[experts]`` int32, assignments of each expert.
    """

    slots: Tensor
    positions: Tensor
    weights: Tensor
    counts: Tensor


def sort_assignments(ids: Tensor, weights: Tensor, experts: int) -> SortedAssignments:
    """The assignments `ids` ``[T]`` int32 and their weights ``[T]`` fp32, sorted by expert."""
    t = ids.numel()
    slots, offsets = sort_by_expert(ids, experts)
    result = SortedAssignments(
        slots, torch.empty_like(ids), torch.empty_like(weights), ids.new_empty(experts)
    )
    block = 256
    kernels._ragged_kernel[(triton.cdiv(max(t, experts), block),)](
        ids, weights, slots, offsets, result.positions, result.weights, result.counts, t,
        E=experts, BT=block, **launch_options(),
    )  # fmt: skip
    return result


def activate(x: Tensor, y: Tensor, problem: MoEProblem, interleaved: bool | None = None) -> None:
    """Writes `y` ``[rows, n]``: the problem's activation of `x` ``[rows, 2 * n]``, ``[rows, n]`` if ungated.

    `interleaved`: whether gates and ups alternate in `x`; None for the order of the problem's rows.
    """
    rows, n = y.shape
    if interleaved is None:
        interleaved = problem.rows == "interleaved"
    act = problem.activation
    parameters = activation_numbers(act)
    kernels._activation_kernel[(rows, triton.cdiv(n, COLUMNS))](
        x, y, n, parameters["alpha"], parameters["limit"],
        ACT=act.name, GATED=act.gated, PAIRS=interleaved,
        BLOCK=COLUMNS, INTERP=INTERPRETED, **launch_options(),
    )  # fmt: skip


def weighted_sum(
    parts: Tensor,
    y: Tensor,
    ids: Tensor,
    experts: int,
    weights: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """Writes `y` ``[tokens, hidden]``: the sum of each token's rows of `parts`, times `weights` if given.

    Args:
        parts: ``[T, >= hidden]``, a row per assignment; only rows of valid `ids` ``[T]`` int32 are read.
        weights: ``[T]`` fp32; None if `parts` have been multiplied by them.
        places: ``[T]`` int32, the row of each assignment; None if rows are in the order of `ids`.
    """
    tokens, hidden = y.shape
    columns, warps = next(launch for most, launch in SUMS if tokens <= most)
    grid = (tokens, triton.cdiv(hidden, columns))
    kernels._weighted_sum_kernel[grid](
        parts, y, ids, ids if weights is None else weights, ids if places is None else places,
        tokens, hidden, parts.shape[1],
        E=experts, TOP_K=ids.numel() // tokens, WEIGH=weights is not None, PLACED=places is not None,
        ROWS=1, BH=columns, INTERP=INTERPRETED, num_warps=warps, **launch_options(),
    )  # fmt: skip


ACT_ORDER_REFUSAL = "it needs groups of consecutive columns; the layer's columns are permuted (act_order)"
INPUT_WEIGHT_REFUSAL = "it applies the router's weights to the output; the layer applies them to its input"


def device_refusal(device: torch.device, support: KernelSupport) -> str:
    """Why the kernels of `support` do not run on `device`, as a clause; empty if they do."""
    if device.type != "cuda":
        return f"it needs a CUDA GPU; the weights are on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if support.runs_on((major, minor)):
        return ""
    return f"it needs compute capability {support.capability}; the GPU has {major}.{minor}"


def scale_refusal(problem: MoEProblem) -> str:
    """Why scales are rejected that have neither the model's dtype nor E8M0, as a clause; else empty."""
    weight, model_dtype = problem.scheme.weight, MODEL_DTYPES[problem.dtype]
    if weight.scale_dtype in ("", "E8M0", model_dtype):
        return ""
    return f"it needs scales in the model's dtype, {model_dtype}; the layer has {weight.scale_dtype}"

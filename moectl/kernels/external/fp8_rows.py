"""What stands around FP8 GEMMs of other libraries: quantizing rows to E4M3, and the order by expert.

The steps run in moectl's own kernels, one launch each (two where one scale holds for all tokens). Grids
depend on sizes only, nothing is copied from the GPU, and rows of skipped assignments are neither read nor
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...capabilities.kernel_support import KernelSupport
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, ActFormat
from ..prepared_layer import PreparedMoE
from ..triton.kernel_family import activation_numbers
from ..triton.sort_and_combine import INTERPRETED, launch_options, sort_by_expert
from . import fp8_rows_kernels as kernels

COLUMNS = 1024
"""Columns per program, where a row's scale is not its own."""

GROUP = 128
"""Columns that share a scale in `quantize_rows` with scales by block."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Assignments sorted by expert, for grouped GEMMs.

    Attributes:
        slots: ``[T]`` int32, the slot at each position; undefined beyond the last valid one.
        offsets: ``[experts + 1]`` int32, where each expert's positions begin.
        starts: the same, int64.
        places: ``[T]`` int32, the position of each valid slot; undefined for others.
    """

    slots: Tensor
    offsets: Tensor
    starts: Tensor
    places: Tensor


def expert_rows(ids: Tensor, experts: int) -> ExpertRows:
    """The assignments `ids` ``[T]`` int32 by expert; ids outside ``[0, experts)`` are skipped."""
    slots, offsets = sort_by_expert(ids, experts)
    rows = ExpertRows(
        slots, offsets, torch.empty_like(offsets, dtype=torch.int64), ids.new_empty(ids.numel())
    )
    t, block = ids.numel(), 256
    kernels._places_kernel[(triton.cdiv(max(t, experts + 1), block),)](
        ids, slots, offsets, rows.places, rows.starts, t, E=experts, BT=block, **launch_options()
    )
    return rows


def quantize_rows(
    x: Tensor,
    problem: MoEProblem,
    form: ActFormat,
    static: Tensor | None = None,
    *,
    activated: bool = False,
    ids: Tensor | None = None,
    order: ExpertRows | None = None,
) -> tuple[Tensor, Tensor]:
    """E4M3 rows ``[rows, n]`` of tokens or of activations, and their fp32 scales.

    Scales are ``[rows, n / 128]`` by block, ``[rows, 1]`` by token, and ``[1]`` for one of everything, which
    is `static` or found in the rows that count.

    Args:
        x: 16-bit tokens ``[tokens, n]``; with `activated` what the first GEMM left, ``[rows, 2 * n]`` with
            gates first (``[rows, n]`` without a gate), to which the problem's activation is applied.
        form: the problem's activation format: dynamic by token or blocks of `GROUP`, or of everything.
        ids: ``[rows]`` int32: only rows of valid ids count.
        order: only its positions count; unless `activated`, position p has the token of its slot.
    """
    n = x.shape[1] // (2 if activated and problem.activation.gated else 1)
    rows = x.shape[0] if order is None or activated else len(order.slots)
    codes = torch.empty(rows, n, dtype=torch.float8_e4m3fn, device=x.device)
    stored = codes.view(torch.uint8) if INTERPRETED else codes
    act, parameters = problem.activation, activation_numbers(problem.activation)
    options = {
        "E": problem.local_experts,
        "TOP_K": problem.top_k,
        "LIVE": "ids" if ids is not None else "sorted" if order is not None else "all",
        "GATHER": order is not None and not activated,
        "ACT": act.name if activated else "",
        "GATED": act.gated,
        "PAIRS": False,
        "GROUP": GROUP,
        "POWERS": form.rounds_scales,
    }

    def launch(scaling: str, scales: Tensor, scale: Tensor, largest: Tensor) -> None:
        whole = scaling == "token"
        block = max(16, triton.next_power_of_2(n)) if whole else COLUMNS
        extra: dict[str, Any] = {"num_warps": min(16, max(4, block // 1024))}
        kernels._quantize_kernel[(rows, triton.cdiv(n, block))](
            x, stored, scales, scale, largest, codes if ids is None else ids,
            codes if order is None else order.offsets, codes if order is None else order.slots,
            n, parameters["alpha"], parameters["limit"],
            SCALING=scaling, BLOCK=block, **options, **extra, **launch_options(),
        )  # fmt: skip

    if form.block == (FULL, FULL):
        if static is not None:
            launch("static", static, static, static)
            return codes, static
        largest = torch.zeros(1, dtype=torch.int32, device=x.device)
        scales = torch.empty(1, dtype=torch.float32, device=x.device)
        launch("find", scales, scales, largest)
        launch("found", scales, scales, largest)
        return codes, scales
    columns = 1 if form.block[1] == FULL else n // GROUP
    scales = torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    launch("token" if form.block[1] == FULL else "group", scales, scales, scales)
    return codes, scales


def fp8_matrix(prepared: PreparedMoE, role: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights, fp32 scales and static input scale of an FP8 matrix in one of the ``plain-fp8`` layouts.

    Scales per tensor are ``[e]`` for a single matrix, and one for each row, ``[e, n, 1]``, for gate and up.
    """
    weights, problem = prepared.weights, prepared.problem
    weight = weights[role].view(torch.float8_e4m3fn)
    scales = weights[f"{role}_scale"].float().contiguous()
    if problem.scheme.weight.block == (FULL, FULL):
        halves = scales.shape[1]
        scales = scales.flatten() if halves == 1 else scales.repeat_interleave(weight.shape[1] // halves, 1)
    static = weights.get(f"{role}_input")
    return weight, scales, None if static is None else static.reshape(1)


def formats_refusal(problem: MoEProblem, support: KernelSupport) -> str:
    """Why `support` lacks the layer's weights, tokens or dtype, as a clause; empty if it has them."""
    weight, act = problem.scheme.weight, problem.scheme.act
    row = support.row_of(weight)
    if row is None:
        return f"it supports {', '.join(map(str, support.formats))} weights; the layer has {weight}"
    if act not in row.acts:
        known = " or ".join(map(_words, row.acts))
        return f"with {weight} weights it takes {known} tokens; the layer has {_words(act)} ones"
    if problem.dtype not in row.dtypes:
        return f"it supports {' and '.join(row.dtypes)} models; this one is {problem.dtype}"
    return ""


def _words(act: ActFormat) -> str:
    """An activation format in words: ``16-bit``, ``fp8 dynamic per token``."""
    if act.bits == 16:
        return "16-bit"
    extent = {(FULL, FULL): "per tensor", (1, FULL): "per token"}
    return f"{act} {extent.get(act.block, f'by {act.block[1]} columns')}"

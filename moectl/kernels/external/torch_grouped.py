"""The torch_grouped backend: torch's own grouped products, which need no other package.

``torch._grouped_mm`` multiplies BF16, ``torch._scaled_grouped_mm`` FP8 with a scale for each row of tokens
and of weights. A call puts the tokens into rows by expert (quantized, with FP8 weights), multiplies, applies
the activation, multiplies, and sums with the router's weights. On a CPU, where torch has the BF16 product,
the other steps are plain torch, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...capabilities.external_kernels import TORCH_GROUPED
from ...errors import Unavailable
from ...problem.moe_problem import MoEProblem
from ..activation import activate as activate_in_torch
from ..prepared_layer import PreparedMoE
from ..runner import Runner, check_dtype
from .gemm_glue import device_refusal, weighted_sum
from .grouped_formats import accumulation, grouped_refusal
from .grouped_rows import WHOLE_ROWS, RowScales, activate_rows, place_rows, scatter_tokens
from .import_library import failing_as, unavailable_reason

NAME = "torch_grouped"

PRODUCTS = ("_grouped_mm", "_scaled_grouped_mm")
"""torch's functions for 16-bit and for FP8 operands."""


@cache
def products() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Both functions of `PRODUCTS`; Unavailable if this torch lacks one."""
    missing = [name for name in PRODUCTS if not hasattr(torch, name)]
    if missing:
        raise Unavailable(
            f"torch {torch.__version__} lacks {' and '.join(f'torch.{name}' for name in missing)}",
            hint="pip install 'torch>=2.8'",
        )
    plain, scaled = (getattr(torch, name) for name in PRODUCTS)
    return plain, scaled


@dataclass(frozen=True)
class TorchGroupedMatrix:
    """One of the two expert matrices: `weight` ``[e, k, n]``, and fp32 `scales` ``[e, n]`` of FP8 rows."""

    weight: Tensor
    scales: Tensor | None


def matrix_of(prepared: PreparedMoE, role: str) -> TorchGroupedMatrix:
    """The matrix `role` of a layer in one of the plain layouts."""
    weights = prepared.weights
    if prepared.problem.scheme.weight.name != "fp8":
        return TorchGroupedMatrix(weights[role].mT, None)
    scales = weights[f"{role}_scale"].squeeze(-1).float().contiguous()
    return TorchGroupedMatrix(weights[role].view(torch.float8_e4m3fn).mT, scales)


def ready(prepared: PreparedMoE) -> tuple[TorchGroupedMatrix, TorchGroupedMatrix]:
    """The layer's two matrices, created once."""
    return prepared.derive(NAME, lambda prepared: (matrix_of(prepared, "w13"), matrix_of(prepared, "w2")))


def product(
    matrix: TorchGroupedMatrix, x: Tensor, scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """``[rows, n]``: rows of `x` by expert times its matrix; rows behind ``ends[-1]`` are undefined.

    Args:
        scales: fp32, one for each row of FP8 `x`; not read for 16-bit rows.
        ends: ``[e]`` int32, the end of each expert's rows.
    """
    plain, scaled = products()
    if matrix.scales is None:
        return plain(x, matrix.weight, offs=ends)
    return scaled(
        x, matrix.weight, scales.view(-1), matrix.scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )  # fmt: skip


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`."""
    check_dtype(prepared.problem, x)
    if not len(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    run = compute_in_torch if x.device.type == "cpu" else compute_in_rows
    return run(prepared, x, ids, weights)


def compute_in_rows(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`compute` on a GPU, with moectl's kernels around the products."""
    problem, (w13, w2) = prepared.problem, ready(prepared)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    ids, weights = ids.contiguous().view(-1), weights.contiguous().view(-1)
    quantize = None if w13.scales is None else RowScales(WHOLE_ROWS)
    with failing_as(NAME, x.device):
        placed = place_rows(ids, problem.local_experts)
        rows, scales = scatter_tokens(x, placed, problem.top_k, quantize)
        gate_up = product(w13, rows, scales, placed.ends, x.dtype)
        h, scales = activate_rows(gate_up, placed, problem.activation, quantize)
        parts = product(w2, h, scales, placed.ends, x.dtype)
        weighted_sum(parts, y, ids, problem.local_experts, weights, placed.rows)
    return y


def compute_in_torch(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`compute` in plain torch: only the rows of valid assignments, in the order of experts."""
    problem, (w13, w2) = prepared.problem, ready(prepared)
    experts, flat = problem.local_experts, ids.flatten().long()
    valid = (flat >= 0) & (flat < experts)
    slots = torch.argsort(torch.where(valid, flat, experts), stable=True)[: int(valid.sum())]
    y = x.new_zeros(x.shape, dtype=torch.float32)
    if not len(slots):
        return y.to(x.dtype)
    ends = torch.bincount(flat[slots], minlength=experts).cumsum(0).int()
    tokens = slots // ids.shape[1]
    with failing_as(NAME):
        gate_up = product(w13, x[tokens], x, ends, x.dtype)
        # The layout has gates first, whatever the checkpoint's order is.
        h = activate_in_torch(gate_up.float(), problem.activation, "concatenated").to(x.dtype)
        parts = product(w2, h, x, ends, x.dtype).float() * weights.flatten()[slots].unsqueeze(1)
    # A token's choices are added one after the other, each for all tokens that have it.
    for choice in range(ids.shape[1]):
        mine = slots % ids.shape[1] == choice
        y.index_add_(0, tokens[mine], parts[mine])
    return y.to(x.dtype)


def problem_refusal(problem: MoEProblem) -> str:
    """Why torch's products do not support `problem` on any device, as a clause; empty if they do."""
    return grouped_refusal(TORCH_GROUPED, problem)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why torch's products cannot run `problem` on `device`, as a clause; empty if they can."""
    if device.type == "cpu":
        row = TORCH_GROUPED.row_for(problem.scheme)
        if row is not None and problem.scheme.act.bits < 16:
            return (
                f"on a CPU torch multiplies 16-bit rows only; the layer has {problem.scheme.act.name} tokens"
            )
        return problem_refusal(problem) or unavailable_reason(products)
    return device_refusal(device, TORCH_GROUPED) or problem_refusal(problem) or unavailable_reason(products)


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """The function that is called; its own choice of a tile is not reported."""
    return f"torch.{PRODUCTS[prepared.problem.scheme.weight.name == 'fp8']}"


def _layout(problem: MoEProblem) -> str:
    return TORCH_GROUPED.layout_of(problem.scheme)


RUNNER = Runner(
    NAME, _layout, compute, refusal, accumulation=accumulation, ready=ready, tactic=tactic, keeps="numbers"
)

"""The cutlass backend: vLLM's grouped CUTLASS GEMMs for FP8 on SM90, with moectl's kernels around them.

It needs only vLLM's library file, not the engine. A call sorts the assignments by expert, quantizes each
one's token into that order, runs a GEMM, the activation with its quantization, and a second GEMM, and sums
with the router's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...capabilities.external_kernels import VLLM_CUTLASS
from ...capabilities.unpacked_libraries import CUTLASS_PEER
from ...errors import Unavailable
from ...problem.moe_problem import MoEProblem
from ..prepared_layer import PreparedMoE
from ..runner import Runner, check_dtype
from ..tolerance import DECLARED
from .fp8_rows import ExpertRows, expert_rows, formats_refusal, fp8_matrix, quantize_rows
from .gemm_glue import (
    ACT_ORDER_REFUSAL,
    INPUT_WEIGHT_REFUSAL,
    device_refusal,
    weighted_sum,
)
from .import_library import failing_as, library_operator, unavailable_reason

NAME = "cutlass"

GEMM, SIZES = "cutlass_moe_mm", "get_cutlass_moe_mm_problem_sizes_from_expert_offsets"

ARGUMENTS: dict[str, tuple[str, ...]] = {
    GEMM: (
        *("out_tensors", "a_tensors", "b_tensors", "a_scales", "b_scales", "expert_offsets"),
        *("problem_sizes", "a_strides", "b_strides", "c_strides", "per_act_token", "per_out_ch"),
    ),
    SIZES: ("expert_first_token_offset", "problem_sizes1", "problem_sizes2", "n", "k", "swap_ab"),
}
"""Arguments of the operators in vLLM 0.33.0; any other signature is rejected."""

SWAPPED_UP_TO = 64
"""Rows up to which the library swaps the operands; the sizes have to be made for the same order."""


@dataclass(frozen=True, slots=True)
class CutlassOperators:
    """The library's operators: a grouped GEMM, and the sizes of both GEMMs of a layer by expert."""

    gemm: Any
    sizes: Any


@cache
def operators() -> CutlassOperators:
    """The operators; Unavailable if one is missing, or its arguments differ from vLLM 0.33.0's."""
    return CutlassOperators(*(_operator(name) for name in ARGUMENTS))


def _operator(name: str) -> Any:
    operator = library_operator("_C", name, CUTLASS_PEER, NAME)
    names = tuple(argument.name for argument in operator._schema.arguments)
    if names != ARGUMENTS[name]:
        different = sorted(set(names) ^ set(ARGUMENTS[name]))
        raise Unavailable(
            f"the arguments of {name} in this vLLM's library differ from vLLM 0.33.0's: "
            f"{', '.join(different) or 'another order'}",
            hint="pip install vllm==0.33.0",
        )
    return operator


@dataclass(frozen=True)
class VllmCutlassMatrix:
    """One of the two expert matrices in the operator's terms.

    Attributes:
        weight: ``[e, n, k]`` E4M3.
        scales: fp32, one for each row, ``[e, n, 1]``, or for each expert, ``[e]``.
        input_scale: ``[1]`` fp32, the static scale of what enters; None if there is none.
        k_strides, n_strides: ``[e]`` int64, the distance of rows of what enters and of what leaves.
    """

    weight: Tensor
    scales: Tensor
    input_scale: Tensor | None
    k_strides: Tensor
    n_strides: Tensor


def matrix_of(prepared: PreparedMoE, role: str) -> VllmCutlassMatrix:
    """The matrix `role` of a layer in one of the ``plain-fp8`` layouts."""
    weight, scales, static = fp8_matrix(prepared, role)
    experts, n, k = weight.shape
    strides = (torch.full((experts,), size, dtype=torch.int64, device=weight.device) for size in (k, n))
    return VllmCutlassMatrix(weight, scales, static, *strides)


def ready(prepared: PreparedMoE) -> tuple[VllmCutlassMatrix, VllmCutlassMatrix]:
    """The layer's two matrices, created once."""
    return prepared.derive(NAME, lambda prepared: (matrix_of(prepared, "w13"), matrix_of(prepared, "w2")))


def gemm_arguments(
    matrix: VllmCutlassMatrix, x: Tensor, x_scale: Tensor, y: Tensor, order: ExpertRows, sizes: Tensor
) -> dict[str, Any]:
    """The operator's arguments by name.

    Args:
        x: ``[T, k]`` E4M3 rows sorted by expert.
        x_scale: fp32 ``[T, 1]``, or ``[1]`` for all rows.
        y: ``[T, n]``; only rows of experts are written.
        sizes: ``[e, 3]`` int32, each expert's problem.
    """
    return {
        "out_tensors": y,
        "a_tensors": x,
        "b_tensors": matrix.weight,
        "a_scales": x_scale,
        "b_scales": matrix.scales,
        "expert_offsets": order.starts[:-1],
        "problem_sizes": sizes,
        "a_strides": matrix.k_strides,
        "b_strides": matrix.k_strides,
        "c_strides": matrix.n_strides,
        "per_act_token": x_scale.ndim == 2,
        "per_out_ch": matrix.scales.ndim == 3,
    }


def problem_sizes(order: ExpertRows, problem: MoEProblem, rows: int) -> Sequence[Tensor]:
    """``[e, 3]`` int32 for each of the two GEMMs, with operands swapped as the library does for few rows."""
    experts, dims = problem.local_experts, problem.dims
    both = [order.offsets.new_empty(experts, 3) for _ in range(2)]
    operators().sizes(order.starts, *both, dims.intermediate, dims.hidden, rows <= SWAPPED_UP_TO)
    return both


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    gemm, (w13, w2), form = operators().gemm, ready(prepared), problem.scheme.act
    x, ids, weights = x.contiguous(), ids.contiguous().view(-1), weights.contiguous().view(-1)
    rows, experts = ids.numel(), problem.local_experts
    with failing_as(NAME, x.device):
        order = expert_rows(ids, experts)
        first, second = problem_sizes(order, problem, rows)
        values, scale = quantize_rows(x, problem, form, w13.input_scale, order=order)
        gate_up = x.new_empty(rows, w13.weight.shape[1])
        gemm(**gemm_arguments(w13, values, scale, gate_up, order, first))
        values, scale = quantize_rows(gate_up, problem, form, w2.input_scale, activated=True, order=order)
        parts = x.new_empty(rows, problem.dims.hidden)
        gemm(**gemm_arguments(w2, values, scale, parts, order, second))
        weighted_sum(parts, y, ids, experts, weights, order.places)
    return y


def problem_refusal(problem: MoEProblem) -> str:
    """Why the operators do not support `problem` on any GPU, as a clause; empty if they do."""
    if reason := formats_refusal(problem, VLLM_CUTLASS):
        return reason
    if problem.act_order == "group":
        return ACT_ORDER_REFUSAL
    if problem.bias:
        return "its GEMMs add no bias; the layer has biases"
    if problem.routing.weight_on_input:
        return INPUT_WEIGHT_REFUSAL
    if not problem.activation.gated:
        return "its sizes are made for gated experts; the layer's have no gate"
    for name, size in (("hidden", problem.dims.hidden), ("intermediate", problem.dims.intermediate)):
        if size % VLLM_CUTLASS.multiple:
            return (
                f"it needs sizes that are multiples of {VLLM_CUTLASS.multiple}; the layer's {name} size is "
                f"{size}"
            )
    return VLLM_CUTLASS.activation_refusal(problem.activation)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why the operators cannot run `problem` on `device`, as a clause; empty if they can."""
    return device_refusal(device, VLLM_CUTLASS) or problem_refusal(problem) or unavailable_reason(operators)


def layout(problem: MoEProblem) -> str:
    """The layout of a problem's weights; any for unsupported weights, which are rejected later."""
    return (VLLM_CUTLASS.row_of(problem.scheme.weight) or VLLM_CUTLASS.weights[0]).layout


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """The order of operands; the library chooses its tile itself and does not report it."""
    rows = tokens * prepared.problem.top_k
    return "operands swapped" if rows <= SWAPPED_UP_TO else "operands in order"


RUNNER = Runner(
    NAME, layout, compute, refusal, accumulation=DECLARED, ready=ready, tactic=tactic, keeps="numbers"
)

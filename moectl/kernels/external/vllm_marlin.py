"""The marlin backend: vLLM's Marlin MoE GEMM, two calls of one operator with moectl's kernels around them.

It needs only vLLM's library file, not the engine. A call groups the assignments in blocks of one expert, runs
a GEMM, the activation and a second GEMM, which also applies the router's weights if it does so correctly,
and sums. vLLM's own kernels for the blocks and the sum are not used because they do not support skipped
assignments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...capabilities.external_kernels import MARLIN
from ...errors import Unavailable
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, WeightFormat
from ..prepared_layer import PreparedMoE
from ..runner import Runner, check_dtype
from ..triton.kernel_family import multiprocessors
from .gemm_glue import (
    ACT_ORDER_REFUSAL,
    ExpertBlocks,
    activate,
    align_blocks,
    device_refusal,
    scale_refusal,
    weighted_sum,
)
from .import_library import failing_as, marlin_operator, unavailable_reason

NAME = "marlin"
BLOCKS = (8, 16, 32, 48, 64)
"""Block sizes of the operator, in tokens."""

MIN_OCCUPANCY = 0.9
"""Mean fill of a block from which the next larger block size is used."""

LOCKS = 4
"""Lock words per multiprocessor."""

ARGUMENTS = (
    *("a", "c_or_none", "b_q_weight", "b_bias_or_none", "b_scales", "a_scales", "global_scale"),
    *("b_zeros_or_none", "workspace", "sorted_token_ids", "expert_ids", "num_tokens_past_padded"),
    *("topk_weights", "moe_block_size", "top_k", "mul_topk_weights", "b_type_id", "size_m", "size_n"),
    *("size_k", "use_atomic_add", "use_fp32_reduce", "is_zp_float", "thread_k", "thread_n", "blocks_per_sm"),
)
"""Arguments of the operator in vLLM 0.33.0; any other signature is rejected."""


_E2M1, _E4M3 = 562949953487106, 2814749767172868

SCALAR_TYPES: Mapping[tuple[str, bool], int] = {
    ("int4", False): 1125899907892224,  # uint4b8
    ("int4", True): 1125899906843648,  # uint4
    ("int8", False): 1125899923621888,  # uint8b128
    ("mxfp4", False): _E2M1,
    ("nvfp4", False): _E2M1,
    ("mxfp8", False): _E4M3,
    ("fp8", False): _E4M3,
}
"""Ids of vLLM's ``ScalarType`` for which the library has kernels, by weight format and zero points."""

SCALE_DTYPES: Mapping[str, torch.dtype] = {
    "mxfp4": torch.float8_e8m0fnu,
    "nvfp4": torch.float8_e4m3fn,
    "mxfp8": torch.float8_e8m0fnu,
}
"""Dtypes of scales that are stored as bytes, by weight format."""


def scalar_type(weight: WeightFormat) -> int | None:
    """The id of vLLM's ``ScalarType`` for the codes of `weight`; None if there is no kernel for it."""
    return SCALAR_TYPES.get((weight.name, weight.zero_point))


@cache
def operator() -> Any:
    """The operator; Unavailable if it is missing, or its arguments differ from vLLM 0.33.0's."""
    gemm = marlin_operator()
    names = tuple(argument.name for argument in gemm._schema.arguments)
    if names != ARGUMENTS:
        different = sorted(set(names) ^ set(ARGUMENTS))
        raise Unavailable(
            f"the arguments of this vLLM's Marlin operator differ from vLLM 0.33.0's: "
            f"{', '.join(different) or 'another order'}",
            hint="pip install vllm==0.33.0",
        )
    return gemm


def block_size(assignments: int, experts: int) -> int:
    """Tokens per block for this many assignments, as vLLM chooses it."""
    per_expert = assignments / experts
    return next((size for size in BLOCKS if per_expert / size < MIN_OCCUPANCY), BLOCKS[-1])


@dataclass(frozen=True)
class VllmMarlinMatrix:
    """One of the two expert matrices in the operator's terms.

    Attributes:
        global_scale: one scale per expert, for NVFP4 only.
        type: id of the codes' ``ScalarType``.
        n, k: stored (padded) rows and columns.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    type: int
    n: int
    k: int

    @property
    def applies_weights_correctly(self) -> bool:
        """Whether the operator can apply the router's weights to this matrix.

        With both a global scale and a bias, it also multiplies the bias by the global scale when it applies
        the router's weights: values of 1e31 with vLLM 0.33.0's library on an H200
        (https://github.com/vllm-project/vllm/issues/48895 describes such values). Otherwise it adds the bias
        unchanged.
        """
        return self.global_scale is None or self.bias is None


def matrix_of(prepared: PreparedMoE, role: str) -> VllmMarlinMatrix:
    """The matrix `role` of a layer in one of Marlin's layouts."""
    weight, weights = prepared.problem.scheme.weight, prepared.weights
    type_id = scalar_type(weight)
    assert type_id is not None, "rejected before"
    codes, scales = weights[role], weights[f"{role}_scale"]
    return VllmMarlinMatrix(
        codes,
        scales.view(SCALE_DTYPES[weight.name]) if weight.name in SCALE_DTYPES else scales,
        weights.get(f"{role}_global"),
        weights.get(f"{role}_zero"),
        weights.get(f"{role}_bias"),
        type_id,
        n=codes.shape[2] * 32 // weight.bits // 16,
        k=16 * codes.shape[1],
    )


def gemm_arguments(
    matrix: VllmMarlinMatrix,
    x: Tensor,
    y: Tensor,
    blocks: ExpertBlocks,
    weights: Tensor,
    top_k: int,
    apply_weights: bool,
) -> dict[str, Any]:
    """The operator's arguments by name.

    Args:
        x: ``[rows, k]``; slot s reads row ``s // top_k``.
        y: ``[slots, n]``; only rows of valid slots are written.
        weights: ``[slots]`` fp32; with `apply_weights` the rows of `y` are multiplied by them.
    """
    return {
        "a": x,
        "c_or_none": y,
        "b_q_weight": matrix.codes,
        "b_bias_or_none": matrix.bias,
        "b_scales": matrix.scales,
        "a_scales": None,
        "global_scale": matrix.global_scale,
        "b_zeros_or_none": matrix.zeros,
        "workspace": blocks.locks,
        "sorted_token_ids": blocks.slots,
        "expert_ids": blocks.experts,
        "num_tokens_past_padded": blocks.total,
        "topk_weights": weights,
        "moe_block_size": blocks.size,
        "top_k": top_k,
        "mul_topk_weights": apply_weights,
        "b_type_id": matrix.type,
        "size_m": len(x),
        "size_n": matrix.n,
        "size_k": matrix.k,
        "use_atomic_add": False,
        "use_fp32_reduce": True,
        "is_zp_float": False,
        "thread_k": -1,
        "thread_n": -1,
        "blocks_per_sm": -1,
    }


def ready(prepared: PreparedMoE) -> tuple[VllmMarlinMatrix, VllmMarlinMatrix]:
    """The layer's two matrices, created once."""
    return prepared.derive(NAME, lambda prepared: (matrix_of(prepared, "w13"), matrix_of(prepared, "w2")))


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    gemm, (w13, w2) = operator(), ready(prepared)
    experts = problem.local_experts
    ids, weights = ids.contiguous().view(-1), weights.contiguous().view(-1)
    slots = ids.numel()
    in_gemm1 = problem.routing.weight_on_input
    in_gemm2 = not in_gemm1 and w2.applies_weights_correctly
    with failing_as(NAME, x.device):
        locks = LOCKS * multiprocessors(prepared.device)
        blocks = align_blocks(ids, experts, block_size(slots, experts), locks)
        padded = torch.nn.functional.pad(x, (0, w13.k - x.shape[1])) if w13.k > x.shape[1] else x.contiguous()
        gate_up = x.new_empty(slots, w13.n)
        gemm(**gemm_arguments(w13, padded, gate_up, blocks, weights, problem.top_k, in_gemm1))
        h = x.new_empty(slots, w2.k)
        activate(gate_up, h, problem)
        parts = x.new_empty(slots, w2.n)
        gemm(**gemm_arguments(w2, h, parts, blocks, weights, 1, in_gemm2))
        weighted_sum(parts, y, ids, experts, None if in_gemm1 or in_gemm2 else weights)
    return y


def problem_refusal(problem: MoEProblem) -> str:
    """Why the operator does not support `problem` on any GPU, as a clause; empty if it does."""
    weight = problem.scheme.weight
    row = MARLIN.row(weight.name)
    if row is None or scalar_type(weight) is None:
        supported = dict.fromkeys(
            f"{format.name}{' with zero points' if format.zero_point else ''}" for format in MARLIN.formats
        )
        return f"it supports {', '.join(supported)}; the layer has {weight}"
    if not MARLIN.reads(weight):
        blocks = (format.block for format in row.formats if format.zero_point == weight.zero_point)
        scales = ", ".join(_block_text(block) for block in blocks)
        return f"it supports {weight.name} scales of {scales}; the layer has {weight}"
    if problem.dtype not in row.dtypes:
        return (
            f"with {weight.name} weights it supports {' and '.join(row.dtypes)} models; this one is "
            f"{problem.dtype}"
        )
    if problem.act_order == "group":
        return ACT_ORDER_REFUSAL
    if problem.routing.weight_on_input and problem.bias:
        return "it would also multiply the first GEMM's bias by the router's weights (weight on the input)"
    return ("" if row.own_scales else scale_refusal(problem)) or MARLIN.activation_refusal(problem.activation)


def _block_text(block: tuple[int, int]) -> str:
    rows, columns = block
    if rows == FULL:
        return "a whole matrix"
    width = "whole rows" if columns == FULL else f"{columns} columns"
    return width if rows == 1 else f"{rows} rows by {width}"


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why the operator cannot run `problem` on `device`, as a clause; empty if it can."""
    return device_refusal(device, MARLIN) or problem_refusal(problem) or unavailable_reason(operator)


def layout(problem: MoEProblem) -> str:
    """The layout of a problem's weights; int4's for unsupported weights, which are rejected later."""
    weight = problem.scheme.weight
    row = MARLIN.row(weight.name) if scalar_type(weight) else None
    return (row or MARLIN.weights[0]).layout


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """The block size; the operator chooses its tile itself and does not report it."""
    problem = prepared.problem
    return f"blocks of {block_size(tokens * problem.top_k, problem.local_experts)}"


RUNNER = Runner(NAME, layout, compute, refusal, accumulation="steps", ready=ready, tactic=tactic)

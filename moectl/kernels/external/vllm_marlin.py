"""vLLM's Marlin MoE GEMM as a backend: two calls of one operator, with moectl's kernels around them.

It needs vLLM's library file alone, not the engine. A call lists the assignments in blocks of one expert,
runs a GEMM, the activation and a GEMM that multiplies by the router's weights where it does so rightly,
and sums. vLLM's own kernels for the blocks and the sum are not used: they take no assignment without
an expert.
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
from ..runner import Runner
from ..triton.kernel_family import multiprocessors
from .gemm_glue import (
    ExpertBlocks,
    activate,
    blocks_of,
    check_dtype,
    device_refusal,
    scale_refusal,
    weighted_sum,
)
from .import_library import failing_as, marlin_operator, why_not

NAME = "marlin"
BLOCKS = (8, 16, 32, 48, 64)
"""Tokens of a block that the operator takes; the first of which an expert's mean share fills 0.9."""

FILLED = 0.9
LOCKS = 4
"""Words that programs wait on, for each multiprocessor."""

ARGUMENTS = (
    *("a", "c_or_none", "b_q_weight", "b_bias_or_none", "b_scales", "a_scales", "global_scale"),
    *("b_zeros_or_none", "workspace", "sorted_token_ids", "expert_ids", "num_tokens_past_padded"),
    *("topk_weights", "moe_block_size", "top_k", "mul_topk_weights", "b_type_id", "size_m", "size_n"),
    *("size_k", "use_atomic_add", "use_fp32_reduce", "is_zp_float", "thread_k", "thread_n", "blocks_per_sm"),
)
"""What the operator takes in vLLM 0.33.0; that of another version is refused."""


@dataclass(frozen=True, slots=True)
class MarlinWeightType:
    """What the operator is given with weights of one kind.

    Attributes:
        type: vLLM's number for what a code stands for.
        scales: dtype as which scales that are bytes are handed over, or None.
    """

    type: int
    scales: torch.dtype | None = None


_E2M1, _E4M3 = 562949953487106, 2814749767172868

KINDS: Mapping[tuple[str, bool], MarlinWeightType] = {
    ("int4", False): MarlinWeightType(1125899907892224),
    ("int4", True): MarlinWeightType(1125899906843648),
    ("int8", False): MarlinWeightType(1125899923621888),
    ("mxfp4", False): MarlinWeightType(_E2M1, torch.float8_e8m0fnu),
    ("nvfp4", False): MarlinWeightType(_E2M1, torch.float8_e4m3fn),
    ("mxfp8", False): MarlinWeightType(_E4M3, torch.float8_e8m0fnu),
    ("fp8", False): MarlinWeightType(_E4M3),
}
"""By name and zero points: uint4 less 8, uint4, uint8 less 128, E2M1, E4M3; as kernels are in the library."""


def kind_of(weight: WeightFormat) -> MarlinWeightType | None:
    """The row of `KINDS` for such weights; None when there is none."""
    return KINDS.get((weight.name, weight.zero_point))


@cache
def operator() -> Any:
    """The operator; Unavailable when it is not here, or is of a version with other arguments."""
    found = marlin_operator()
    names = tuple(argument.name for argument in found._schema.arguments)
    if names != ARGUMENTS:
        odd = sorted(set(names) ^ set(ARGUMENTS))
        raise Unavailable(
            f"this vLLM's Marlin operator takes other arguments than that of vLLM 0.33.0: "
            f"{', '.join(odd) or 'another order'}",
            hint="pip install vllm==0.33.0",
        )
    return found


def block_size(assignments: int, experts: int) -> int:
    """Tokens of a block for so many assignments, as vLLM chooses it."""
    each = assignments / experts
    return next((size for size in BLOCKS if each / size < FILLED), BLOCKS[-1])


@dataclass(frozen=True)
class VllmMarlinMatrix:
    """One of the two expert matrices as the operator takes it; `n` rows and `k` columns as stored.

    Attributes:
        factors: of each expert's codes, NVFP4's alone.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    type: int
    n: int
    k: int

    @property
    def weighs_rightly(self) -> bool:
        """Whether the operator's product by the router's weights is right.

        With factors it multiplies the bias by them, too: values of 1e31 with vLLM 0.33.0's
        library on an H200 (https://github.com/vllm-project/vllm/issues/48895 describes such values). Without
        that product the bias is added as it is.
        """
        return self.factors is None or self.bias is None


def matrix_of(prepared: PreparedMoE, role: str) -> VllmMarlinMatrix:
    """The matrix `role` of a layer in one of Marlin's layouts."""
    kind, weights = kind_of(prepared.problem.scheme.weight), prepared.weights
    assert kind is not None
    codes, scales = weights[role], weights[f"{role}_scale"]
    return VllmMarlinMatrix(
        codes,
        scales if kind.scales is None else scales.view(kind.scales),
        weights.get(f"{role}_global"),
        weights.get(f"{role}_zero"),
        weights.get(f"{role}_bias"),
        kind.type,
        n=codes.shape[2] * 32 // prepared.problem.scheme.weight.bits // 16,
        k=16 * codes.shape[1],
    )


def gemm_arguments(
    matrix: VllmMarlinMatrix,
    x: Tensor,
    y: Tensor,
    blocks: ExpertBlocks,
    weights: Tensor,
    top_k: int,
    weigh: bool,
) -> dict[str, Any]:
    """The operator's arguments by name.

    Args:
        x: ``[rows, k]``, of which slot s takes row ``s // top_k``.
        y: ``[slots, n]``, of which rows of valid slots are written.
        weights: ``[slots]`` fp32, which multiply the rows of `y` with `weigh`.
    """
    return {
        "a": x,
        "c_or_none": y,
        "b_q_weight": matrix.codes,
        "b_bias_or_none": matrix.bias,
        "b_scales": matrix.scales,
        "a_scales": None,
        "global_scale": matrix.factors,
        "b_zeros_or_none": matrix.zeros,
        "workspace": blocks.locks,
        "sorted_token_ids": blocks.slots,
        "expert_ids": blocks.experts,
        "num_tokens_past_padded": blocks.total,
        "topk_weights": weights,
        "moe_block_size": blocks.size,
        "top_k": top_k,
        "mul_topk_weights": weigh,
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
    """The layer's two matrices; made once and kept with it."""
    made: tuple[VllmMarlinMatrix, VllmMarlinMatrix] | None = prepared.derived.get(NAME)
    if made is None:
        made = matrix_of(prepared, "w13"), matrix_of(prepared, "w2")
        prepared.derived[NAME] = made
    return made


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as of `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    gemm, (w13, w2) = operator(), ready(prepared)
    experts = problem.local_experts
    ids, weights = ids.contiguous().view(-1), weights.contiguous().view(-1)
    early = problem.routing.weight_on_input
    late = not early and w2.weighs_rightly
    with failing_as(NAME, x.device):
        blocks = blocks_of(
            ids, experts, block_size(ids.numel(), experts), LOCKS * multiprocessors(prepared.device)
        )
        padded = torch.nn.functional.pad(x, (0, w13.k - x.shape[1])) if w13.k > x.shape[1] else x.contiguous()
        first = x.new_empty(ids.numel(), w13.n)
        gemm(**gemm_arguments(w13, padded, first, blocks, weights, problem.top_k, early))
        hidden = x.new_empty(ids.numel(), w2.k)
        activate(first, hidden, problem)
        parts = x.new_empty(ids.numel(), w2.n)
        gemm(**gemm_arguments(w2, hidden, parts, blocks, weights, 1, late))
        weighted_sum(parts, y, ids, experts, None if early or late else weights)
    return y


def problem_refusal(problem: MoEProblem) -> str:
    """Why the operator cannot compute `problem` on any GPU, in a sentence; empty when it can."""
    weight = problem.scheme.weight
    formats = MARLIN.formats
    row = MARLIN.row(weight.name)
    if row is None or kind_of(weight) is None:
        had = dict.fromkeys(f"{it.name}{' with zero points' if it.zero_point else ''}" for it in formats)
        return f"it takes {', '.join(had)}; the layer has {weight}"
    if not MARLIN.reads(weight):
        alike = (it for it in row.formats if it.zero_point == weight.zero_point)
        spelled = ", ".join(_spelled(it.block) for it in alike)
        return f"it takes {weight.name} scales of {spelled}, the layer has {weight}"
    if problem.dtype not in row.dtypes:
        return f"with {weight.name} weights it takes {' and '.join(row.dtypes)}, this is {problem.dtype}"
    if problem.act_order == "group":
        return "its scales go by columns in their order, the layer's are permuted group by group"
    if problem.routing.weight_on_input and problem.bias:
        return "the router's weight on the input would multiply the first bias too"
    return ("" if row.own_scales else scale_refusal(problem)) or MARLIN.activation_refusal(problem.activation)


def _spelled(block: tuple[int, int]) -> str:
    rows, columns = block
    if rows == FULL:
        return "a whole matrix"
    across = "whole rows" if columns == FULL else f"{columns} columns"
    return across if rows == 1 else f"{rows} rows by {across}"


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why it cannot run `problem` on `device`, in a sentence; empty when it can."""
    return device_refusal(device, MARLIN) or problem_refusal(problem) or why_not(operator)


def layout(problem: MoEProblem) -> str:
    """The layout of a problem's weights; that of int4 for weights that are refused anyway."""
    weight = problem.scheme.weight
    row = MARLIN.row(weight.name) if kind_of(weight) else None
    return (row or MARLIN.weights[0]).layout


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """The block size; the operator chooses its tile by itself and does not tell."""
    problem = prepared.problem
    return f"blocks of {block_size(tokens * problem.top_k, problem.local_experts)}"


RUNNER = Runner(NAME, layout, compute, refusal, accumulation="steps", ready=ready, tactic=tactic)

"""The deep_gemm and batched_deep_gemm backends: DeepGEMM's grouped GEMMs, for FP8 in blocks and for BF16.

A call puts the tokens into rows by expert, for FP8 weights quantized in groups of 128 columns, multiplies,
applies the activation (and quantizes again), multiplies, and sums with the router's weights. The two backends
differ in their rows: one expert's behind the other's, each from a multiple of a GEMM's tile on (contiguous),
or as many for each expert as there are tokens (masked), which batches of tokens by expert have already.
DeepGEMM compiles its kernels at the first call of a shape with the machine's nvcc.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...capabilities.external_kernels import DEEP_GEMM
from ...errors import Unavailable
from ...problem.moe_problem import MoEProblem
from ...torch_dtypes import MODEL_TORCH_DTYPES
from ..prepared_layer import PreparedMoE
from ..runner import Runner, check_dtype
from .cuda_compiler import cuda_toolkit
from .gemm_glue import device_refusal, weighted_sum
from .grouped_formats import accumulation, grouped_refusal
from .grouped_rows import (
    GROUP,
    GroupedRows,
    RowScales,
    activate_rows,
    batch_rows,
    place_rows,
    rows_for,
    scatter_tokens,
)
from .import_library import failing_as, package, unavailable_reason

NAME, BATCHED = "deep_gemm", "batched_deep_gemm"

OLDEST_NVCC = (12, 9)
"""Version of nvcc that DeepGEMM 2.8 requires."""

FUNCTIONS = (
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "set_pdl",
)

MASKED_ROWS = 128
"""Rows of an expert in the masked form are a multiple of it: whole tiles, so that none is of two experts."""

SMALLEST_ESTIMATE = 16
"""The least number of tokens per expert that the masked form is told to expect."""


@cache
def library() -> ModuleType:
    """The package; Unavailable without it or nvcc, or if it lacks a function that is used."""
    toolkit = cuda_toolkit(OLDEST_NVCC)
    stated = os.environ.get("CUDA_HOME")
    if not stated or not (Path(stated) / "bin" / "nvcc").is_file():
        os.environ["CUDA_HOME"] = str(toolkit)  # where DeepGEMM looks for it
    deep_gemm = package(NAME)
    alignment = getattr(getattr(deep_gemm, "_C", None), "get_mk_alignment_for_contiguous_layout", None)
    missing = [name for name in FUNCTIONS if not hasattr(deep_gemm, name)]
    missing += [] if alignment else ["get_mk_alignment_for_contiguous_layout"]
    if missing:
        raise Unavailable(
            f"this version of {NAME} lacks {', '.join(missing)}", hint=f"moectl peers {NAME}, which has 2.8.1"
        )
    # Its kernels wait for the ones before them, as those around them do.
    deep_gemm.set_pdl(True)
    return deep_gemm


def alignment() -> int:
    """The multiple at which an expert's rows begin in the contiguous form."""
    return int(library()._C.get_mk_alignment_for_contiguous_layout())


@dataclass(frozen=True)
class DeepGemmMatrix:
    """One of the two expert matrices: `weight` ``[e, n, k]``, and the fp32 `scales` of FP8 in blocks."""

    weight: Tensor
    scales: Tensor | None


def matrix_of(prepared: PreparedMoE, role: str) -> DeepGemmMatrix:
    """The matrix `role` of a layer in one of the plain layouts."""
    weights = prepared.weights
    if prepared.problem.scheme.weight.name != "fp8":
        return DeepGemmMatrix(weights[role], None)
    scales = weights[f"{role}_scale"].float().contiguous()
    return DeepGemmMatrix(weights[role].view(torch.float8_e4m3fn), scales)


def ready(prepared: PreparedMoE) -> tuple[DeepGemmMatrix, DeepGemmMatrix]:
    """The layer's two matrices, created once."""
    return prepared.derive(NAME, lambda prepared: (matrix_of(prepared, "w13"), matrix_of(prepared, "w2")))


def operands(matrix: DeepGemmMatrix, rows: Tensor, scales: Tensor) -> tuple[Any, Any, dict[str, Any]]:
    """Both operands as the functions take them, and keyword arguments; `scales` are of FP8 rows only.

    Scales ``[e, groups, rows]`` become ``[e, rows, groups]`` with consecutive rows of a group, as TMA reads
    them; those of ``[rows, k]`` have no first axis.
    """
    if matrix.scales is None:
        return rows, matrix.weight, {}
    by_row = scales.mT if rows.ndim == 3 else scales[0].mT
    return (rows, by_row), (matrix.weight, matrix.scales), {"disable_ue8m0_cast": True}


def contiguous(matrix: DeepGemmMatrix, rows: Tensor, scales: Tensor, placed: GroupedRows, y: Tensor) -> None:
    """Writes `y` ``[size, n]``: `rows` ``[size, k]`` by expert times its matrix."""
    a, b, options = operands(matrix, rows, scales)
    kind = "bf16" if matrix.scales is None else "fp8"
    gemm = getattr(library(), f"m_grouped_{kind}_gemm_nt_contiguous")
    gemm(a, b, y, placed.ends, use_psum_layout=True, **options)


def masked(
    matrix: DeepGemmMatrix, rows: Tensor, scales: Tensor, placed: GroupedRows, y: Tensor, expected: int
) -> None:
    """Writes `y` ``[size, n]``: `placed.span` rows for each expert times its matrix; ``counts[e]`` are read.

    `expected`: about how many tokens an expert has.
    """
    shape = (len(matrix.weight), placed.span, -1)
    a, b, options = operands(matrix, rows.view(shape), scales)
    kind = "bf16" if matrix.scales is None else "fp8"
    gemm = getattr(library(), f"m_grouped_{kind}_gemm_nt_masked")
    gemm(a, b, y.view(shape), placed.counts, expected, **options)


def masked_rows(tokens: int) -> int:
    """Rows for each expert of a call of that many tokens."""
    return -(-max(tokens, 1) // MASKED_ROWS) * MASKED_ROWS


def expected_tokens(assignments: int, experts: int, rows: int) -> int:
    """About how many tokens an expert of a masked call has, for the choice of a kernel."""
    mean = -(-assignments // experts)
    return max(SMALLEST_ESTIMATE, min(rows, -(-mean // SMALLEST_ESTIMATE) * SMALLEST_ESTIMATE))


def _experts(
    prepared: PreparedMoE, x: Tensor, placed: GroupedRows, top_k: int, expected: int | None
) -> Tensor:
    """``[size, hidden]``: the experts' output for tokens `x` in their rows; `expected` of the masked form."""
    problem, (w13, w2) = prepared.problem, ready(prepared)
    quantized = None if w13.scales is None else RowScales(GROUP, problem.scheme.act.rounds_scales)

    def gemm(matrix: DeepGemmMatrix, rows: Tensor, scales: Tensor) -> Tensor:
        y = x.new_empty(placed.size, matrix.weight.shape[1])
        if expected is None:
            contiguous(matrix, rows, scales, placed, y)
        else:
            masked(matrix, rows, scales, placed, y, expected)
        return y

    gate_up = gemm(w13, *scatter_tokens(x, placed, top_k, quantized))
    return gemm(w2, *activate_rows(gate_up, placed, problem.activation, quantized))


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, apart: int) -> Tensor:
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    ids, weights, experts = ids.contiguous().view(-1), weights.contiguous().view(-1), problem.local_experts
    with failing_as(prepared.backend, x.device):
        placed = place_rows(ids, experts, 1 if apart else alignment(), apart)
        expected = expected_tokens(ids.numel(), experts, apart) if apart else None
        parts = _experts(prepared, x, placed, problem.top_k, expected)
        weighted_sum(parts, y, ids, experts, weights, placed.rows)
    return y


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype, with contiguous rows; arguments as in `FusedMoEKernel.apply`."""
    return _compute(prepared, x, ids, weights, 0)


def compute_masked(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype, with masked rows; arguments as in `FusedMoEKernel.apply`."""
    return _compute(prepared, x, ids, weights, masked_rows(len(x)))


def batched(prepared: PreparedMoE, x: Tensor, counts: Tensor, expected: int | None = None) -> Tensor:
    """``[local_experts, most, hidden]`` for tokens batched by expert; arguments as in `Runner.batched`."""
    experts, most, hidden = x.shape
    dtype = MODEL_TORCH_DTYPES[prepared.problem.dtype]
    if not most or x.dtype != dtype:
        check_dtype(prepared.problem, x)
        return torch.empty_like(x)
    with failing_as(prepared.backend, x.device):
        placed = batch_rows(counts, most, masked_rows(most))
        mean = expected_tokens(experts * (most if expected is None else expected), experts, most)
        parts = _experts(prepared, x.reshape(-1, hidden), placed, 1, mean)
    return parts.view(experts, -1, hidden)[:, :most]


def problem_refusal(problem: MoEProblem) -> str:
    """Why DeepGEMM does not support `problem` on any GPU, as a clause; empty if it does."""
    return grouped_refusal(DEEP_GEMM, problem)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why DeepGEMM cannot run `problem` on `device`, as a clause; empty if it can."""
    return device_refusal(device, DEEP_GEMM) or problem_refusal(problem) or unavailable_reason(library)


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """How its rows lie; DeepGEMM chooses tiles itself and does not report them."""
    problem = prepared.problem
    assignments, experts = tokens * problem.top_k, problem.local_experts
    if prepared.backend == BATCHED:
        return f"{masked_rows(tokens)} rows per expert"
    align = alignment()
    return f"{rows_for(assignments, experts, align)} rows, experts at multiples of {align}"


def _layout(problem: MoEProblem) -> str:
    return DEEP_GEMM.layout_of(problem.scheme)


RUNNER = Runner(
    NAME, _layout, compute, refusal, accumulation=accumulation, ready=ready, tactic=tactic, keeps="numbers"
)
MASKED = Runner(
    BATCHED,
    _layout,
    compute_masked,
    refusal,
    accumulation=accumulation,
    ready=ready,
    tactic=tactic,
    keeps="numbers",
    batched=batched,
)

"""Layers whose weights are read in rows: BF16, FP16, FP8, and with INT8 tokens INT8 and INT4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...capabilities.own_kernels import token_format
from ...dtypes import MODEL_DTYPES
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL
from ...torch_dtypes import MODEL_TORCH_DTYPES, TORCH_DTYPES
from ..prepared_layer import PreparedMoE

BLOCK = 128
"""Rows and columns of a block of FP8 weights with one scale, and columns of such a block of tokens."""


@dataclass(frozen=True)
class RowMatrix:
    """One of the two expert matrices in rows; `w13` of gated experts has all gates, then all ups.

    Attributes:
        weights: ``[experts, n, k]``, contiguous: 16-bit floats of the model's dtype, float8_e4m3fn or int8;
            of INT4 ``[experts, n, k / 2]`` int8, two codes each (`convert.layouts.rows`).
        scales: fp32 ``[experts, rows, columns]`` of 8-bit weights, None for others. Rows are `n` by channel;
            by block those of gate, then those of up, ``ceil(n / 2 / 128)`` each (without a gate
            ``ceil(n / 128)``); per tensor one for each of gate and up. Columns are ``ceil(k / 128)`` by
            block, otherwise 1. Of INT4 ``[experts, k / 128, n]``, of any float dtype.
        token_scale: ``[1]`` fp32, the layer's static scale of the tokens that it multiplies, or None.
        bias: ``[experts, n]`` in the order of the rows, or None.
        n, k: rows and columns.
    """

    weights: Tensor
    scales: Tensor | None
    token_scale: Tensor | None
    bias: Tensor | None
    n: int
    k: int


@dataclass(frozen=True)
class RowLayer:
    """A layer as kernels read it in rows: its problem and its two matrices."""

    problem: MoEProblem
    w13: RowMatrix
    w2: RowMatrix


def row_matrix_of(prepared: PreparedMoE, role: str) -> RowMatrix:
    """The matrix `role` of a layer in rows; UsageError if the shapes of its tensors do not match."""
    problem, stored = prepared.problem, prepared.weights
    weight, dims, first = problem.scheme.weight, problem.dims, role == "w13"
    halves = 2 if first and problem.activation.gated else 1
    rows, k = (dims.intermediate, dims.hidden) if first else (dims.hidden, dims.intermediate)
    experts = problem.local_experts
    coded = weight.bits < 16
    dtype = torch.uint8 if coded else MODEL_TORCH_DTYPES[problem.dtype]
    stored_columns = k * min(weight.bits, 8) // 8
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        role: (dtype, (experts, halves * rows, stored_columns))
    }
    if weight.bits == 4:
        scale_kind = TORCH_DTYPES[weight.scale_dtype or MODEL_DTYPES[problem.dtype]]
        shapes[f"{role}_scale"] = scale_kind, (experts, k // weight.group, halves * rows)
    elif coded:
        high, wide = weight.block
        scale_rows = 1 if high == FULL else -(-rows // high)
        columns = 1 if wide == FULL else -(-k // wide)
        shapes[f"{role}_scale"] = torch.float32, (experts, halves * scale_rows, columns)
    if problem.bias:
        shapes[f"{role}_bias"] = MODEL_TORCH_DTYPES[problem.dtype], (experts, halves * rows)
    act = token_format(problem)
    static = act is not None and not act.dynamic
    if static:
        shapes[f"{role}_input"] = torch.float32, ()
    for name, (kind, shape) in shapes.items():
        t = stored.get(name)
        if t is None or t.dtype != kind or tuple(t.shape) != shape or not t.is_contiguous():
            got = "none" if t is None else f"{t.dtype} {list(t.shape)}"
            raise UsageError(f"{name} must be {kind} {list(shape)}, contiguous, got {got}")
    weights = stored[role]
    return RowMatrix(
        weights.view(torch.int8 if weight.number.grid.integer else torch.float8_e4m3fn) if coded else weights,
        stored[f"{role}_scale"] if coded else None,
        stored[f"{role}_input"].reshape(1) if static else None,
        stored.get(f"{role}_bias"),
        halves * rows,
        k,
    )


def row_layer_of(prepared: PreparedMoE) -> RowLayer:
    """The layer's matrices; UsageError as of `row_matrix_of`."""
    return RowLayer(prepared.problem, row_matrix_of(prepared, "w13"), row_matrix_of(prepared, "w2"))

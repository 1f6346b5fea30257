"""A call of the kernels `tma` in which kernels of their own quantize what enters each GEMM."""

from __future__ import annotations

from moectl.kernels.triton.hopper.mid import schedule
from moectl.kernels.triton.hopper.tma import gemm, one_token, quantized
from moectl.kernels.triton.hopper.tma_tiles import TmaTile
from moectl.kernels.triton.kernel_family import KernelCall
from moectl.kernels.triton.row_matrix import RowLayer
from moectl.kernels.triton.sort_and_combine import finish
from moectl.kernels.triton.token_codes import ALL_ROWS


def run_quantized_apart(layer: RowLayer, call: KernelCall, tile: TmaTile) -> None:
    """Fills ``call.y``, of tokens that are not batched by expert, as `TMA_FAMILY.run` does."""
    problem = layer.problem
    plan = one_token(call, problem.local_experts)
    beside = plan is None
    plan = plan or schedule(call, problem.local_experts, tile.tokens, one_launch=True)
    x, scales = quantized(problem, call.x, layer.w13, ALL_ROWS, beside=beside)
    h, parts = call.x.new_empty(call.assignments, problem.dims.intermediate), call.parts()
    gemm(layer, 1, call, plan, x, scales, h, tile)
    h, scales = quantized(problem, h, layer.w2, plan.live)
    gemm(layer, 2, call, plan, h, scales, parts, tile)
    finish(call, parts, problem.local_experts)

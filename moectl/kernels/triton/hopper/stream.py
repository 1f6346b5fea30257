"""Kernel family `stream`: few tokens per expert on SM90; host code.

Two GEMMs and a sum; with more than a few tokens, they are preceded by a plan that gathers the assignments of
each expert in records of at most 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....later import Later
from ....problem.moe_problem import MoEProblem
from ...choice.stream_launches import STREAM_TILES, StreamShape, StreamTile
from ..kernel_family import KernelCall, KernelFamily, KernelLayer, KernelMatrix, activation_numbers
from ..sort_and_combine import combine, records_of

kernels = Later(f"{__package__}.stream_kernels")
layer_kernels = Later(f"{__package__}.stream_layer_kernels")

REGISTERS_OF_8 = 128
"""Registers per thread for 8 tokens and MXFP4. Shared memory limits the number of programs anyway; without
this number the compiler uses fewer registers and spills."""


EXACT_SCALES = range(63, 255)
"""E8M0 bytes for which the shortest instruction sequence is exact: 2^-64 and above."""


def _kind(problem: MoEProblem, m: KernelMatrix) -> tuple[str, str, str, bool, bool]:
    """The first fields of `stream_asm.TileAsm`: formats, zero points, whether all must be exact."""
    weight = problem.scheme.weight
    scale = {"BF16": "bf16", "F16": "fp16"}.get(weight.scale_dtype, problem.dtype)
    in_range = problem.dtype == "fp16" or weight.number.scale != "E8M0" or m.exponents_within(EXACT_SCALES)
    exact = not (in_range and m.numbers)
    return weight.name, problem.dtype, scale, weight.zero_point, exact


def _words(t: Tensor) -> Tensor:
    """`t` as pairs of 16-bit values, copied if it is not aligned to 16 bytes."""
    return (t if t.data_ptr() % 16 == 0 else t.clone()).view(torch.int32)


def _gemm(layer: KernelLayer, m: KernelMatrix, shape: StreamShape, tile: StreamTile) -> dict[str, Any]:
    """Kernel arguments that depend on one GEMM: its matrix and its shape."""
    problem, dims = layer.problem, layer.problem.dims
    limited = problem.scheme.weight.name == "mxfp4" and tile.tokens == 8
    columns, outputs = (
        (dims.hidden, dims.intermediate) if m is layer.w13 else (dims.intermediate, dims.hidden)
    )
    return {
        "W": m.codes.view(torch.int32),
        "SC": m.scales,
        "ZP": m.scales if m.zeros is None else m.zeros,
        "B": m.codes if m.bias is None else m.bias,
        "F": m.scales if m.factors is None else m.factors,
        "N": m.n,
        "K": m.k,
        "KX2": columns // 2,
        "NX": outputs,
        "RUNS": shape.runs(m.n),
        "E": problem.local_experts,
        "BIAS": m.bias is not None,
        "HALVES": m.halves,
        "KIND": _kind(problem, m),
        "GROUP": problem.scheme.weight.group,
        "TOKENS": tile.tokens,
        "S": shape.columns,
        "RW": shape.rows,
        "R": shape.blocks,
        "D": shape.depth,
        "TILES": shape.tiles,
        "PLANNED": bool(tile.planned),
        "PDL": True,
        "num_warps": shape.warps,
        "launch_pdl": True,
        **({"maxnreg": REGISTERS_OF_8} if limited else {}),
    }


PER_GEMM = (
    *("W", "SC", "ZP", "B", "F", "N", "K", "KX2", "NX", "RUNS", "HALVES", "KIND"),
    *("S", "RW", "R", "D", "TILES"),
)
"""Arguments that the fused kernel has twice; those of the second GEMM end with ``_2``."""


def _run_fused(
    layer: KernelLayer, call: KernelCall, tile: StreamTile, records: Tensor, h: Tensor, parts: Tensor
) -> None:
    problem, first, second = layer.problem, tile.first, tile.second
    arguments, arguments2 = _gemm(layer, layer.w13, first, tile), _gemm(layer, layer.w2, second, tile)
    del arguments["PLANNED"]
    programs = len(records) * (arguments["RUNS"] + arguments2["RUNS"])
    layer_kernels._stream_layer_kernel[(programs,)](
        X=_words(call.x),
        H=h,
        H_2=_words(h),
        Y=parts,
        IDS=call.ids,
        PLAN=records,
        WEIGHTS=call.weights,
        T=call.assignments,
        RECORDS=len(records),
        **activation_numbers(problem.activation),
        TOP_K=problem.top_k,
        ACT=problem.activation.name,
        GATED=problem.activation.gated,
        ON_INPUT=problem.routing.weight_on_input,
        STEPS=first.steps(layer.w13.k, 1),
        STEPS_2=second.steps(layer.w2.k, 1),
        **arguments,
        **{f"{name}_2": arguments2[name] for name in PER_GEMM},
    )
    combine(parts, call.ids, call.y, problem.local_experts)


def run(layer: KernelLayer, call: KernelCall, tile: StreamTile) -> None:
    """Fills ``call.y``; see `KernelFamily.run`."""
    problem, t = layer.problem, call.assignments
    dims, act = problem.dims, problem.activation
    records = (
        records_of(call.ids, problem.local_experts, tile.tokens, call.order) if tile.planned else call.ids
    )
    common = {"IDS": call.ids, "PLAN": records, "WEIGHTS": call.weights, "T": t}
    h = call.x.new_empty(t, dims.intermediate)
    parts = call.x.new_empty(tile.split, t, dims.hidden, dtype=torch.float32)
    first, second = tile.first, tile.second
    if tile.fused:
        _run_fused(layer, call, tile, records, h, parts)
        return
    kernels._stream_gemm1_kernel[(len(records) * first.runs(layer.w13.n),)](
        X=_words(call.x),
        H=h,
        **activation_numbers(act),
        TOP_K=problem.top_k,
        ACT=act.name,
        GATED=act.gated,
        WEIGHTED=problem.routing.weight_on_input,
        STEPS=first.steps(layer.w13.k, 1),
        **common,
        **_gemm(layer, layer.w13, first, tile),
    )
    kernels._stream_gemm2_kernel[(len(records) * second.runs(layer.w2.n), tile.split)](
        H=_words(h),
        Y=parts,
        WEIGHTED=not problem.routing.weight_on_input,
        STEPS=second.steps(layer.w2.k, tile.split),
        SPLIT=tile.split,
        **common,
        **_gemm(layer, layer.w2, second, tile),
    )
    combine(parts, call.ids, call.y, problem.local_experts)


STREAM_FAMILY = KernelFamily.of(STREAM_TILES, run)

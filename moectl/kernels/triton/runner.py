"""The triton backend: moectl's own kernels on the layout ``moectl-mtile64``.

Decode runs three kernels (first GEMM with activation, second GEMM in K splits, sum), with the routing
resolved inside the GEMMs; larger batches run four (sort by expert, two grouped GEMMs, sum). Grids depend
on sizes only, nothing is read back and sums have a fixed order: a call can be captured in a CUDA graph
and gives the same bits every time.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...errors import UsageError
from ...problem import MoEProblem
from ..prepared import PreparedMoE
from ..runners import Runner
from . import fused_moe_kernels as kernels
from .launch import Launch, Tile, is_legal, launch_for, token_tiles

LAYOUT = "moectl-mtile64"
FORMATS = ("mxfp4", "int4")
ACTIVATIONS = ("silu", "swigluoai")
SMALLEST_GROUP, LARGEST_GROUP = 32, 128
MINIMUM_CAPABILITY = (8, 0)

INTERPRETED = not isinstance(kernels._route_kernel, triton.runtime.JITFunction)
"""True under ``TRITON_INTERPRET=1``: kernels run on the CPU, slowly, for tests."""


@dataclass(frozen=True)
class Matrix:
    """One of the two expert matrices as the kernels read it.

    Attributes:
        codes: ``[experts, n / 64, k / 64, 2048]`` uint8.
        scales: ``[experts, n / 64, k / span, words]`` int32.
        bias: ``[experts, n]`` in the order of the stored rows, or None.
        n, k: stored (padded) rows and columns.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    n: int
    k: int


def _matrix(prepared: PreparedMoE, role: str) -> Matrix:
    codes, scales = prepared.weights[role], prepared.weights[f"{role}_scale"]
    if codes.ndim != 4 or codes.shape[-1] != 2048:
        raise UsageError(f"{role} must be [experts, n / 64, k / 64, 2048] bytes, got {list(codes.shape)}")
    bias = prepared.weights.get(f"{role}_bias")
    n, k = 64 * codes.shape[1], 64 * codes.shape[2]
    if bias is not None and bias.shape[1] != n:
        raise UsageError(f"{role}_bias must have {n} rows as {role} has, got {bias.shape[1]}")
    return Matrix(codes, scales, bias, n, k)


def _shared_constants(problem: MoEProblem, tile: Tile) -> dict[str, Any]:
    """Compile-time arguments that every GEMM kernel takes."""
    return {
        "E": problem.local_experts,
        "FORMAT": problem.scheme.weight.name,
        "GROUP": problem.scheme.weight.group,
        "BM": tile.tokens,
        "BN": tile.rows,
        "BK": tile.depth,
        "STAGES": tile.stages,
        "INTERP": INTERPRETED,
        "num_warps": tile.warps,
    }


@dataclass(frozen=True)
class Layer:
    """Arguments of the kernels that follow from the layer and the tile, not from the call."""

    problem: MoEProblem
    w13: Matrix
    w2: Matrix
    tile: Tile

    @property
    def gemm1(self) -> dict[str, Any]:
        """Keyword arguments of the first GEMM, besides tokens and routing."""
        p, act = self.problem, self.problem.activation
        return {
            **self._gemm(self.w13, p.dims.hidden, p.dims.intermediate),
            "alpha": 1.0 if act.alpha is None else act.alpha,
            "limit": math.inf if act.limit is None else act.limit,
            "TOP_K": p.top_k,
            "ACT": act.name,
            "WEIGHTED": p.routing.weight_on_input,
        }

    @property
    def gemm2(self) -> dict[str, Any]:
        """Keyword arguments of the second GEMM, besides tokens and routing."""
        p = self.problem
        return {
            **self._gemm(self.w2, p.dims.intermediate, p.dims.hidden),
            "WEIGHTED": not p.routing.weight_on_input,
        }

    def _gemm(self, m: Matrix, columns: int, outputs: int) -> dict[str, Any]:
        return {
            "W": m.codes,
            "S": m.scales,
            "B": m.codes if m.bias is None else m.bias,
            "N": m.n,
            "K": m.k,
            "KX": columns,
            "NX": outputs,
            "BIAS": m.bias is not None,
            "EVEN_N": m.n % self.tile.rows == 0,
            "EVEN_K": m.k == columns and columns % self.tile.depth == 0,
            **_shared_constants(self.problem, self.tile),
        }

    def row_tiles(self, m: Matrix) -> int:
        """Programs that cover the rows of `m`."""
        return math.ceil(m.n / self.tile.rows)


@dataclass(frozen=True)
class Call:
    """One call's tensors: `x` ``[tokens, hidden]``, flat `ids` and `weights`, and the output `y`."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor

    @property
    def assignments(self) -> int:
        return self.ids.numel()


def _decode(layer: Layer, call: Call) -> None:
    problem, tile, t = layer.problem, layer.tile, call.assignments
    programs = min(t, problem.local_experts)
    blocks = triton.cdiv(len(call.x), tile.tokens)
    h = call.x.new_empty(t, problem.dims.intermediate)
    parts = call.x.new_empty(tile.split, t, problem.dims.hidden, dtype=torch.float32)
    routing = {
        "BY_SLOT": t <= problem.local_experts,
        "TPAD": max(16, triton.next_power_of_2(t)),
        "M_BLOCKS": blocks,
    }
    kernels._decode_gemm1_kernel[(layer.row_tiles(layer.w13), programs * blocks)](
        X=call.x, H=h, IDS=call.ids, WEIGHTS=call.weights, T=t, **routing, **layer.gemm1
    )
    kernels._decode_gemm2_kernel[(layer.row_tiles(layer.w2), programs * blocks, tile.split)](
        H=h,
        Y=parts,
        IDS=call.ids,
        WEIGHTS=call.weights,
        T=t,
        SPLIT_K=tile.split,
        **routing,
        **layer.gemm2,
    )
    _combine(layer, call, parts, tile.split)


def _grouped(layer: Layer, call: Call) -> None:
    problem, tile, t = layer.problem, layer.tile, call.assignments
    experts = problem.local_experts
    sorted_slots = call.ids.new_empty(t)
    offsets = call.ids.new_empty(experts + 1)
    h = call.x.new_empty(t, problem.dims.intermediate)
    y = call.x.new_empty(t, problem.dims.hidden)
    block = 64 if INTERPRETED else min(triton.next_power_of_2(t), 8192)
    kernels._route_kernel[(experts,)](
        call.ids, sorted_slots, offsets, t, E=experts, BT=block, num_warps=4 if t <= 2048 else 16
    )
    tiles = token_tiles(t, experts, tile.tokens)
    routing = {
        "SORTED": sorted_slots,
        "OFFSETS": offsets,
        "WEIGHTS": call.weights,
        "EPAD": triton.next_power_of_2(experts),
        "TAILS": tile.tails,
    }
    n1, n2 = layer.row_tiles(layer.w13), layer.row_tiles(layer.w2)
    kernels._grouped_gemm1_kernel[(tiles * n1,)](X=call.x, H=h, row_tiles=n1, **routing, **layer.gemm1)
    kernels._grouped_gemm2_kernel[(tiles * n2,)](H=h, Y=y, row_tiles=n2, **routing, **layer.gemm2)
    _combine(layer, call, y, 1)


def _combine(layer: Layer, call: Call, parts: Tensor, split: int) -> None:
    hidden, block = layer.problem.dims.hidden, 256 if len(call.x) <= 16 else 1024
    kernels._combine_kernel[(len(call.x), triton.cdiv(hidden, block))](
        parts,
        call.y,
        call.ids,
        call.assignments,
        hidden,
        E=layer.problem.local_experts,
        TOP_K=layer.problem.top_k,
        SPLIT_K=split,
        BH=block,
        INTERP=INTERPRETED,
        num_warps=2 if block == 256 else 4,
    )


REGIMES = {"decode": _decode, "grouped": _grouped}


def run_with(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, launch: Launch) -> Tensor:
    """`Runner.run` with a launch of one's own, for tuning and tests; UsageError when it is not legal."""
    if launch.regime not in REGIMES or not is_legal(launch.tile, prepared.problem.scheme.weight.group):
        raise UsageError(f"{launch} is not a legal launch for {prepared.problem.scheme}")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    layer = Layer(prepared.problem, _matrix(prepared, "w13"), _matrix(prepared, "w2"), launch.tile)
    call = Call(x.contiguous(), ids.contiguous().view(-1), weights.contiguous().view(-1), y)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        REGIMES[launch.regime](layer, call)
    return y


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return run_with(prepared, x, ids, weights, launch_for(prepared.problem, len(x)))


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    weight = problem.scheme.weight
    if device.type == "cpu" and not INTERPRETED:
        return "it needs a CUDA GPU, the weights are on the CPU"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MINIMUM_CAPABILITY:
        return "it needs compute capability 8.0 or newer"
    if weight.name not in FORMATS or weight.zero_point:
        return f"it reads {' and '.join(FORMATS)} weights without zero points, the layer has {weight}"
    if not SMALLEST_GROUP <= weight.group <= LARGEST_GROUP or weight.group & (weight.group - 1):
        return f"it reads scale groups of 32, 64 and 128, the layer has {weight}"
    if problem.activation.name not in ACTIVATIONS or not problem.activation.gated:
        return f"it has the activations {' and '.join(ACTIVATIONS)}, the layer has {problem.activation.name}"
    if problem.dtype != "bf16":
        return f"it computes in bf16, the model's dtype is {problem.dtype}"
    return ""


RUNNER = Runner("triton", LAYOUT, _compute, _refusal)

"""A kernel family (`KernelFamily`) and its inputs: a layer's matrices and one call's tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dtypes import MODEL_DTYPES
from ...errors import UsageError
from ...problem.moe_problem import Activation, MoEProblem
from ...problem.schemes import FULL
from ..prepared_layer import PreparedMoE


@dataclass(frozen=True)
class KernelMatrix:
    """One of the two expert matrices as the kernels read it.

    Attributes:
        codes: ``[experts, n / 64, k / 64, 2048]`` uint8, with 8-bit codes 4096 bytes a tile.
        scales: ``[experts, n / 64, k / span, words]`` int32; one span for scales of whole rows.
        zeros: zero points, of the shape of `scales`, or None.
        bias: ``[experts, n]`` in the order of the stored rows, or None.
        n, k: stored (padded) rows and columns.
        exponents: smallest and largest biased exponent of the scales but 0, 127 for scales from 1 to 2; None
            where they are not known (`exponents_of`).
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    exponents: tuple[int, int] | None = None

    def exponents_within(self, allowed: range) -> bool:
        """Whether the exponents of all scales are known to be in `allowed`."""
        return self.exponents is not None and all(exponent in allowed for exponent in self.exponents)


EXPERTS_AT_ONCE = 32
"""Experts whose scales are examined at a time, which takes several times their memory."""


def exponents_of(scales: Tensor, kind: str) -> tuple[int, int] | None:
    """Smallest and largest biased exponent of `scales`, of E8M0 bytes or of bf16 numbers.

    Waits for the GPU; None during CUDA graph capture, and for scales of another `kind` (see `scale_name`).
    Zeros are left out: blocks of zeros and padding have them, and an E8M0 byte of 0, 2^-127, is negligible.
    Scales on the device meta, which only compiles, count as ones.
    """
    if kind not in ("e8m0", "bf16"):
        return None
    if scales.is_meta:
        return 127, 127
    if scales.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    ends = []
    for chunk in torch.split(scales.contiguous(), EXPERTS_AT_ONCE):
        stored = chunk.view(torch.uint8) if kind == "e8m0" else chunk.view(torch.int16) & 0x7FFF
        exponents = stored if kind == "e8m0" else stored >> 7
        ends.append((torch.where(stored == 0, 255, exponents).min(), exponents.max()))
    low, high = (torch.stack(end) for end in zip(*ends, strict=True))
    return int(low.min()), int(high.max())


def matrix_of(prepared: PreparedMoE, role: str) -> KernelMatrix:
    """The matrix `role` of a layer; UsageError when the tensors do not fit each other."""
    weight = prepared.problem.scheme.weight
    codes, scales = prepared.weights[role], prepared.weights[f"{role}_scale"]
    tile = 512 * weight.bits
    if codes.ndim != 4 or codes.shape[-1] != tile:
        raise UsageError(f"{role} must be [experts, n / 64, k / 64, {tile}] bytes, got {list(codes.shape)}")
    zeros, bias = prepared.weights.get(f"{role}_zero"), prepared.weights.get(f"{role}_bias")
    if weight.zero_point and (zeros is None or zeros.shape != scales.shape):
        got = None if zeros is None else list(zeros.shape)
        raise UsageError(f"{role}_zero must be {list(scales.shape)} as {role}_scale is, got {got}")
    n, k = 64 * codes.shape[1], 64 * codes.shape[2]
    if prepared.problem.bias != (bias is not None):
        there, wanted = ("a", "none") if bias is not None else ("no", "one")
        raise UsageError(
            f"there is {there} {role}_bias, a layer with bias={prepared.problem.bias} has {wanted}"
        )
    if bias is not None and bias.shape[1] != n:
        raise UsageError(f"{role}_bias must have {n} rows as {role} has, got {bias.shape[1]}")
    known = weight.name in ("mxfp4", "int4") and zeros is None
    exponents = exponents_of(scales, scale_name(prepared.problem)) if known else None
    return KernelMatrix(codes, scales, zeros, bias, n, k, exponents)


_FLOATS = {name: short for short, name in MODEL_DTYPES.items()}


def scale_name(problem: MoEProblem) -> str:
    """Type of the scales for the kernels: ``e8m0``, ``bf16`` or ``fp16``; empty if no kernel supports it."""
    weight = problem.scheme.weight
    if weight.name == "mxfp4":
        return "e8m0"
    return _FLOATS.get(weight.scale_dtype, "") if weight.scale_dtype else problem.dtype


SIZE_MULTIPLE = 16
"""Required divisor of sizes for kernels that copy 16 bytes at a time: the one that Triton specializes on."""


def column_refusal(problem: MoEProblem) -> str:
    """Why kernels with steps of 64 columns cannot read the layer's groups or sizes; empty when they can."""
    weight, dims = problem.scheme.weight, problem.dims
    if not (weight.group in (32, FULL) or (weight.group > 0 and weight.group % 64 == 0)):
        return f"it reads scale groups of 32, of multiples of 64 and of whole rows, the layer has {weight}"
    for what, size in (("hidden", dims.hidden), ("intermediate", dims.intermediate)):
        if size % SIZE_MULTIPLE:
            return f"it takes multiples of {SIZE_MULTIPLE}, the layer's {what} size is {size}"
    return ""


def activation_numbers(act: Activation) -> dict[str, float]:
    """`alpha` and `limit` of the first GEMM's epilogue: 1 and infinity if the function has none."""
    return {
        "alpha": act.alpha if act.name == "swigluoai" and act.alpha is not None else 1.0,
        "limit": math.inf if act.limit is None else act.limit,
    }


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of `device`; 1 for devices on which kernels are only compiled."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class KernelLayer:
    """A layer as the kernels take it: its problem and its two matrices."""

    problem: MoEProblem
    w13: KernelMatrix
    w2: KernelMatrix


def layer_of(prepared: PreparedMoE) -> KernelLayer:
    """The layer's matrices; created once and kept with it.

    Examining the scales waits for the GPU, so it is done when a layer is prepared. If that first happens
    during graph capture, any scale is assumed to be possible, and the result is not kept.
    """
    layer = prepared.derived.get("triton")
    if layer is None:
        layer = KernelLayer(prepared.problem, matrix_of(prepared, "w13"), matrix_of(prepared, "w2"))
        if not (prepared.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            prepared.derived["triton"] = layer
    return layer


Order = tuple[Tensor, Tensor]
"""Slots sorted by expert, and the offset of each expert's first one: `sort_and_combine.sort_by_expert`."""


@dataclass(frozen=True)
class KernelCall:
    """One call's tensors: `x` ``[tokens, hidden]``, flat `ids` and `weights`, and the output `y`.

    In a batch every row is a token of one expert or of none: a problem with a top-k of 1. Then `order`
    is given, rows of y are the second GEMM's results, and rows of no expert may stay unwritten.

    Attributes:
        order: the assignments' order; None if they have to be sorted.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor
    order: Order | None = None

    @property
    def assignments(self) -> int:
        return self.ids.numel()

    def parts(self) -> Tensor:
        """The second GEMM's output, a row per assignment, ``[T, hidden]``: y itself in a batch."""
        return self.x.new_empty(self.assignments, self.y.shape[1]) if self.order is None else self.y


@dataclass(frozen=True)
class KernelFamily:
    """Kernels that compute a whole layer, for a range of tokens per expert and some GPUs.

    Attributes:
        tile: the type of its launch configurations, a frozen dataclass of plain numbers.
        run: fills ``call.y``; allocates with torch.empty alone, launches grids that do not depend on
            the routing, and never waits for the GPU.
        fits: why it cannot run a problem with a tile, in a sentence; empty when it can.
        capability: compute capabilities it supports, lowest and highest.
        interpreted: True when Triton's interpreter can run it.
        candidates: tiles for a problem that are worth measuring.
        tokens_per_expert: of experts that are hit, fewest and most, for which they are worth a measurement.
    """

    tile: type
    run: Callable[[KernelLayer, KernelCall, Any], None]
    fits: Callable[[MoEProblem, Any], str]
    capability: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (99, 9))
    interpreted: bool = False
    candidates: Callable[[MoEProblem], Sequence[Any]] = lambda problem: ()
    tokens_per_expert: tuple[float, float] = (0.0, math.inf)

    def runs_on(self, device: torch.device) -> bool:
        """Whether its code exists for `device`."""
        if device.type != "cuda":
            return self.interpreted
        lowest, highest = self.capability
        return lowest <= torch.cuda.get_device_capability(device) <= highest

"""A kernel family (`KernelFamily`) and its inputs: the layer's matrices and the tensors of one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...dtypes import MODEL_DTYPES
from ...errors import UsageError
from ...problem.moe_problem import Activation, MoEProblem
from ...problem.schemes import FULL
from ..prepared_layer import PreparedMoE
from .row_matrix import RowLayer, in_rows, row_layer_of


@dataclass(frozen=True)
class KernelMatrix:
    """One of the two expert matrices as kernels read it in tiles (``moectl-mtile64``).

    Attributes:
        codes: ``[experts, n / 64, k / 64, 2048]`` uint8, with 8-bit codes 4096 bytes a tile.
        scales: ``[experts, n / 64, k / span, words]`` int32; one span for scales of whole rows.
        zeros: zero points in the shape of `scales`, or None.
        bias: ``[experts, n]`` in the order of the stored rows, or None.
        n, k: stored (padded) rows and columns.
        exponents: smallest and largest biased exponent of the nonzero scales, 127 for scales in [1, 2); None
            if unknown (`exponents_of`).
        relied_on: ranges of exponents for which kernels were launched that are right only there.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    exponents: tuple[int, int] | None = None
    relied_on: set[range] = field(default_factory=set, compare=False, repr=False)

    def exponents_within(self, allowed: range) -> bool:
        """Whether the exponents of all scales are known to be in `allowed`, which later refits then keep."""
        within = self.exponents is not None and all(exponent in allowed for exponent in self.exponents)
        if within:
            self.relied_on.add(allowed)
        return within


EXAMINED_BYTES = 64 << 20
"""Bytes of scales that are examined at a time, which needs as much memory again."""


def exponents_of(scales: Tensor, kind: str) -> tuple[int, int] | None:
    """Smallest and largest biased exponent of `scales`, which are E8M0 bytes or bf16 numbers.

    Waits for the GPU; None during CUDA graph capture, and for scales of another `kind` (see `scale_name`).
    Zeros are ignored: they occur in zero blocks and padding, and an E8M0 byte of 0, 2^-127, is negligible.
    Scales on the meta device, on which kernels are only compiled, count as ones.
    """
    return exponents_of_each([scales], kind)[0]


def exponents_of_each(scales: Sequence[Tensor], kind: str) -> list[tuple[int, int] | None]:
    """`exponents_of` each of `scales`, which are on one device; waits for it once."""
    if kind not in ("e8m0", "bf16"):
        return [None] * len(scales)
    if any(t.is_meta for t in scales):
        return [(127, 127)] * len(scales)
    if any(t.is_cuda for t in scales) and torch.cuda.is_current_stream_capturing():
        return [None] * len(scales)
    chunks, bounds = list[int](), list[Tensor]()
    for t in scales:
        stored = t.contiguous().view(-1).view(torch.uint8 if kind == "e8m0" else torch.int16)
        parts = torch.split(stored, EXAMINED_BYTES // stored.itemsize)
        chunks.append(len(parts))
        bounds += map(_bounds, parts)
    found = iter(torch.stack(bounds).tolist())
    shift = 0 if kind == "e8m0" else 7
    every: list[tuple[int, int] | None] = []
    for count in chunks:
        lows, highs = zip(*(next(found) for _ in range(count)), strict=True)
        # Without any nonzero scale, the smallest is beyond the largest.
        every.append((min(255, min(lows) + 1 >> shift), max(highs) >> shift))
    return every


def _bounds(stored: Tensor) -> Tensor:
    """One less than the smallest nonzero number, and the largest, of uint8 or of int16 without the sign."""
    if stored.dtype == torch.uint8:
        below = stored - 1  # zero becomes the largest
        return torch.stack((below.min(), stored.max()))
    magnitudes = stored & 0x7FFF
    largest = magnitudes.max()
    return torch.stack((magnitudes.sub_(1).bitwise_and_(0x7FFF).min(), largest))


def matrix_of(prepared: PreparedMoE, role: str) -> KernelMatrix:
    """The matrix `role` of a layer, whose exponents are not known.

    UsageError if the shapes of its tensors do not match.
    """
    weight = prepared.problem.scheme.weight
    codes, scales = prepared.weights[role], prepared.weights[f"{role}_scale"]
    tile = 512 * weight.bits
    if codes.ndim != 4 or codes.shape[-1] != tile:
        raise UsageError(f"{role} must be [experts, n / 64, k / 64, {tile}] bytes, got {list(codes.shape)}")
    zeros, bias = prepared.weights.get(f"{role}_zero"), prepared.weights.get(f"{role}_bias")
    if weight.zero_point and (zeros is None or zeros.shape != scales.shape):
        got = None if zeros is None else list(zeros.shape)
        raise UsageError(f"{role}_zero must be {list(scales.shape)} like {role}_scale, got {got}")
    n, k = 64 * codes.shape[1], 64 * codes.shape[2]
    if prepared.problem.bias != (bias is not None):
        needs = "needs" if prepared.problem.bias else "must not have"
        got = None if bias is None else list(bias.shape)
        raise UsageError(f"a layer with bias={prepared.problem.bias} {needs} {role}_bias, got {got}")
    if bias is not None and bias.shape[1] != n:
        raise UsageError(f"{role}_bias must have {n} rows like {role}, got {bias.shape[1]}")
    return KernelMatrix(codes, scales, zeros, bias, n, k)


_FLOATS = {name: short for short, name in MODEL_DTYPES.items()}


def scale_name(problem: MoEProblem) -> str:
    """Type of the scales: ``e8m0``, ``bf16`` or ``fp16``; empty if no kernel supports it."""
    weight = problem.scheme.weight
    if weight.name == "mxfp4":
        return "e8m0"
    return _FLOATS.get(weight.scale_dtype, "") if weight.scale_dtype else problem.dtype


CODE_BASES = {"bf16": 128, "fp16": 1024}
"""The power of two at which each dtype's unit in the last place is 1: int4 codes are or-ed into it."""

SIZE_MULTIPLE = 16
"""Required divisor of sizes for kernels with 16-byte copies; Triton specializes on it."""


DECODED = ("mxfp4", "int4", "int8")
"""Weight formats that every kernel family that decodes tiles supports."""


def column_refusal(problem: MoEProblem, formats: Sequence[str] = DECODED) -> str:
    """Why kernels with steps of 64 columns do not support a layer's format, groups or sizes; empty if they
    do.

    `formats` are names of the weight formats that the kernels decode.
    """
    weight, dims = problem.scheme.weight, problem.dims
    if weight.name not in formats:
        return f"it decodes {', '.join(formats)}; the layer has {weight}"
    if not (weight.group in (32, FULL) or (weight.group > 0 and weight.group % 64 == 0)):
        return f"it supports scale groups of 32, of multiples of 64 and of whole rows; the layer has {weight}"
    for name, size in (("hidden", dims.hidden), ("intermediate", dims.intermediate)):
        if size % SIZE_MULTIPLE:
            return f"it needs sizes that are multiples of {SIZE_MULTIPLE}; the layer's {name} size is {size}"
    return ""


def activation_numbers(act: Activation) -> dict[str, float]:
    """`alpha` and `limit` of the first GEMM's epilogue; 1 and infinity for functions without them."""
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
    """A layer as kernels read it in tiles: its problem and its two matrices."""

    problem: MoEProblem
    w13: KernelMatrix
    w2: KernelMatrix


AnyLayer = KernelLayer | RowLayer
"""A layer as kernels read it: in tiles, or in rows."""


LAYER = "moectl"
"""Key in `PreparedMoE.derived` of `layer_of`."""


def layer_of(prepared: PreparedMoE) -> AnyLayer:
    """The layer's matrices, created once: a `RowLayer` for formats that are read in rows.

    Examining the scales waits for the GPU, so it is done when a layer is prepared. If it first happens during
    graph capture, the exponents are left unknown and the result is not kept.
    """
    if in_rows(prepared.problem):
        return prepared.derive(LAYER, row_layer_of)
    layer: KernelLayer | None = prepared.derived.get(LAYER)
    if layer is None:
        matrices = [matrix_of(prepared, role) for role in ("w13", "w2")]
        if prepared.problem.scheme.weight.name in ("mxfp4", "int4") and matrices[0].zeros is None:
            every = exponents_of_each([m.scales for m in matrices], scale_name(prepared.problem))
            matrices = [replace(m, exponents=found) for m, found in zip(matrices, every, strict=True)]
        layer = KernelLayer(prepared.problem, *matrices)
        if not (prepared.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            prepared.derived[LAYER] = layer
    return layer


def accept_scales(prepared: PreparedMoE, role: str, t: Tensor) -> str:
    """Why kernels that were launched would be wrong with new canonical scales `t`; empty if they are right.

    `Runner.refit` of kernels that are chosen by the exponents of a layer's scales.
    """
    layer: AnyLayer | None = prepared.derived.get(LAYER)
    matrix, _, kind = role.partition("_")
    if not isinstance(layer, KernelLayer) or kind != "scale":
        return ""
    old: KernelMatrix = getattr(layer, matrix)
    new = None if old.exponents is None else exponents_of(t, scale_name(prepared.problem))
    if old.exponents is None or new is None or new[0] > new[1]:
        return ""
    for allowed in old.relied_on:
        if not all(exponent in allowed for exponent in new):
            return (
                f"kernels were launched that are right for scales from 2^{allowed.start - 127} to below "
                f"2^{allowed.stop - 127}, got 2^{new[0] - 127} to below 2^{new[1] - 126}"
            )
    wider = min(old.exponents[0], new[0]), max(old.exponents[1], new[1])
    if wider != old.exponents:
        new_matrix = replace(old, exponents=wider)
        w13, w2 = (new_matrix if m is old else m for m in (layer.w13, layer.w2))
        prepared.derived[LAYER] = KernelLayer(layer.problem, w13, w2)
    return ""


ExpertOrder = tuple[Tensor, Tensor]
"""Slots sorted by expert, and the offset of each expert's first slot (`sort_and_combine.sort_by_expert`)."""


@dataclass(frozen=True)
class KernelCall:
    """One call's tensors: `x` ``[tokens, hidden]``, flat `ids` and `weights`, and the output `y`.

    Batched activations are a call with a top-k of 1 and a given `order`: the second GEMM writes the rows of
    `y`, and padding rows may stay unwritten.

    Attributes:
        order: the sorted assignments; None if they have to be sorted.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor
    order: ExpertOrder | None = None

    @property
    def assignments(self) -> int:
        return self.ids.numel()

    def parts(self) -> Tensor:
        """The second GEMM's output ``[T, hidden]``, a row per assignment; for batched activations `y`."""
        return self.x.new_empty(self.assignments, self.y.shape[1]) if self.order is None else self.y


@dataclass(frozen=True)
class KernelFamily:
    """Kernels that compute a whole layer, for a range of tokens per expert and some GPUs.

    Attributes:
        tile: the type of its launch configurations, a frozen dataclass of plain numbers.
        run: fills ``call.y``; allocates only with torch.empty, launches grids that do not depend on the
            routing, and never waits for the GPU. It gets a `RowLayer` for formats that are read in rows.
        fits: why it does not support a problem with a tile, its weight format included, as a clause; empty if
            it does.
        capability: lowest and highest supported compute capability.
        interpreted: True if Triton's interpreter can run it.
        candidates: tiles that are worth measuring for a problem.
        tokens_per_expert: range of tokens per active expert in which they are worth measuring.
    """

    tile: type
    run: Callable[[Any, KernelCall, Any], None]
    fits: Callable[[MoEProblem, Any], str]
    capability: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (99, 9))
    interpreted: bool = False
    candidates: Callable[[MoEProblem], Sequence[Any]] = lambda problem: ()
    tokens_per_expert: tuple[float, float] = (0.0, math.inf)

    def runs_on(self, device: torch.device) -> bool:
        """Whether the kernels support `device`."""
        if device.type != "cuda":
            return self.interpreted
        lowest, highest = self.capability
        return lowest <= torch.cuda.get_device_capability(device) <= highest

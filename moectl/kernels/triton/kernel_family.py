"""A kernel family (`KernelFamily`) and its inputs: the layer's matrices and the tensors of one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...capabilities.own_kernels import in_rows
from ...errors import UsageError
from ...problem.moe_problem import Activation, MoEProblem
from ..choice.tile_family import TileFamily, scale_name
from ..prepared_layer import PreparedMoE
from .row_matrix import RowLayer, row_layer_of


@dataclass(frozen=True)
class KernelMatrix:
    """One of the two expert matrices as kernels read it in tiles (``moectl-mtile64``).

    Attributes:
        codes: ``[experts, n / 64, k / 64, 2048]`` uint8, with 8-bit codes 4096 bytes a tile.
        scales: ``[experts, n / 64, k / span, words]`` int32; one span for scales of whole rows.
        zeros: zero points in the shape of `scales`, or None.
        bias: ``[experts, n]`` in the order of the stored rows, or None.
        factors: ``[experts, halves]`` fp32 factors on the products (NVFP4's global scales), gate's before
            up's; or None.
        n, k: stored (padded) rows and columns.
        exponents: smallest and largest biased exponent of the nonzero scales, 127 for scales in [1, 2); None
            if unknown (`exponents_of`).
        numbers: whether all codes are known to be numbers, none of them NaN (`are_numbers`).
        relied_on: ranges of exponents for which kernels were launched that are right only there.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    factors: Tensor | None = None
    exponents: tuple[int, int] | None = None
    numbers: bool = True
    relied_on: set[range] = field(default_factory=set, compare=False, repr=False)

    @property
    def halves(self) -> int:
        """Factors of an expert: 2 for gate and up, 1 for a single matrix, 0 without factors."""
        return 0 if self.factors is None else self.factors.shape[1]

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
    kinds = torch.uint8 if kind == "e8m0" else torch.int16
    every = [t.contiguous().view(-1).view(kinds) for t in scales]
    found = _bounds_of(every, torch.aminmax if kind == "e8m0" else _magnitudes)
    # Bytes of 0 hide the smallest of the others.
    again = [i for i, (low, _) in enumerate(found) if kind == "e8m0" and low == 0]
    for i, bounds in zip(again, _bounds_of([every[i] for i in again], _nonzero), strict=True):
        found[i] = bounds
    shift = 0 if kind == "e8m0" else 7
    # Without any nonzero scale, the smallest is beyond the largest.
    return [(min(255, low >> shift), high >> shift) for low, high in found]


def are_numbers(codes: Tensor) -> bool:
    """Whether none of the E4M3 bytes `codes` is NaN; False, that is unknown, during CUDA graph capture."""
    if codes.is_meta:
        return True
    if codes.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    parts = torch.split(codes.contiguous().view(-1), EXAMINED_BYTES)
    return not any((part & 0x7F).max() == 0x7F for part in parts if part.numel())


Bounds = Callable[[Tensor], tuple[Tensor, Tensor]]


def _bounds_of(every: Sequence[Tensor], bounds: Bounds) -> list[tuple[int, int]]:
    """The smallest and the largest of what `bounds` gives for the parts of each tensor; waits once."""
    split = [torch.split(t, EXAMINED_BYTES // t.itemsize) for t in every]
    parts = [torch.stack(tuple(bounds(part))) for parts in split for part in parts]
    found = iter(torch.stack(parts).tolist() if parts else ())
    every_bounds = []
    for parts_of_one in split:
        lows, highs = zip(*(next(found) for _ in parts_of_one), strict=True)
        every_bounds.append((min(lows), max(highs)))
    return every_bounds


def _nonzero(stored: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest nonzero number of uint8, 255 or more if there is none, and the largest."""
    below = stored - 1  # zero becomes the largest
    return below.min().to(torch.int16) + 1, stored.max().to(torch.int16)


def _magnitudes(stored: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest nonzero and the largest number of int16 without its sign; for zeros alone 2^15, 0."""
    magnitudes = stored & 0x7FFF
    largest = magnitudes.max()
    return magnitudes.sub_(1).bitwise_and_(0x7FFF).min().to(torch.int32) + 1, largest.to(torch.int32)


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
    return KernelMatrix(codes, scales, zeros, bias, n, k, _factors(prepared, role, codes.shape[0]))


def _factors(prepared: PreparedMoE, role: str, experts: int) -> Tensor | None:
    """`KernelMatrix.factors` of a layer's matrix `role`."""
    name, problem = f"{role}_global", prepared.problem
    if not problem.scheme.weight.number.global_scale:
        return None
    factors = prepared.weights.get(name)
    shape = (experts, 2 if role == "w13" and problem.activation.gated else 1, 1)
    if factors is None or factors.shape != shape:
        got = None if factors is None else list(factors.shape)
        raise UsageError(f"{name} must be {list(shape)}, got {got}")
    return factors.view(shape[:2])


CODE_BASES = {"bf16": 128, "fp16": 1024}
"""The power of two at which each dtype's unit in the last place is 1: int4 codes are or-ed into it."""


def activation_numbers(act: Activation) -> dict[str, float]:
    """`alpha` and `limit` of the first GEMM's epilogue; 1 and infinity for functions without them.

    Those of SiTU are what softly limits gate and up, infinity for none.
    """
    if act.name == "situ":
        return {
            "alpha": math.inf if act.beta is None else act.beta,
            "limit": math.inf if act.linear_beta is None else act.linear_beta,
        }
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
        name = prepared.problem.scheme.weight.name
        if name in ("mxfp4", "mxfp8", "int4") and matrices[0].zeros is None:
            every = exponents_of_each([m.scales for m in matrices], scale_name(prepared.problem))
            matrices = [replace(m, exponents=found) for m, found in zip(matrices, every, strict=True)]
        if name == "mxfp8":
            matrices = [replace(m, numbers=are_numbers(m.codes)) for m in matrices]
        layer = KernelLayer(prepared.problem, *matrices)
        if not (prepared.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            prepared.derived[LAYER] = layer
    return layer


def accept_scales(layers: Sequence[PreparedMoE], scales: Sequence[tuple[str, Tensor]]) -> str:
    """Why kernels that were launched would be wrong with new canonical `scales`; empty if they are right.

    `Runner.refit` of kernels that are chosen by the exponents of a layer's scales; waits for the GPU once
    for these. MXFP8 codes may be among `scales` (`Runner.refit_codes`): kernels for numbers keep no NaN.
    """
    derived = (prepared.derived.get(LAYER) for prepared in layers)
    made = [layer for layer in derived if isinstance(layer, KernelLayer)]
    codes = [(role, t) for role, t in scales if f"{role}_scale" in MATRICES]
    if any(
        MATRICES[f"{role}_scale"](layer).numbers and not are_numbers(t) for layer in made for role, t in codes
    ):
        return "kernels were launched that are right for codes that are numbers, got NaN"
    known = [
        (role, t)
        for role, t in scales
        if role in MATRICES and any(MATRICES[role](layer).exponents is not None for layer in made)
    ]
    kind = scale_name(layers[0].problem) if known else ""
    new = list(zip((role for role, _ in known), exponents_of_each([t for _, t in known], kind), strict=True))
    for role, found in new:
        for allowed in {r for layer in made for r in MATRICES[role](layer).relied_on}:
            if found is not None and found[0] <= found[1] and not all(e in allowed for e in found):
                return (
                    f"kernels were launched that are right for scales from 2^{allowed.start - 127} to below "
                    f"2^{allowed.stop - 127}, got 2^{found[0] - 127} to below 2^{found[1] - 126}"
                )
    remember_exponents(layers, {role: found for role, found in new if found is not None})
    return ""


def exponents_accepted(layers: Sequence[PreparedMoE], role: str) -> range:
    """The exponents of new scales `role` that `accept_scales` lets pass: `Runner.refit_exponents`."""
    low, stop = 0, 256
    for prepared in layers:
        layer = prepared.derived.get(LAYER)
        if isinstance(layer, KernelLayer) and role in MATRICES:
            for allowed in MATRICES[role](layer).relied_on:
                low, stop = max(low, allowed.start), min(stop, allowed.stop)
    return range(low, stop)


def remember_exponents(layers: Sequence[PreparedMoE], found: Mapping[str, tuple[int, int]]) -> None:
    """Widens the ranges of exponents of `layers` by those of new scales, by role: `Runner.refit_found`.

    Where the least is beyond the largest, there are none.
    """
    for prepared in layers:
        layer = prepared.derived.get(LAYER)
        if not isinstance(layer, KernelLayer):
            continue
        made = layer
        for role, bounds in found.items():
            if bounds[0] <= bounds[1]:
                w13 = _wider(made.w13, bounds) if role == "w13_scale" else made.w13
                w2 = _wider(made.w2, bounds) if role == "w2_scale" else made.w2
                if w13 is not made.w13 or w2 is not made.w2:
                    made = KernelLayer(made.problem, w13, w2)
        prepared.derived[LAYER] = made


MATRICES: Mapping[str, Callable[[KernelLayer], KernelMatrix]] = {
    "w13_scale": lambda layer: layer.w13,
    "w2_scale": lambda layer: layer.w2,
}
"""The matrices by the role of their scales."""


def _wider(matrix: KernelMatrix, found: tuple[int, int]) -> KernelMatrix:
    """`matrix` with exponents that include `found`."""
    if matrix.exponents is None:
        return matrix
    bounds = min(matrix.exponents[0], found[0]), max(matrix.exponents[1], found[1])
    return matrix if bounds == matrix.exponents else replace(matrix, exponents=bounds)


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

    def parts(self, splits: int = 1) -> Tensor:
        """The second GEMM's output ``[T, hidden]``, a row per assignment; if its reduction is split,
        ``[splits, T, hidden]`` in fp32.

        It is `y` itself for batched activations, and if each token has one expert: there is nothing to sum.
        """
        if splits > 1:
            return self.y.new_empty(splits, self.assignments, self.y.shape[1], dtype=torch.float32)
        if self.order is not None or self.assignments == len(self.x):
            return self.y
        return self.x.new_empty(self.assignments, self.y.shape[1])


@dataclass(frozen=True, kw_only=True)
class KernelFamily(TileFamily):
    """Kernels that compute a whole layer, for a range of tokens per expert and some GPUs.

    Attributes:
        run: fills ``call.y``; allocates only with torch.empty, launches grids that do not depend on the
            routing, and never waits for the GPU. It gets a `RowLayer` for formats that are read in rows.
        interpreted: True if Triton's interpreter can run it.
    """

    run: Callable[[Any, KernelCall, Any], None]
    interpreted: bool = False

    @staticmethod
    def of(
        tiles: TileFamily, run: Callable[[Any, KernelCall, Any], None], interpreted: bool = False
    ) -> KernelFamily:
        """The family of `tiles` with its kernels."""
        values = {item.name: getattr(tiles, item.name) for item in fields(TileFamily)}
        return KernelFamily(**values, run=run, interpreted=interpreted)

    def runs_on(self, device: torch.device) -> bool:
        """Whether the kernels support `device`."""
        if device.type != "cuda":
            return self.interpreted
        lowest, highest = self.capability
        return lowest <= torch.cuda.get_device_capability(device) <= highest

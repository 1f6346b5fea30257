"""Shared host code of the kernel families `mid` and `prefill`: formats, compile-time GEMM parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....problem.moe_problem import MoEProblem
from ...choice.tile_family import scale_name
from ..kernel_family import KernelLayer, KernelMatrix
from .fragment_asm import FOLDED_SCALES, fold_factor


@dataclass(frozen=True)
class GemmSpec:
    """Compile-time parameters of one of a layer's two GEMMs.

    Attributes:
        stage: 1 or 2, the first or the second GEMM.
        half: whether operands are fp16.
        zeros: whether there are zero points.
        halves: factors of an expert, see `KernelMatrix.halves`.
        exact: whether weights are exact rather than folded with a power of two, see `fragments`.
        split: whether fp16 scales are split in two for bf16 tokens.
        weighted: whether the router's weights are applied in this GEMM.
    """

    stage: int
    format: str
    half: bool
    zeros: bool
    halves: int
    exact: bool
    split: bool
    bias: bool
    weighted: bool
    top_k: int

    @property
    def factor(self) -> float:
        """Factor on the sums that undoes folding."""
        return 1.0 if self.exact else fold_factor(self.format, self.half)


def operand(layer: KernelLayer, stage: int) -> tuple[KernelMatrix, int]:
    """The weight matrix of a GEMM, and the number of columns of its tokens."""
    dims = layer.problem.dims
    return (layer.w13, dims.hidden) if stage == 1 else (layer.w2, dims.intermediate)


def spec_fields(layer: KernelLayer, stage: int) -> dict[str, Any]:
    """The fields of the `GemmSpec` of a layer's GEMM."""
    p = layer.problem
    m, _ = operand(layer, stage)
    return {
        "stage": stage,
        "format": p.scheme.weight.name,
        "half": p.dtype == "fp16",
        "zeros": m.zeros is not None,
        "halves": m.halves,
        "exact": exact_weights(p, m),
        "split": (scale_name(p), p.dtype) == ("fp16", "bf16"),
        "bias": m.bias is not None,
        "weighted": p.routing.weight_on_input == (stage == 1),
        "top_k": p.top_k,
    }


def exact_weights(problem: MoEProblem, m: KernelMatrix) -> bool:
    """Whether the weights of `m` must not be folded with a power of two (see `fragment_asm`)."""
    name = problem.scheme.weight.name
    if name == "nvfp4":
        return False
    if name == "int4" and (m.zeros is not None or {problem.dtype, scale_name(problem)} != {"bf16"}):
        return True
    return name not in FOLDED_SCALES or not (m.numbers and m.exponents_within(FOLDED_SCALES[name]))


def keeps_nan(problem: MoEProblem, m: KernelMatrix) -> bool:
    """Whether `m` may have NaN codes that its kernel keeps: of MXFP8, all that is not folded."""
    return problem.scheme.weight.name == "mxfp8" and exact_weights(problem, m)

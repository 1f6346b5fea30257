"""The emulation backend: any layout, CPU or GPU, activations rounded as the checkpoint declares them.

The slow twin of kernels that compute with quantized activations: weights are decoded, what enters each of
the two GEMMs is quantized and decoded again, and products and sums are fp32. Static scales are those that
are stored with the layer. The torch backend leaves the rounding out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import NoBackend
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import A16, FULL, ActFormat
from ..activation import activate
from ..prepared_layer import DenseExpert, PreparedMoE
from ..quantize_tokens import dequantize, quantize
from ..quantize_tokens import refusal as quantizing
from ..runner import Runner
from ..tolerance import DECLARED
from .decoding import decoded, linear, refusal

NAME = "emulation"


def rounded(x: Tensor, form: ActFormat, scale: Tensor | None = None) -> Tensor:
    """``[tokens, columns]`` fp32: `x` after it was quantized to `form`; `x` itself for 16-bit activations.

    `scale` is one number: the only scale of a static format, or the global one of a two-level format.
    """
    x = x.float()
    return x if form == A16 else dequantize(quantize(x, form, scale), scale)


@dataclass(frozen=True)
class _Rounding:
    """How what enters one of the GEMMs is rounded: to `form`, with ``[local_experts]`` scales or None."""

    form: ActFormat
    scales: Tensor | None

    def of(self, x: Tensor, expert: int) -> Tensor:
        """``[tokens, columns]`` fp32 tokens of one expert as it gets them."""
        return rounded(x, self.form, None if self.scales is None else self.scales[expert])


def _rounding(prepared: PreparedMoE, role: str, everything: Tensor) -> _Rounding:
    """Of what enters the matrix `role`; `everything` that does decides a scale made at run time for all."""
    act = prepared.problem.scheme.act
    if act.number.global_scale or not act.dynamic:
        return _Rounding(act, stored_scales(prepared, role))
    if act.block != (FULL, FULL):
        return _Rounding(act, None)
    largest = everything.float().abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest / act.number.grid.largest
    return _Rounding(replace(act, dynamic=False), scale.expand(prepared.problem.local_experts))


def stored_scales(prepared: PreparedMoE, role: str) -> Tensor:
    """``[local_experts]`` fp32 scales that a layer has for what enters the matrix `role`.

    Where gate and up have their own it is the larger one: kernels quantize tokens once for both. Raises
    NoBackend when the layer's layout does not keep them.
    """
    stored = prepared.weights.get(f"{role}_input")
    if stored is None:
        raise NoBackend(
            f"the {NAME} backend needs the scales of activations, which weights in {prepared.layout} lack",
            hint="run the checkpoint itself, or a layout that keeps them",
        )
    experts = prepared.problem.local_experts
    # One of the layer, one of each expert, or one of each half of an expert.
    each = stored.float().reshape(len(stored) if stored.ndim else 1, -1).amax(-1)
    return each.expand(experts)


@dataclass(frozen=True)
class _Hit:
    """An expert that was chosen, decoded, and the `rows` of its assignments among all ``[n]``."""

    number: int
    expert: DenseExpert
    rows: Tensor


def _hits(prepared: PreparedMoE, ids: Tensor) -> Iterator[_Hit]:
    """Every expert with tokens, decoded some at a time."""
    flat = ids.flatten()
    numbers = [e for e in sorted(set(flat.tolist())) if 0 <= e < prepared.problem.local_experts]
    for number, expert in decoded(prepared, numbers):
        yield _Hit(number, expert, (flat == number).nonzero().flatten())


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    problem, factors = prepared.problem, weights.reshape(-1, 1)
    on_input, top_k = problem.routing.weight_on_input, problem.top_k
    h = x.new_zeros(ids.numel(), problem.dims.intermediate, dtype=torch.float32)
    rounding = _rounding(prepared, "w13", x)
    for hit in _hits(prepared, ids):
        tokens = x[hit.rows // top_k].float()
        tokens = tokens * factors[hit.rows] if on_input else tokens
        first = linear(rounding.of(tokens, hit.number), hit.expert.w13, hit.expert.w13_bias)
        h[hit.rows] = activate(first, problem.activation, problem.rows)
    y = x.new_zeros(x.shape, dtype=torch.float32)
    # What enters the second GEMM is quantized when all of it is known: one scale may be for everything.
    rounding = _rounding(prepared, "w2", h)
    for hit in _hits(prepared, ids):
        second = linear(rounding.of(h[hit.rows], hit.number), hit.expert.w2, hit.expert.w2_bias)
        y.index_add_(0, hit.rows // top_k, second if on_input else second * factors[hit.rows])
    return y.to(x.dtype)


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    act, dims = problem.scheme.act, problem.dims
    form = replace(act, dynamic=False) if act.block == (FULL, FULL) else act
    unfit = "" if act == A16 else quantizing(form, dims.hidden) or quantizing(form, dims.intermediate)
    return refusal(problem, device) or unfit


RUNNER = Runner(NAME, None, _compute, _refusal, accumulation=DECLARED, capturable=False)

"""The emulation backend: any layout, CPU or GPU, with activations rounded to the checkpoint's format.

A slow equivalent of kernels with quantized activations: weights are decoded, the input of each of the two
GEMMs is quantized and dequantized, and products and sums are fp32. Static scales are the layer's stored
ones, also where a layout's kernels need none and a converted directory keeps them to be restored. The torch
backend does not round activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
class _HitExpert:
    """An expert with tokens, decoded, and the row numbers ``[n]`` of its assignments."""

    number: int
    expert: DenseExpert
    rows: Tensor


@dataclass(frozen=True)
class _Rounding:
    """How the input of one of the GEMMs is rounded: to `form`, with an expert's scale or None."""

    form: ActFormat
    scale_of: Callable[[_HitExpert], Tensor | None]

    def of(self, x: Tensor, hit: _HitExpert) -> Tensor:
        """``[tokens, columns]`` fp32: the rounded input `x` of one expert."""
        return rounded(x, self.form, self.scale_of(hit))


def _rounding(prepared: PreparedMoE, role: str, everything: Tensor) -> _Rounding:
    """Rounding of the input of the matrix `role`; a dynamic per-tensor scale comes from `everything`."""
    act = prepared.problem.scheme.act
    if act.number.global_scale or not act.dynamic:
        return _Rounding(act, lambda hit: _stored_scale(prepared, role, hit))
    if act.block != (FULL, FULL):
        return _Rounding(act, lambda hit: None)
    largest = everything.float().abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest / act.number.grid.largest
    return _Rounding(replace(act, dynamic=False), lambda hit: scale)


def _stored_scale(prepared: PreparedMoE, role: str, hit: _HitExpert) -> Tensor:
    """One fp32 number: the scale of the input of an expert's matrix `role`.

    The layout's where its kernels read one, else the expert's own. Raises NoBackend where neither is stored.
    """
    stored = prepared.weights.get(f"{role}_input")
    if stored is not None:
        # One scale for the layer, one per expert, or one for each half of an expert, the larger one of which
        # counts: kernels quantize tokens once for both.
        scales = stored.float().reshape(len(stored) if stored.ndim else 1, -1).amax(-1)
        return scales.expand(prepared.problem.local_experts)[hit.number]
    own: Tensor | None = getattr(hit.expert, f"{role}_input")
    if own is None:
        raise NoBackend(
            f"the {NAME} backend needs the scales of activations, which weights in {prepared.layout} lack",
            hint="run the checkpoint itself, or a layout that keeps them",
        )
    return own


def _hits(prepared: PreparedMoE, ids: Tensor) -> Iterator[_HitExpert]:
    """Every expert with tokens, decoded in batches."""
    flat = ids.flatten()
    numbers = [e for e in sorted(set(flat.tolist())) if 0 <= e < prepared.problem.local_experts]
    for number, expert in decoded(prepared, numbers):
        yield _HitExpert(number, expert, (flat == number).nonzero().flatten())


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    problem, factors = prepared.problem, weights.reshape(-1, 1)
    on_input, top_k = problem.routing.weight_on_input, problem.top_k
    h = x.new_zeros(ids.numel(), problem.dims.intermediate, dtype=torch.float32)
    rounding = _rounding(prepared, "w13", x)
    for hit in _hits(prepared, ids):
        tokens = x[hit.rows // top_k].float()
        tokens = tokens * factors[hit.rows] if on_input else tokens
        first = linear(rounding.of(tokens, hit), hit.expert.w13, hit.expert.w13_bias)
        h[hit.rows] = activate(first, problem.activation, problem.rows)
    y = x.new_zeros(x.shape, dtype=torch.float32)
    # The second GEMM's input is quantized once it is complete: a per-tensor scale depends on all of it.
    rounding = _rounding(prepared, "w2", h)
    for hit in _hits(prepared, ids):
        second = linear(rounding.of(h[hit.rows], hit), hit.expert.w2, hit.expert.w2_bias)
        y.index_add_(0, hit.rows // top_k, second if on_input else second * factors[hit.rows])
    return y.to(x.dtype)


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    act, dims = problem.scheme.act, problem.dims
    form = replace(act, dynamic=False) if act.block == (FULL, FULL) else act
    unfit = "" if act == A16 else quantizing(form, dims.hidden) or quantizing(form, dims.intermediate)
    return refusal(problem, device) or unfit


RUNNER = Runner(NAME, None, _compute, _refusal, accumulation=DECLARED, capturable=False)

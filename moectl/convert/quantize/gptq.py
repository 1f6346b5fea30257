"""GPTQ: columns are quantized in order, and later ones compensate for the error (Frantar et al., 2022).

The squared error of a layer's outputs for calibration tokens is e^T H e for each row's weight error e, with H
the mean of x x^T. The error of a rounded column shifts the optimum of the later ones by the inverse of H.
"""

from __future__ import annotations

from ...errors import CheckpointError
from ...lazy_torch import Tensor, torch
from ...problem.schemes import FULL
from ..codecs.blocks import ScaleBlocks, blocks_of
from ..codecs.scaled import Scaled
from .scale_search import search

COLUMNS = 128
"""Columns whose errors are propagated one at a time before one update of the rest of the matrix."""

DAMPINGS = 6
"""Damping values, each ten times the previous, that are tried on a Hessian."""


def factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor ``[k, k]`` float32 of the inverse of the damped `hessian`.

    Damping is raised tenfold until the factorization succeeds; CheckpointError after `DAMPINGS` attempts.
    """
    h = hessian.float().clone()
    diagonal = h.diagonal()
    mean = diagonal.mean()
    diagonal.copy_(torch.where(diagonal == 0, mean if mean > 0 else torch.ones_like(mean), diagonal))
    for attempt in range(DAMPINGS):
        damped = h + torch.diag(damping * 10.0**attempt * diagonal.mean().expand(len(h)))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                factored: Tensor = upper
                return factored
    raise CheckpointError(
        "the calibration activations give no positive definite Hessian.",
        hint="Use more tokens, a larger damping, or the search without calibration.",
    )


def feed_back(
    codec: Scaled, w: Tensor, upper: Tensor, importance: Tensor, scale: Tensor, zero: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes ``[n, k]`` (one per byte), stored scales and zeros ``[rows, g]`` of `w` ``[n, k]`` float32.

    `scale` and `zero` are used if one scale covers a whole row; for narrower groups they are searched again
    with `importance` ``[k]``, from the weights as updated by the preceding columns. `w` is overwritten. All
    rows are processed at once, with about four times the memory of `w`.
    """
    n, k = w.shape
    group = k if codec.weight.group == FULL else codec.weight.group
    whole = blocks_of(codec.weight, n, k)
    values = torch.empty_like(w)
    scales, zeros = scale.clone(), None if zero is None else zero.clone()
    width = COLUMNS if group >= k else group * max(1, COLUMNS // group)
    for first in range(0, k, width):
        last = min(k, first + width)
        errors = torch.empty(n, last - first, dtype=w.dtype, device=w.device)
        for column in range(first, last):
            if group < k and column % group == 0:
                _search_group(codec, w, whole, column, importance, scales, zeros)
            step, shift = _row_scales(codec, scales, zeros, column // group, whole)
            own = w[:, column]
            x = own / step if shift is None else own / step + shift
            q = codec.grid.round(x)
            values[:, column] = q
            decoded = q * step if shift is None else (q - shift) * step
            error = (own - decoded) / upper[column, column]
            errors[:, column - first] = error
            if column + 1 < last:
                w[:, column + 1 : last].addr_(error, upper[column, column + 1 : last], alpha=-1)
        if last < k:
            w[:, last:].addmm_(errors, upper[first:last, last:], alpha=-1)
    return codec.grid.codes(values), scales, zeros


def _search_group(
    codec: Scaled,
    w: Tensor,
    whole: ScaleBlocks,
    column: int,
    importance: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
) -> None:
    """Searches the scales (and zeros) of the column group that starts at `column`, and writes them."""
    end = min(whole.k, column + whole.columns)
    part = ScaleBlocks(whole.n, end - column, whole.rows, whole.columns)
    blocked = part.split(w[None, :, column:end])
    weight = ScaleBlocks(1, end - column, 1, whole.columns).split(importance[None, None, column:end])
    usual, zero = codec.usual_scales(blocked)
    scale, zero = search(codec, blocked, usual, zero, weight)
    scales[:, column // whole.columns] = scale[0, :, 0]
    if zeros is not None and zero is not None:
        zeros[:, column // whole.columns] = zero[0, :, 0]


def _row_scales(
    codec: Scaled, scales: Tensor, zeros: Tensor | None, group: int, whole: ScaleBlocks
) -> tuple[Tensor, Tensor | None]:
    """Scale and grid value of the zero point of every row ``[n]`` in column group `group`."""

    def rows(t: Tensor) -> Tensor:
        return t if whole.rows == 1 else t.repeat_interleave(whole.rows)[: whole.n]

    step = rows(codec.store.load(scales[:, group].contiguous()))
    return step, None if zeros is None else rows(codec.shift(zeros[:, group]))


def output_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """``[n]`` float32: e^T H e of every row e of `difference` ``[n, k]``."""
    return (difference @ hessian).mul_(difference).sum(-1)

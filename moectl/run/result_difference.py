"""How two results of a layer differ: direction, size, and the tokens where they differ most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORST = 3
"""Tokens that are named."""


@dataclass(frozen=True, slots=True)
class TokenError:
    """One token's row: its L2 distance relative to the reference row, and the cosine between both."""

    token: int
    l2: float
    cosine: float


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """A result beside another one, over all tokens.

    Attributes:
        cosine: between all numbers of both; 1 for two results of zeros.
        l2: L2 distance relative to the L2 norm of the reference.
        max: largest difference of an element, in the numbers' own unit.
        worst: tokens with the largest relative distance, worst first; none without tokens.
    """

    cosine: float
    l2: float
    max: float
    worst: tuple[TokenError, ...]


def difference(y: Tensor, other: Tensor, scale: Tensor | None = None) -> ResultDifference:
    """`y` beside `other`, both ``[tokens, hidden]``; distances relative to `scale`, by default `other`.

    Numbers that are not finite make what depends on them NaN or infinite; such tokens are the worst.
    """
    a, b = y.double().cpu(), other.double().cpu()
    size = b if scale is None else scale.double().cpu()
    error = (a - b).norm(dim=1)
    relative = _ratio(error, size.norm(dim=1))
    rows = torch.nan_to_num(relative, nan=float("inf"))
    worst = torch.sort(rows, descending=True, stable=True).indices[:WORST].tolist()
    return ResultDifference(
        _cosine(a.flatten(), b.flatten()),
        float(_ratio(error.norm().view(1), size.norm().view(1))),
        float((a - b).abs().max()) if a.numel() else 0.0,
        tuple(TokenError(t, float(relative[t]), _cosine(a[t], b[t])) for t in worst),
    )


def _cosine(a: Tensor, b: Tensor) -> float:
    """Of two vectors; 1 for two of zeros, 0 for one."""
    norms = a.norm() * b.norm()
    if float(norms) == 0.0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float((a @ b) / norms)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size, where no error against zero is zero and any other is infinite."""
    return torch.where(error == 0, torch.zeros_like(error), error / size)

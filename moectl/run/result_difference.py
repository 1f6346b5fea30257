"""Differences between two results of a layer: cosine, L2 distance, and the worst tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORST = 3
"""Number of worst tokens reported."""


@dataclass(frozen=True, slots=True)
class TokenError:
    """One token: the L2 distance relative to the reference's row, and the cosine between both rows."""

    token: int
    l2: float
    cosine: float


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """The difference between two results, over all tokens.

    Attributes:
        cosine: between all numbers of both; 1 for two results of zeros.
        l2: L2 distance relative to the L2 norm of the reference.
        max: largest absolute difference of an element.
        worst: tokens with the largest relative distance, worst first; none without tokens.
    """

    cosine: float
    l2: float
    max: float
    worst: tuple[TokenError, ...]


def difference(y: Tensor, other: Tensor, scale: Tensor | None = None) -> ResultDifference:
    """How far `y` is from `other`, both ``[tokens, hidden]``; relative to `scale`, by default `other`.

    Values that depend on non-finite numbers are NaN or infinite; the tokens concerned count as the worst.

    Example:
        >>> import torch
        >>> distance = difference(torch.ones(2, 4), torch.tensor([[1.0], [2.0]]).expand(2, 4))
        >>> distance.max, distance.worst[0].token, distance.worst[0].l2
        (1.0, 1, 0.5)
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
    """Cosine between two vectors; 1 if both are zero, 0 if one is."""
    norms = a.norm() * b.norm()
    if float(norms) == 0.0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float((a @ b) / norms)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size, with 0 / 0 = 0; other errors over 0 are infinite."""
    return torch.where(error == 0, torch.zeros_like(error), error / size)

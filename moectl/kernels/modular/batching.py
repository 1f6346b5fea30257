"""Tokens expert by expert: ``[experts, most, ...]`` with counts, and the way back to the tokens' order.

Every shape follows from sizes alone and nothing is read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .exchange import as_bytes


@dataclass(frozen=True)
class ExpertMajorBatches:
    """Where assignments lie among rows ``[experts * most]``.

    Attributes:
        places: ``[tokens, top_k]`` int64; `experts` * `most` for an assignment of no expert here.
        counts: ``[experts]`` int32 tokens of each expert, which are its first rows.
        most: rows of an expert.
    """

    places: Tensor
    counts: Tensor
    most: int

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return len(self.counts) * self.most

    def spread(self, t: Tensor, factors: Tensor | None = None) -> Tensor:
        """``[experts, most, ...]``: `t` ``[tokens, ...]`` by expert; rows beyond the counts hold anything.

        `factors` ``[tokens, top_k]`` multiply a token on its way to each of its experts.
        """
        moved = as_bytes(t)
        # One row more takes whatever belongs to no expert.
        out = moved.new_empty(self.rows + 1, *t.shape[1:])
        for choice in range(self.places.shape[1]):
            row = moved if factors is None else (t * factors[:, choice, None]).to(t.dtype)
            out.index_copy_(0, self.places[:, choice], row)
        return out[:-1].view(t.dtype).view(len(self.counts), self.most, *t.shape[1:])

    def choice_of(self, y: Tensor, choice: int) -> Tensor:
        """``[tokens, ...]``: rows of `y` ``[experts, most, ...]`` of every token's expert number `choice`.

        Tokens without one get any row.
        """
        places = self.places[:, choice].clamp(max=self.rows - 1)
        return y.flatten(0, 1).index_select(0, places)


def batches_of(ids: Tensor, experts: int, most: int) -> ExpertMajorBatches:
    """Places for the assignments `ids` ``[tokens, top_k]``, tokens of an expert in rising order.

    Args:
        ids: of the `experts` here; others are of no expert.
        most: rows of an expert, at least the tokens that one can get.
    """
    flat = ids.reshape(-1).long()
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(key, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    first = counts.cumsum(0) - counts
    ordered = key[order]
    numbers = torch.arange(len(flat), device=ids.device) - first[ordered]
    within = torch.empty_like(numbers).scatter_(0, order, numbers)
    places = torch.where(key < experts, key * most + within, experts * most)
    return ExpertMajorBatches(places.view(ids.shape), counts[:experts].to(torch.int32), most)

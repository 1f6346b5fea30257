"""Batched activations: tokens by expert, ``[experts, most, ...]`` with counts, and the inverse permutation.

Shapes depend on sizes alone; nothing is copied from the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .exchange import as_bytes


@dataclass(frozen=True)
class ExpertMajorBatches:
    """Positions of assignments among the rows ``[experts * most]`` of a batch.

    Attributes:
        places: ``[tokens, top_k]`` int64 row numbers; `experts` * `most` for an id of no local expert.
        counts: ``[experts]`` int32 tokens of each expert; they are its first rows.
        most: rows per expert.
        expected: how many rows of an expert are tokens, on average, if experts are equally likely.
    """

    places: Tensor
    counts: Tensor
    most: int
    expected: int

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return len(self.counts) * self.most

    def scatter(self, t: Tensor, factors: Tensor | None = None) -> Tensor:
        """``[experts, most, ...]``: `t` ``[tokens, ...]`` by expert; rows beyond the counts are undefined.

        `factors` ``[tokens, top_k]`` multiply each token's copies.
        """
        moved = as_bytes(t)
        # One more row for assignments of no local expert.
        out = moved.new_empty(self.rows + 1, *t.shape[1:])
        for choice in range(self.places.shape[1]):
            row = moved if factors is None else (t * factors[:, choice, None]).to(t.dtype)
            out.index_copy_(0, self.places[:, choice], row)
        return out[:-1].view(t.dtype).view(len(self.counts), self.most, *t.shape[1:])

    def rows_of_choice(self, y: Tensor, choice: int) -> Tensor:
        """``[tokens, ...]``: the row of `y` ``[experts, most, ...]`` for each token's expert number `choice`.

        Any row for tokens whose expert is not local.
        """
        places = self.places[:, choice].clamp(max=self.rows - 1)
        return y.flatten(0, 1).index_select(0, places)


def batches_of(ids: Tensor, experts: int, most: int, of: int | None = None) -> ExpertMajorBatches:
    """Positions of the assignments `ids` ``[tokens, top_k]``; an expert's tokens are in ascending order.

    Args:
        ids: local expert ids; ids outside 0 to `experts` - 1 belong to no expert.
        most: rows per expert, at least the largest number of tokens that one can get.
        of: experts of the whole layer; None: `experts`.

    Example:
        >>> batches = batches_of(torch.tensor([[0, 1], [1, -1]]), experts=2, most=2)
        >>> batches.counts.tolist(), batches.places.tolist()
        ([1, 2], [[0, 2], [3, 4]])
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
    expected = -(-ids.numel() // (of or experts))
    return ExpertMajorBatches(places.view(ids.shape), counts[:experts].to(torch.int32), most, expected)

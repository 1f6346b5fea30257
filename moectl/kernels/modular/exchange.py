"""Dispatch and combine between ranks: gathering tokens, and returning sums to the tokens' ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError

# Newer versions of torch have these under other names, and warn about the old ones.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exchange(Protocol):
    """Communication of ranks before and after their experts. Keeps no state of a call."""

    @property
    def name(self) -> str:
        """Its name in sentences."""

    @property
    def ranks(self) -> int:
        """How many ranks' tokens the experts of one rank see."""

    @property
    def capturable(self) -> bool:
        """True when a call never waits for the GPU, and can be captured in a CUDA graph."""

    def rows_to_send(self, rows: int, device: torch.device) -> int:
        """Rows that every rank sends in a call in which this rank has `rows` tokens."""

    def gather(self, t: Tensor, sent: int, fill: int) -> Tensor:
        """``[ranks * sent, ...]``: `t` of every rank in rank order, each padded with rows of `fill`."""

    def combine(self, y: Tensor, rows: int) -> Tensor:
        """``[rows, ...]``: this rank's rows of the sum over ranks of `y` ``[ranks * sent, ...]``."""

    def range_over_ranks(self, number: Tensor) -> tuple[float, float]:
        """Minimum and maximum of the one-element `number` over the ranks that see each other's tokens."""


@dataclass(frozen=True)
class SingleRankExchange:
    """One rank: nothing is communicated."""

    name: str = "none"
    ranks: int = 1
    capturable: bool = True

    def rows_to_send(self, rows: int, device: torch.device) -> int:
        return rows

    def gather(self, t: Tensor, sent: int, fill: int) -> Tensor:
        return t

    def combine(self, y: Tensor, rows: int) -> Tensor:
        return y

    def range_over_ranks(self, number: Tensor) -> tuple[float, float]:
        return float(number), float(number)


@dataclass(frozen=True)
class ReplicatedExchange:
    """Tensor-parallel ranks with the same tokens, each with a shard of the layer: outputs are summed.

    Attributes:
        group: the process group of the ranks.
    """

    group: dist.ProcessGroup
    name: str = "all-reduce"
    ranks: int = 1
    capturable: bool = True

    def rows_to_send(self, rows: int, device: torch.device) -> int:
        return rows

    def gather(self, t: Tensor, sent: int, fill: int) -> Tensor:
        return t

    def combine(self, y: Tensor, rows: int) -> Tensor:
        y = y.contiguous()
        dist.all_reduce(y, group=self.group)
        return y

    def range_over_ranks(self, number: Tensor) -> tuple[float, float]:
        return float(number), float(number)


@dataclass(frozen=True)
class GatheringExchange:
    """Ranks with different tokens: every rank computes its shard for all tokens (naive DP/EP).

    All-gather before the experts, reduce-scatter after them. Collectives need the same number of rows from
    every rank, so ranks with fewer tokens pad with rows that belong to no expert.

    Attributes:
        group: the process group of the ranks.
        most: rows that every rank sends, and so the most tokens that one may have; calls can be captured.
            With None, each call first gathers the number of tokens of every rank, which waits for the device.
    """

    group: dist.ProcessGroup
    most: int | None = None
    name: str = "all-gather and reduce-scatter"
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", dist.get_world_size(self.group))

    @property
    def capturable(self) -> bool:
        return self.most is not None

    def rows_to_send(self, rows: int, device: torch.device) -> int:
        """UsageError when this rank has more tokens than it may."""
        if self.most is not None:
            if rows > self.most:
                raise UsageError(
                    f"a rank may have {self.most} tokens, this one got {rows}",
                    hint="build the kernel with a larger most_tokens",
                )
            return self.most
        counts = torch.empty(self.ranks, dtype=torch.int64, device=device)
        _gather_into(counts, torch.full((1,), rows, dtype=torch.int64, device=device), group=self.group)
        return int(counts.max())

    def gather(self, t: Tensor, sent: int, fill: int) -> Tensor:
        # Collectives do not support 8-bit floats, so they are moved as bytes.
        moved = as_bytes(t)
        if len(t) < sent:
            moved = torch.cat((moved, moved.new_full((sent - len(t), *t.shape[1:]), fill)))
        out = moved.new_empty(self.ranks * sent, *t.shape[1:])
        _gather_into(out, moved.contiguous(), group=self.group)
        return out.view(t.dtype)

    def combine(self, y: Tensor, rows: int) -> Tensor:
        out = y.new_empty(len(y) // self.ranks, *y.shape[1:])
        _scatter_sums(out, y.contiguous(), group=self.group)
        return out[:rows]

    def range_over_ranks(self, number: Tensor) -> tuple[float, float]:
        numbers = number.float().new_empty(self.ranks)
        _gather_into(numbers, number.float().reshape(1).contiguous(), group=self.group)
        return float(numbers.min()), float(numbers.max())


def as_bytes(t: Tensor) -> Tensor:
    """`t` viewed as uint8 if its elements have 8 bits, else `t` itself."""
    return t.view(torch.uint8) if t.element_size() == 1 else t

"""Bytes that torch's operators ask for while something runs, counted as they come and go."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts storages that operators make under it, as long as a tensor of each lives."""

    def __init__(self, known: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.others = {place_of(t) for t in known}
        self.tensors: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes():
                self._seen(t)
        return out

    def _seen(self, t: Tensor) -> None:
        place = place_of(t)
        if place in self.others:
            return
        if not self.tensors[place]:
            self.sizes[place] = t.untyped_storage().nbytes()
            self.now += self.sizes[place]
            self.peak = max(self.peak, self.now)
        self.tensors[place] += 1
        weakref.finalize(t, self._gone, place)

    def _gone(self, place: int) -> None:
        self.tensors[place] -= 1
        if not self.tensors[place]:
            self.now -= self.sizes[place]


def place_of(t: Tensor) -> int:
    """A number of the tensor's storage, which others have only when it is gone."""
    return int(t.untyped_storage()._cdata)


def asked_for(call: Callable[[], Tensor], *arguments: Tensor) -> int:
    """Most bytes at a time that `call` asks for beside `arguments` and its result."""
    with torch.no_grad(), Meter(arguments) as meter:
        y = call()
    return meter.peak - y.untyped_storage().nbytes()

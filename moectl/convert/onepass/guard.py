"""Checks of new numbers on the GPU that passes wait for there, so that the host need not wait before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cuda_pass import MAX_INDEX, first_start, start_form

BLOCK = 8192
"""Numbers that a program examines."""

MOST = 1 << 16
"""Beyond all numbers."""

_COMPILED: dict[object, Any] = {}
"""Compiled forms of the kernel, by what they depend on."""


@dataclass(frozen=True)
class NumberCheck:
    """What numbers may be, of whose bits those of `mask` count: 0, or `least` to `stop - 1`."""

    mask: int
    least: int
    stop: int


def _examine(t: Tensor, found: Tensor, at: int, check: NumberCheck) -> None:
    numbers = t.view(-1).view(torch.uint8 if check.mask <= 0xFF else torch.int16)
    count, programs = numbers.numel(), -(-numbers.numel() // BLOCK)
    key = t.device, numbers.dtype, numbers.data_ptr() % 16, check.mask, count >= MAX_INDEX
    arguments = numbers, found, count, at, check.least, check.stop
    form = _COMPILED.get(key)
    if form is not None:
        start_form(form, programs, *arguments, None, None, None)
        return
    from ._cuda_kernels import _examine_kernel

    constants = {"MASK": check.mask, "MOST": MOST, "BLOCK": BLOCK}
    _COMPILED[key] = first_start(_examine_kernel, programs, *arguments, **constants)


class Guard:
    """Examines tensors, and holds on the GPU whether one of their numbers is refused.

    `refused` is what passes take as their argument of this name. Nothing is waited for before `wait`.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        """For up to `most` tensors on `device`."""
        self.most, self._examined = most, 0
        self._on_gpu = device.type == "cuda"
        # Whether any is refused; then for each tensor MOST less its least number above 0, and its largest.
        self._found = torch.zeros(1 + 2 * most, dtype=torch.int32, device=device)
        self.refused = self._found[:1]
        self._host = torch.empty(1 + 2 * most, dtype=torch.int32, pin_memory=self._on_gpu)
        self._sent: Any = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._read: Any = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]

    def examine(self, tensors: Sequence[tuple[Tensor, NumberCheck]]) -> None:
        """Queues the examination of contiguous numbers of 8 or 16 bits, and the copy of what it finds."""
        if self._read is not None:
            # Passes of the update before, perhaps on another stream, still ask whether that one is refused.
            torch.cuda.current_stream().wait_event(self._read)
        self._found.zero_()
        self._examined = len(tensors)
        for i, (t, check) in enumerate(tensors):
            _examine(t, self._found, 1 + 2 * i, check)
        self._host.copy_(self._found, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def read(self) -> None:
        """Says that the last pass that asks for `refused` is queued on the current stream."""
        if self._read is not None:
            self._read.record()

    def close(self) -> None:
        """Waits until no pass asks for `refused` any more."""
        if self._read is not None:
            self._read.synchronize()

    def wait(self) -> list[tuple[int, int]] | None:
        """The least number above 0 and the largest of each tensor; None if one is refused.

        The least is beyond the largest where all are 0.
        """
        if self._sent is not None:
            self._sent.synchronize()
        refused, *bounds = self._host[: 1 + 2 * self._examined].tolist()
        return (
            None
            if refused
            else [(MOST - low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True)]
        )

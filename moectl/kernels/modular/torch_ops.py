"""Layer kernels as torch operators, opaque to torch.compile, which does not trace the layer's tensors.

An operator looks a kernel up by its handle, a number. Handles are never reused, so that compiled code of a
kernel that has been deleted fails instead of running another layer.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...errors import UsageError


class RegisteredKernel(Protocol):
    """A kernel that operators can call."""

    def call(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...

    def call_monolithic(self, x: Tensor, logits: Tensor, correction_bias: Tensor | None) -> Tensor: ...


_numbers = itertools.count(1)
_kernels: WeakValueDictionary[int, Any] = WeakValueDictionary()
_lock = threading.Lock()


def handle_of(kernel: RegisteredKernel) -> int:
    """A new handle of `kernel`, which is only weakly referenced."""
    with _lock:
        handle = next(_numbers)
        _kernels[handle] = kernel
    return handle


def kernel_at(handle: int) -> RegisteredKernel:
    """The kernel of a handle; UsageError when it is gone."""
    kernel: RegisteredKernel | None = _kernels.get(int(handle))
    if kernel is None:
        raise UsageError(
            f"there is no layer kernel {handle} any more",
            hint="keep the kernel for as long as compiled code or graphs call it",
        )
    return kernel


@torch.library.custom_op(
    "moectl::fused_moe",
    mutates_args=(),
    schema="(Tensor x, Tensor ids, Tensor weights, SymInt kernel, ScalarType dtype) -> Tensor",
)
def fused_moe(x: Tensor, ids: Tensor, weights: Tensor, kernel: int, dtype: torch.dtype) -> Tensor:
    """`FusedMoEKernel.apply` of the kernel with this handle; `dtype` is its result's."""
    return kernel_at(kernel).call(x, ids, weights)


@torch.library.custom_op(
    "moectl::fused_moe_logits",
    mutates_args=(),
    schema="(Tensor x, Tensor logits, Tensor? correction_bias, SymInt kernel, ScalarType dtype) -> Tensor",
)
def fused_moe_logits(
    x: Tensor, logits: Tensor, correction_bias: Tensor | None, kernel: int, dtype: torch.dtype
) -> Tensor:
    """`FusedMoEKernel.apply_monolithic` of the kernel with this handle; `dtype` is its result's."""
    return kernel_at(kernel).call_monolithic(x, logits, correction_bias)


@fused_moe.register_fake
def _like_tokens(x: Tensor, ids: Tensor, weights: Tensor, kernel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@fused_moe_logits.register_fake
def _like_routed_tokens(
    x: Tensor, logits: Tensor, correction_bias: Tensor | None, kernel: int, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

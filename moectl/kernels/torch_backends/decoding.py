"""Shared by the backends in plain torch: supported devices, and decoding experts in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...capabilities.own_kernels import TORCH_PLATFORMS
from ...problem.moe_problem import MoEProblem
from ..activation import unknown
from ..prepared_layer import DenseExpert, PreparedMoE

DECODE_BYTES = 512 << 20
"""Bound on the bytes of fp32 experts that are decoded at a time; a single expert may be larger."""

DEVICES = sorted(set(TORCH_PLATFORMS.values()))


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why plain torch cannot run `problem` on `device`, a clause; empty when it can."""
    if device.type not in DEVICES:
        return f"it runs on {', '.join(DEVICES)}, the weights are on {device.type}"
    return unknown(problem.activation)


def decoded(prepared: PreparedMoE, experts: Sequence[int]) -> Iterator[tuple[int, DenseExpert]]:
    """`experts` in their order with fp32 matrices, decoded `DECODE_BYTES` at a time."""
    dims = prepared.problem.dims
    step = max(1, DECODE_BYTES // (3 * dims.hidden * dims.intermediate * 4))
    for first in range(0, len(experts), step):
        batch = list(experts[first : first + step])
        dense = prepared.dense(batch)
        yield from ((expert, dense[i]) for i, expert in enumerate(batch))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with x's dtype for the operands and fp32 for the result."""
    y = (x @ weight.to(x.dtype).T).float()
    return y if bias is None else y + bias.float()

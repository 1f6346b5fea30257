"""Calibration activations of a layer, and the Hessians that quantizers need for both matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...problem.schemes import WeightFormat
from ..codecs import decode_role
from ..quantize.calibration import Calibration, hessian, intermediate
from ..steps.value_steps import Tensors

Activate = Callable[[Tensor], Tensor]
"""The first matrix's outputs, gate rows then up rows or in pairs as the output has them, to the second's
inputs."""


@dataclass(frozen=True)
class Activations:
    """Calibration activations of one layer.

    Attributes:
        file: where they come from.
        activate: as `Activate`.
        layer: its number.
        hidden: size of the activations.
    """

    file: Calibration
    activate: Activate
    layer: int
    hidden: int

    def hessians(self, batch: Tensors, role: str, first: int, source: WeightFormat, halves: int) -> Tensor:
        """``[e, k, k]`` float32 for the matrices `role` of a batch whose first expert is `first`.

        The second matrix's inputs come from the first one as it is in `source`, with `halves` in its rows.
        """
        experts = range(len(batch[role]))
        seen = [self.file.tokens(self.layer, first + i, self.hidden) for i in experts]
        device = batch[role].device
        if role == "w13":
            return torch.stack([hessian(x.to(device)) for x in seen])
        w13 = decode_role(source, batch, "w13", halves)
        bias = batch.get("w13_bias")
        inputs = (
            intermediate(x.to(device), w13[i], self.activate, None if bias is None else bias[i])
            for i, x in enumerate(seen)
        )
        return torch.stack([hessian(x) for x in inputs])

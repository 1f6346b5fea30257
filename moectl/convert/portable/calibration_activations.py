"""Calibration activations of a layer, and the Hessians of both matrices that quantizers need."""

from __future__ import annotations

from dataclasses import dataclass

from ...lazy_torch import Tensor, torch
from ...problem.schemes import WeightFormat
from ..codecs import decode_role
from ..quantize.calibration import Activate, Calibration, hessian, intermediate
from ..steps.value_steps import Tensors


@dataclass(frozen=True)
class Activations:
    """Calibration activations of one layer.

    Attributes:
        calibration: the file that they are read from.
        activate: the experts' activation function.
        layer: number of the layer.
        hidden: size of the activations.
    """

    calibration: Calibration
    activate: Activate
    layer: int
    hidden: int

    def hessians(self, batch: Tensors, role: str, first: int, source: WeightFormat, halves: int) -> Tensor:
        """``[e, k, k]`` fp32 Hessians of the matrices `role` of a batch whose first expert is `first`.

        The inputs of the second matrix are computed from the first one, in the format `source` with `halves`
        equal parts of its rows.
        """
        experts = range(len(batch[role]))
        tokens = [self.calibration.tokens(self.layer, first + i, self.hidden) for i in experts]
        device = batch[role].device
        if role == "w13":
            return torch.stack([hessian(x.to(device)) for x in tokens])
        w13 = decode_role(source, batch, "w13", halves)
        bias = batch.get("w13_bias")
        inputs = (
            intermediate(x.to(device), w13[i], self.activate, None if bias is None else bias[i])
            for i, x in enumerate(tokens)
        )
        return torch.stack([hessian(x) for x in inputs])

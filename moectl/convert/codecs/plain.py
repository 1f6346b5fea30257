"""16-bit weights: the codes are the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...problem.schemes import WeightFormat
from .codec import Encoded, check_weights


@dataclass(frozen=True)
class Plain:
    """Weights stored as they are; encoding rounds to bfloat16."""

    weight: WeightFormat

    def decode(
        self,
        codes: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Tensor:
        """``[e, n, k]`` float32, exact, from bfloat16 or float16 (or float32) `codes` ``[e, n, k]``."""
        if not codes.is_floating_point() or any(t is not None for t in (scale, zero, global_scale)):
            raise CheckpointError(f"{self.weight} is floats without scales, got {codes.dtype}.")
        return codes.float()

    def encode(self, weights: Tensor) -> Encoded:
        """Finite `weights` ``[e, n, k]`` to the nearest bfloat16; what rounds beyond it saturates."""
        check_weights(weights)
        limit = torch.finfo(torch.bfloat16).max
        return Encoded(weights.float().clamp(-limit, limit).to(torch.bfloat16))

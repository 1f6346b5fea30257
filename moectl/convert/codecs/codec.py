"""What a codec is: the one judge of what stored codes and scales mean."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError

E8M0_NAN = 255


class Codec(Protocol):
    """Codes and scales to real weights, and back."""

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """The weights ``[e, n, k]`` float32 that canonical `codes` and `scale` stand for."""

    def encode(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Canonical codes and scales nearest to float32 `weights` ``[e, n, k]``."""


def check_scales(scale: Tensor) -> None:
    """Raises CheckpointError when a scale is not a number: E8M0 byte 255, or a float NaN or infinity.

    `scale` is a canonical scale tensor, experts first: uint8 holds E8M0 bytes.
    """
    if scale.dtype is torch.uint8:
        bad, what = scale == E8M0_NAN, "E8M0 byte 255"
    else:
        bad, what = ~torch.isfinite(scale), "NaN or infinity"
    count = int(bad.sum())
    if count:
        expert = int(bad.flatten(1).any(1).nonzero()[0])
        raise CheckpointError(
            f"{count} of {scale.numel()} scales are not numbers ({what}), first in expert {expert}.",
            hint="Fetch the checkpoint again; its weights would give NaN.",
        )


def check_weights(weights: Tensor) -> None:
    """Raises CheckpointError when a weight to be encoded is NaN or infinite, or is not ``[e, n, k]``."""
    if weights.ndim != 3:
        raise CheckpointError(
            f"weights to encode must be [experts, rows, columns], got {list(weights.shape)}."
        )
    count = int((~torch.isfinite(weights)).sum())
    if count:
        raise CheckpointError(f"{count} of {weights.numel()} weights to encode are NaN or infinite.")


def low_nibbles_first(codes: Tensor) -> Tensor:
    """One 4-bit code to a byte ``[..., 2 m]`` from bytes of two ``[..., m]``."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def two_to_a_byte(codes: Tensor) -> Tensor:
    """Bytes of two ``[..., m]`` from one 4-bit code to a byte ``[..., 2 m]``, even ones in low nibbles."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def per_group(weights: Tensor, groups: int) -> Tensor:
    """``[e, n, k]`` as ``[e, n, groups, k / groups]``; CheckpointError when groups are not whole."""
    e, n, k = weights.shape
    if groups == 0 or k % groups:
        raise CheckpointError(f"{k} weights a row do not make {groups} groups of one size.")
    return weights.reshape(e, n, groups, k // groups)

"""What a codec is: the one judge of what stored codes and scales mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from .scales import E8M0_NAN


class Encoded(NamedTuple):
    """One matrix of a batch of experts, in canonical tensors.

    Attributes:
        codes: uint8 ``[e, n, k * bits / 8]``, 4-bit codes two to a byte; 16-bit formats: the weights.
        scale: ``[e, block rows, block columns]``: uint8 (E8M0 or E4M3) or float.
        zero: uint8 ``[e, n, g]``: the unpacked code of zero, for integers that are not symmetric.
        global_scale: float32 ``[e, h, 1]``: a factor for each of h equal parts of the rows (NVFP4).
    """

    codes: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    global_scale: Tensor | None = None

    def roles(self, role: str) -> dict[str, Tensor]:
        """The tensors by canonical role: ``w13``, ``w13_scale``, ..."""
        named = ((f"{role}{suffix}", getattr(self, part)) for part, suffix in SUFFIXES.items())
        return {name: tensor for name, tensor in named if tensor is not None}

    @classmethod
    def of(cls, roles: Mapping[str, Tensor], role: str) -> Encoded:
        """The matrix `role` among the canonical `roles` of a batch of experts."""
        if role not in roles:
            raise CheckpointError(f"role {role} is missing; there are {', '.join(sorted(roles))}.")
        return cls(**{part: roles[f"{role}{s}"] for part, s in SUFFIXES.items() if f"{role}{s}" in roles})


SUFFIXES: Mapping[str, str] = {"codes": "", "scale": "_scale", "zero": "_zero", "global_scale": "_global"}
"""What a canonical role adds to its matrix's name, by the field of `Encoded`."""


class Codec(Protocol):
    """Codes and scales to real weights, and back."""

    def decode(
        self,
        codes: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Tensor:
        """The weights ``[e, n, k]`` float32 that the canonical tensors stand for."""

    def encode(self, weights: Tensor) -> Encoded:
        """Canonical tensors for finite `weights` ``[e, n, k]``: the usual scale, rounding to nearest."""


def in_halves(encoded: Encoded, halves: int) -> Encoded:
    """The `halves` equal parts of the rows of each expert as matrices of their own, ``[e * halves, ...]``.

    A tensor with a single row of scales holds for every part.
    """
    return _each(encoded, lambda t: _apart(t, halves))


def from_halves(encoded: Encoded, halves: int) -> Encoded:
    """The inverse of `in_halves`: rows of an expert's parts one after the other."""
    return _each(encoded, lambda t: t.reshape(-1, halves * t.shape[1], *t.shape[2:]))


def _each(encoded: Encoded, change: Callable[[Tensor], Tensor]) -> Encoded:
    return Encoded(change(encoded.codes), *(t if t is None else change(t) for t in encoded[1:]))


def _apart(t: Tensor, halves: int) -> Tensor:
    if t.shape[1] == 1:
        t = t.expand(-1, halves, *t.shape[2:])
    if t.shape[1] % halves:
        raise CheckpointError(f"{t.shape[1]} rows of {list(t.shape)} do not make {halves} equal parts.")
    return t.reshape(-1, t.shape[1] // halves, *t.shape[2:])


def check_scales(scale: Tensor, dtype: str = "E8M0") -> None:
    """Raises CheckpointError when a scale is not a number: an E8M0 or E4M3 NaN, or a float NaN or infinity.

    `scale` is a canonical scale tensor, experts first; `dtype` says what bytes (uint8) are: E8M0, or
    F8_E4M3.
    """
    if _all_numbers(scale, dtype):
        return
    if scale.dtype is not torch.uint8:
        bad, what = ~torch.isfinite(scale), "NaN or infinity"
    elif dtype == "F8_E4M3":
        bad, what = (scale & 0x7F) == 0x7F, "E4M3 NaN"
    else:
        bad, what = scale == E8M0_NAN, "E8M0 byte 255"
    count = int(bad.sum())
    if count:
        expert = int(bad.flatten(1).any(1).nonzero()[0])
        raise CheckpointError(
            f"{count} of {scale.numel()} scales are not numbers ({what}), first in expert {expert}.",
            hint="Fetch the checkpoint again; its weights would give NaN.",
        )


_EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
"""Floats as integers of their width, and the bits of the exponent that NaN and infinity have."""


def _all_numbers(scale: Tensor, dtype: str) -> bool:
    """True when a look that costs a hundredth of counting finds nothing; False says nothing."""
    if not scale.numel():
        return True
    if scale.dtype in _EXPONENTS:
        as_int, exponent = _EXPONENTS[scale.dtype]
        return int((scale.view(as_int) & torch.iinfo(as_int).max).max()) < exponent
    if scale.dtype is not torch.uint8:
        return False
    if dtype == "F8_E4M3":
        return int((scale & 0x7F).max()) != 0x7F
    return int(scale.max()) != E8M0_NAN


def check_weights(weights: Tensor) -> None:
    """Raises CheckpointError when a weight to be encoded is NaN or infinite, or is not ``[e, n, k]``."""
    if weights.ndim != 3 or not weights.is_floating_point():
        raise CheckpointError(
            f"weights to encode must be floats [experts, rows, columns], got {weights.dtype} "
            f"{list(weights.shape)}."
        )
    # A finite sum has finite terms: far cheaper than looking at every weight. It may overflow by itself.
    if not weights.numel() or bool(torch.isfinite(weights.sum())):
        return
    bad = ~torch.isfinite(weights.float())
    if bad.any():
        expert = int(bad.flatten(1).any(1).nonzero()[0])
        raise CheckpointError(
            f"{int(bad.sum())} of {weights.numel()} weights to encode are NaN or infinite, first in "
            f"expert {expert}.",
            hint="Fetch the checkpoint again, or leave the layer out.",
        )

"""Codecs: the single definition of the meaning of stored codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from ...errors import CheckpointError
from ...lazy_torch import Tensor, torch
from ...problem.schemes import WeightFormat
from .scales import E8M0_NAN


class Encoded(NamedTuple):
    """One matrix of a batch of experts as canonical tensors.

    Attributes:
        codes: uint8 ``[e, n, k * bits / 8]``, 4-bit codes packed in pairs; 16-bit formats: the weights.
        scale: ``[e, block rows, block columns]``: uint8 (E8M0 or E4M3) or float.
        zero: uint8 ``[e, n, g]``: unpacked zero points, for asymmetric integers.
        global_scale: float32 ``[e, h, 1]``: a factor for each of h equal parts of the rows (NVFP4).
    """

    codes: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    global_scale: Tensor | None = None

    def roles(self, role: str) -> dict[str, Tensor]:
        """The tensors by canonical role: ``w13``, ``w13_scale``, ..."""
        tensors = ((f"{role}{suffix}", getattr(self, field)) for field, suffix in SUFFIXES.items())
        return {name: tensor for name, tensor in tensors if tensor is not None}

    @classmethod
    def of(cls, roles: Mapping[str, Tensor], role: str) -> Encoded:
        """The matrix `role` among the canonical `roles` of a batch of experts."""
        if role not in roles:
            raise CheckpointError(f"role {role} is missing; there are {', '.join(sorted(roles))}.")
        return cls(**{field: roles[f"{role}{s}"] for field, s in SUFFIXES.items() if f"{role}{s}" in roles})


SUFFIXES: Mapping[str, str] = {"codes": "", "scale": "_scale", "zero": "_zero", "global_scale": "_global"}
"""Suffix that a canonical role adds to its matrix, by the field of `Encoded`."""


class Codec(Protocol):
    """Decodes codes and scales to real weights, and encodes weights."""

    def decode(
        self,
        codes: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Tensor:
        """The weights ``[e, n, k]`` float32 that the canonical tensors represent."""

    def encode(self, weights: Tensor) -> Encoded:
        """Canonical tensors of finite `weights` ``[e, n, k]``: the usual scales, rounding to nearest."""


def in_halves(encoded: Encoded, halves: int) -> Encoded:
    """The `halves` equal parts of the rows of each expert as separate matrices, ``[e * halves, ...]``.

    A single row of scales applies to every part.
    """
    return _each(encoded, lambda t: _split_rows(t, halves))


def from_halves(encoded: Encoded, halves: int) -> Encoded:
    """The inverse of `in_halves`: the rows of an expert's parts concatenated."""
    return _each(encoded, lambda t: t.reshape(-1, halves * t.shape[1], *t.shape[2:]))


def _each(encoded: Encoded, change: Callable[[Tensor], Tensor]) -> Encoded:
    return Encoded(change(encoded.codes), *(t if t is None else change(t) for t in encoded[1:]))


def _split_rows(t: Tensor, halves: int) -> Tensor:
    if t.shape[1] == 1:
        t = t.expand(-1, halves, *t.shape[2:])
    if t.shape[1] % halves:
        raise CheckpointError(f"{t.shape[1]} rows of {list(t.shape)} do not make {halves} equal parts.")
    return t.reshape(-1, t.shape[1] // halves, *t.shape[2:])


_NOT_NUMBERS = "Fetch the checkpoint again, or report it to its publisher: its outputs would be NaN."
"""Hint for weights and scales that are not numbers."""


def check_scales(scale: Tensor, dtype: str = "E8M0") -> None:
    """Raises CheckpointError when a scale is not a number: an E8M0 or E4M3 NaN, or a float NaN or infinity.

    `scale` is a canonical scale tensor, experts first; `dtype` is the format of uint8 scales, ``E8M0`` or
    ``F8_E4M3``.

    Example:
        >>> check_scales(torch.tensor([[[120, 127]]], dtype=torch.uint8))
        >>> check_scales(torch.tensor([[[120, 255]]], dtype=torch.uint8))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        moectl.errors.CheckpointError: 1 of 2 scales are not numbers (E8M0 byte 255), first in expert 0...
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
            hint=_NOT_NUMBERS,
        )


@cache
def _exponents() -> Mapping[torch.dtype, tuple[torch.dtype, int]]:
    """By float dtype: the integer dtype of its width, and the exponent bits of NaN and infinity."""
    return {
        torch.bfloat16: (torch.int16, 0x7F80),
        torch.float16: (torch.int16, 0x7C00),
        torch.float32: (torch.int32, 0x7F800000),
    }


def magnitude_bits(dtype: torch.dtype, kind: str) -> tuple[int, int, int] | None:
    """How scales of `dtype` are compared as integers, for bytes of `kind` (``E8M0``) and 16-bit floats.

    Returns the bits of the magnitude, the least of them that are no number, and the lowest bit of the
    exponent; None for scales of another kind.
    """
    if dtype is torch.uint8:
        return (0xFF, E8M0_NAN, 0) if kind == "E8M0" else None
    lowest = {torch.bfloat16: 7, torch.float16: 10}.get(dtype)
    return None if lowest is None else (0x7FFF, _exponents()[dtype][1], lowest)


def check_every_scale(scales: Sequence[Tensor], dtype: str = "E8M0") -> None:
    """`check_scales` of tensors on one device, which is waited for once if all are right."""
    largest = [_largest(scale, dtype) for scale in scales]
    numbers = [t.to(torch.int32) for t in largest if t is not None]
    sizes = iter(torch.stack(numbers).tolist() if numbers else ())
    for scale, number in zip(scales, largest, strict=True):
        if number is None or next(sizes) >= _least_bad(scale, dtype):
            check_scales(scale, dtype)


def _all_numbers(scale: Tensor, dtype: str) -> bool:
    """True when a check at 1% of the cost of counting rules out NaN and infinity; False is no proof."""
    if not scale.numel():
        return True
    largest = _largest(scale, dtype)
    return largest is not None and int(largest) < _least_bad(scale, dtype)


def _largest(scale: Tensor, dtype: str) -> Tensor | None:
    """The largest bits of `scale` without signs; None for dtypes in which they say nothing."""
    if not scale.numel():
        return scale.new_zeros((), dtype=torch.int32)
    if scale.dtype in _exponents():
        integer, _ = _exponents()[scale.dtype]
        return (scale.view(integer) & torch.iinfo(integer).max).max()
    if scale.dtype is not torch.uint8:
        return None
    return ((scale & 0x7F) if dtype == "F8_E4M3" else scale).max()


def _least_bad(scale: Tensor, dtype: str) -> int:
    """The least of the bits of `_largest` that are no number."""
    if scale.dtype in _exponents():
        return _exponents()[scale.dtype][1]
    return 0x7F if dtype == "F8_E4M3" else E8M0_NAN


def check_weights(weights: Tensor) -> None:
    """Raises CheckpointError when a weight to be encoded is NaN or infinite, or is not ``[e, n, k]``."""
    if weights.ndim != 3 or not weights.is_floating_point():
        raise CheckpointError(
            f"weights to encode must be floats [experts, rows, columns], got {weights.dtype} "
            f"{list(weights.shape)}."
        )
    # A finite sum has finite terms, at a fraction of the cost. An infinite one may only have overflowed.
    if not weights.numel() or bool(torch.isfinite(weights.sum())):
        return
    bad = ~torch.isfinite(weights.float())
    if bad.any():
        expert = int(bad.flatten(1).any(1).nonzero()[0])
        raise CheckpointError(
            f"{int(bad.sum())} of {weights.numel()} weights to encode are NaN or infinite, first in "
            f"expert {expert}.",
            hint=_NOT_NUMBERS,
        )


@dataclass(frozen=True)
class UnquantizedCodec:
    """16-bit weights: the codes are the weights. Encoding rounds to bfloat16."""

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
            raise CheckpointError(f"{self.weight} has floats without scales, got {codes.dtype}.")
        return codes.float()

    def encode(self, weights: Tensor) -> Encoded:
        """Finite `weights` ``[e, n, k]`` to the nearest bfloat16; what rounds beyond it saturates."""
        check_weights(weights)
        limit = torch.finfo(torch.bfloat16).max
        return Encoded(weights.float().clamp(-limit, limit).to(torch.bfloat16))

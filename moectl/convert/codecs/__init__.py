"""Codecs: the meaning of a weight format's codes and scales, defined by the codec's `decode`."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import UsageError
from ...lazy_torch import Tensor
from ...problem.number_formats import NUMBER_FORMATS
from ...problem.schemes import WeightFormat
from .codec import (
    Codec,
    Encoded,
    UnquantizedCodec,
    check_every_scale,
    check_scales,
    check_weights,
    from_halves,
    in_halves,
    magnitude_bits,
)
from .grids import GRIDS
from .scaled import Scaled
from .scales import E8M0_RULES, scale_store

__all__ = [
    "E8M0_RULES",
    "Codec",
    "Encoded",
    "Scaled",
    "check_every_scale",
    "check_scales",
    "check_weights",
    "codec_for",
    "decode_role",
    "from_halves",
    "in_halves",
    "magnitude_bits",
]


def codec_for(weight: WeightFormat, rule: str = "floor") -> Codec:
    """The codec of `weight`; UsageError for a format without one.

    `rule` is how encoding chooses power-of-two scales: one of `E8M0_RULES`.

    Example:
        >>> import torch
        >>> from moectl.problem.schemes import MXFP4
        >>> codec = codec_for(MXFP4)
        >>> encoded = codec.encode(torch.full((1, 1, 32), 3.0))
        >>> encoded.codes.shape, encoded.scale.tolist()
        (torch.Size([1, 1, 16]), [[[126]]])
        >>> codec.decode(*encoded)[0, 0, 0].item()
        3.0
    """
    number = NUMBER_FORMATS.get(weight.name)
    if number is None or (number.within_row and weight.block[0] != 1):
        by_row = sorted(name for name, entry in NUMBER_FORMATS.items() if entry.within_row)
        raise UsageError(
            f"no codec knows {weight}; known are {', '.join(NUMBER_FORMATS)}, "
            f"{', '.join(by_row)} in groups along a row."
        )
    if rule not in E8M0_RULES:
        raise UsageError(f"no rule for scales is called {rule!r}; choose one of {', '.join(E8M0_RULES)}.")
    if not number.scale:
        return UnquantizedCodec(weight)
    store = scale_store(weight, number.scale, rule)
    return Scaled(weight, GRIDS[number.grid.name], store, two_level=number.global_scale)


def decode_role(weight: WeightFormat, roles: Mapping[str, Tensor], role: str, halves: int = 1) -> Tensor:
    """``[e, n, k]`` float32: the matrix `role` among canonical `roles` of a batch of experts.

    `halves` is 2 for ``w13`` with gate rows before up rows: blocks of several rows do not span the two. It
    makes no difference to formats whose blocks are within one row.
    """
    encoded = Encoded.of(roles, role)
    codec = codec_for(weight)
    if halves == 1 or weight.block[0] in (0, 1):
        return codec.decode(*encoded)
    decoded = codec.decode(*in_halves(encoded, halves))
    return decoded.reshape(-1, halves * decoded.shape[1], decoded.shape[2])

"""Codecs: what a weight format's codes and scales mean. A codec's decode is the one judge of its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ...errors import UsageError
from ...schemes import WeightFormat
from .codec import Codec, Encoded, check_scales, check_weights, from_halves, in_halves
from .grids import E2M1, E4M3, INT4, INT8
from .plain import Plain
from .scaled import Scaled
from .scales import E8M0_RULES, scale_store

__all__ = [
    "E8M0_RULES",
    "Codec",
    "Encoded",
    "Scaled",
    "check_scales",
    "check_weights",
    "codec_for",
    "decode_role",
    "from_halves",
    "in_halves",
]

CODECS: Mapping[str, Callable[[WeightFormat, str], Codec]] = {
    "bf16": lambda weight, rule: Plain(weight),
    "mxfp4": lambda weight, rule: Scaled(weight, E2M1, scale_store(weight, "E8M0", rule)),
    "mxfp8": lambda weight, rule: Scaled(weight, E4M3, scale_store(weight, "E8M0", rule)),
    "nvfp4": lambda weight, rule: Scaled(weight, E2M1, scale_store(weight, "F8_E4M3"), two_level=True),
    "fp8": lambda weight, rule: Scaled(weight, E4M3, scale_store(weight, "F32", rule)),
    "int4": lambda weight, rule: Scaled(weight, INT4, scale_store(weight, "BF16")),
    "int8": lambda weight, rule: Scaled(weight, INT8, scale_store(weight, "BF16")),
}
"""Codecs by the name of the weight format, from it and the rule for scales that are powers of two."""

BY_ROW_ONLY = frozenset({"mxfp4", "mxfp8", "nvfp4", "int4", "int8"})
"""Formats whose blocks lie within one row."""


def codec_for(weight: WeightFormat, rule: str = "floor") -> Codec:
    """The codec of `weight`; UsageError for a format without one.

    `rule` is how encoding chooses scales that are powers of two: one of `E8M0_RULES`.
    """
    if weight.name not in CODECS or (weight.name in BY_ROW_ONLY and weight.block[0] != 1):
        raise UsageError(
            f"no codec knows {weight}; known are {', '.join(CODECS)}, "
            f"{', '.join(sorted(BY_ROW_ONLY))} in groups along a row."
        )
    if rule not in E8M0_RULES:
        raise UsageError(f"no rule for scales is called {rule!r}; choose one of {', '.join(E8M0_RULES)}.")
    return CODECS[weight.name](weight, rule)


def decode_role(weight: WeightFormat, roles: Mapping[str, Tensor], role: str, halves: int = 1) -> Tensor:
    """``[e, n, k]`` float32: the matrix `role` among canonical `roles` of a batch of experts.

    `halves` is 2 for ``w13`` of gate rows, then up rows: blocks of several rows begin anew with the up
    rows. It makes no difference to formats whose blocks lie within one row.
    """
    encoded = Encoded.of(roles, role)
    codec = codec_for(weight)
    if halves == 1 or weight.block[0] in (0, 1):
        return codec.decode(*encoded)
    decoded = codec.decode(*in_halves(encoded, halves))
    return decoded.reshape(-1, halves * decoded.shape[1], decoded.shape[2])

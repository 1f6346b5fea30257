"""Codecs: what a weight format's codes and scales mean. A codec's decode is the one judge of its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import UsageError
from ...schemes import WeightFormat
from .codec import Codec, check_scales
from .mxfp4 import Mxfp4
from .packed_int import PackedInt

__all__ = ["Codec", "check_scales", "codec_for"]

CODECS: Mapping[str, Callable[[WeightFormat], Codec]] = {
    "mxfp4": lambda weight: Mxfp4(),
    "int4": PackedInt,
    "int8": PackedInt,
}
"""Codecs by the name of the weight format."""


def codec_for(weight: WeightFormat) -> Codec:
    """The codec of `weight`; UsageError for a format without one."""
    if weight.name not in CODECS or weight.block[0] != 1:
        raise UsageError(f"no codec knows {weight}; known are {', '.join(CODECS)} in groups along a row.")
    return CODECS[weight.name](weight)

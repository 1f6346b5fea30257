"""Keys of number formats, as coarse as the engine that compares them."""

from __future__ import annotations

from functools import cache

from ..problem.schemes import FULL, ActFormat, WeightFormat


@cache
def act_key(act: ActFormat) -> str:
    """Key of an activation format, as in `FormatSupport`: ``a16``, ``fp8 per tensor static``, ``mxfp8``."""
    if act.bits == 16 or act.number.block:
        return act.name
    extent = {(FULL, FULL): "per tensor", (1, FULL): "per token"}.get(act.block, f"group {act.block[1]}")
    return f"{act.name} {extent} {'dynamic' if act.dynamic else 'static'}"


@cache
def exact_key(weight: WeightFormat) -> str:
    """Key of a weight format, as in `FormatSupport`: ``mxfp4 group 32``, ``int4 group 128``."""
    return str(weight)


@cache
def group32_key(weight: WeightFormat) -> str:
    """As `exact_key`, but for integers all groups except int4 group 32 have one key."""
    if not weight.number.grid.integer:
        return str(weight)
    group = "group 32" if (weight.bits, weight.group) == (4, 32) else "group"
    return f"{weight.name} {group}{' with zero points' if weight.zero_point else ''}"


@cache
def symmetric_group32_key(weight: WeightFormat) -> str:
    """As `group32_key`, for methods that declare symmetric weights and pass zero points separately."""
    return group32_key(weight).removesuffix(" with zero points")


@cache
def symmetric_group_key(weight: WeightFormat) -> str:
    """As `symmetric_group32_key`, but with one key for all groups."""
    return symmetric_group32_key(weight).removesuffix(" 32")

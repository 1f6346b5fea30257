"""Number formats as an engine compares them: short names, as coarse as the engine's own."""

from __future__ import annotations

from functools import cache

from ..problem.schemes import FULL, ActFormat, WeightFormat


@cache
def act_key(act: ActFormat) -> str:
    """An activation format as rows of `Offer` name it: ``a16``, ``fp8 per tensor static``, ``mxfp8``."""
    if act.bits == 16 or act.number.block:
        return act.name
    extent = {(FULL, FULL): "per tensor", (1, FULL): "per token"}.get(act.block, f"group {act.block[1]}")
    return f"{act.name} {extent} {'dynamic' if act.dynamic else 'static'}"


@cache
def exact_key(weight: WeightFormat) -> str:
    """A weight format as rows of `Offer` name it: ``mxfp4 group 32``, ``int4 group 128``."""
    return str(weight)


@cache
def group32_key(weight: WeightFormat) -> str:
    """As `exact_key`, but integer formats tell only group 32 from every other group or channel."""
    if not weight.number.grid.integer:
        return str(weight)
    group = "group 32" if (weight.bits, weight.group) == (4, 32) else "group"
    return f"{weight.name} {group}{' with zero points' if weight.zero_point else ''}"


@cache
def symmetric_group32_key(weight: WeightFormat) -> str:
    """As `group32_key`, for methods that declare their weights symmetric and carry zero points apart."""
    return group32_key(weight).removesuffix(" with zero points")


@cache
def symmetric_group_key(weight: WeightFormat) -> str:
    """As `symmetric_group32_key`, for methods that do not tell group 32 apart either."""
    return symmetric_group32_key(weight).removesuffix(" 32")

"""Marlin: weight-only quantization on every CUDA GPU since Turing."""

from math import lcm

from ...problem import Align
from ...schemes import FULL
from ..backend import (
    NO_TWO_SIDED_EXCHANGE,
    XPU,
    Ask,
    Backend,
    Capability,
    Choice,
    Offer,
    Rounding,
    Rule,
    Variant,
    but,
    sm,
)
from .activations import SHARED

GROUPS = (FULL, 32, 64, 128)
TILE = 64
"""Granularity of the intermediate size in the kernel's thread tiles."""
HIDDEN = 128
INTEGERS = frozenset({"int4", "int8"})


def shape_fits(ask: Ask) -> bool:
    """True when the integer kernels take the sizes of one rank; other formats have no such rule.

    The hidden size is never padded. The intermediate size is, up to `TILE`, where the method pads
    weights; scale groups must not cross ranks either way.
    """
    weight, dims = ask.problem.scheme.weight, ask.problem.dims
    if weight.name not in INTEGERS:
        return True
    group = weight.group
    step = max(group, 1) if ask.pads_tiles else max(TILE, group)
    return dims.hidden % HIDDEN == 0 and dims.intermediate % step == 0 and group in GROUPS


def prepared_intermediate(intermediate: int, group: int) -> int:
    """The intermediate size after integer weights are padded to tiles and whole groups."""
    step = lcm(TILE, max(group, 1))
    return -(-intermediate // step) * step


def _sizes(ask: Ask) -> str:
    dims, weight = ask.problem.dims, ask.problem.scheme.weight
    return f"hidden {dims.hidden}, intermediate {dims.intermediate} per rank, {weight}"


SHAPE = Rule(
    question="Marlin tiles",
    group="shape",
    vllm_code="marlin_shape",
    holds=shape_fits,
    wanted=_sizes,
    offered=f"hidden a multiple of {HIDDEN}, group 32, 64, 128 or per channel, intermediate in whole groups",
)

_WEIGHTS = frozenset(
    {
        "fp8 block 128x128",
        "fp8 per channel",
        "fp8 per tensor",
        "mxfp4 group 32",
        "mxfp8 group 32",
        "nvfp4 group 16",
        "int4 group",
        "int8 group",
        "int4 group 32",
        "int4 group with zero points",
        "int4 group 32 with zero points",
    }
)
_CAPABILITY = Capability(
    arch=(sm(75),),
    offers=(Offer(_WEIGHTS, acts=Choice()),),
    activations=SHARED,
    spread=NO_TWO_SIDED_EXCHANGE,
    checkpoints=but("moe_wna16"),
    rules=(SHAPE,),
)
_ROUNDING = (
    Rounding(Align(128, 128), where=(XPU,), weights=frozenset({"mxfp4"})),
    Rounding(Align(256, 128), weights=frozenset({"mxfp4"})),
)

MARLIN = Backend(
    name="marlin",
    engine_name="MARLIN",
    variants=(Variant("MarlinExperts", _CAPABILITY),),
    rounding=_ROUNDING,
    layout="marlin",
)
BATCHED_MARLIN = Backend(
    name="batched_marlin",
    engine_name="BATCHED_MARLIN",
    variants=(Variant("BatchedMarlinExperts", _CAPABILITY, batched=True),),
    rounding=_ROUNDING,
    layout="marlin",
)

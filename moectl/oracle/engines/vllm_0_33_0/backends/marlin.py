"""Marlin: weight-only quantization on every CUDA GPU since Turing."""

from dataclasses import replace

from .....problem.moe_problem import Align
from .....problem.padding import padding
from .....problem.schemes import FULL, MXFP4
from ....backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    NameSet,
    SupportQuery,
    WeightForm,
    but,
)
from ....gpu_archs import XPU, sm
from .defaults import NO_TWO_SIDED_EXCHANGE, SHARED

GROUPS = (FULL, 32, 64, 128)
TILE = 64
"""Granularity of the intermediate size in the kernel's thread tiles."""
HIDDEN = 128
INTEGERS = frozenset({"int4", "int8"})


def shape_fits(ask: SupportQuery) -> bool:
    """True when the integer kernels support the sizes of one rank; other formats have no such rule.

    The hidden size is never padded. The intermediate size is, up to `TILE`, where the method pads
    weights; scale groups must not cross ranks either way. On ROCm the engine rejects every size.
    """
    return not _misfits(ask)


def _misfits(ask: SupportQuery) -> list[str]:
    """What the sizes of one rank would have to be, and are not."""
    weight, dims, misfits = ask.problem.scheme.weight, ask.problem.dims, list[str]()
    if weight.name not in INTEGERS:
        return misfits
    if ask.device.platform == "rocm":
        return ["a CUDA device"]
    group = weight.group
    step = max(group, 1) if ask.pads_tiles else max(TILE, group)
    if dims.hidden % HIDDEN:
        misfits.append(f"a hidden size that {HIDDEN} divides; it is {dims.hidden}")
    if group not in GROUPS:
        misfits.append(f"group 32, 64, 128 or per channel; it is {group}")
    if dims.intermediate % step:
        of = f"{step} (the group)" if step == group else str(step)
        misfits.append(f"an intermediate size that {of} divides; it is {dims.intermediate} per rank")
    return misfits


SHAPE = BackendRule(
    question="Marlin tiles",
    group="shape",
    code="marlin_shape",
    holds=shape_fits,
    wanted=lambda ask: ", and ".join(_misfits(ask)) or "sizes that its tiles divide",
    offered="what its tiles divide",
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
    formats=(FormatSupport(_WEIGHTS, acts=NameSet()),),
    activations=SHARED,
    parallel=NO_TWO_SIDED_EXCHANGE,
    checkpoints=but("moe_wna16", "quark_int4"),
    rules=(SHAPE,),
)
_FORMS = (
    WeightForm("marlin-mxfp4", Align(128, 128), where=(XPU,), weights=frozenset({"mxfp4"})),
    WeightForm("marlin-mxfp4", padding("marlin-mxfp4", MXFP4), weights=frozenset({"mxfp4"})),
    # Other weights are padded to the layout's tiles only when they are repacked.
    WeightForm("marlin-int4", weights=frozenset({"int4"})),
    WeightForm("marlin-int8", weights=frozenset({"int8"})),
    *(WeightForm(f"marlin-{name}", weights=frozenset({name})) for name in ("fp8", "nvfp4", "mxfp8")),
    WeightForm("marlin"),
)

MARLIN = Backend(
    name="marlin",
    engine_name="MARLIN",
    variants=(ExpertsClass("MarlinExperts", replace(_CAPABILITY, lora=True)),),
    forms=_FORMS,
)
BATCHED_MARLIN = Backend(
    name="batched_marlin",
    engine_name="BATCHED_MARLIN",
    variants=(ExpertsClass("BatchedMarlinExperts", _CAPABILITY, batched=True),),
    forms=_FORMS,
)

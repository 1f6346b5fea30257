"""The registry of weight layouts, and how a target and a scheme choose one.

Public here: `Chain`, `WeightLayout`, `LAYOUTS`, `layout_for`, `layout_named`.
"""

from __future__ import annotations

from ..errors import CheckpointError, UsageError
from ..schemes import WeightFormat
from ..targets import TARGETS
from .chain import BLOCK_BYTES, Chain
from .layouts.cutlass import CUTLASS_SM90
from .layouts.marlin import MARLIN_INT4, MARLIN_INT8, MARLIN_MXFP4
from .layouts.mtile64 import MTILE64
from .layouts.triton_hopper import TRITON_HOPPER
from .layouts.trtllm import TRTLLM_MXFP4, TRTLLM_MXINT4
from .weight_layout import WeightLayout

__all__ = [
    "BLOCK_BYTES",
    "LAYOUTS",
    "Chain",
    "WeightLayout",
    "layout_for",
    "layout_named",
]

LAYOUTS: tuple[WeightLayout, ...] = (
    MARLIN_INT4,
    MARLIN_INT8,
    MARLIN_MXFP4,
    TRTLLM_MXFP4,
    TRTLLM_MXINT4,
    TRITON_HOPPER,
    CUTLASS_SM90,
    MTILE64,
)
"""Every layout. Registering one here and in `moectl.targets` offers it, and tests it."""


def layout_for(target: str, weight: WeightFormat, arch: str | None = None) -> WeightLayout:
    """The layout of `target` that holds `weight`, for kernels of `arch` where that is given.

    Raises UsageError, naming the choices, when there is none, or several that only `arch` tells apart.
    """
    if target not in TARGETS:
        raise UsageError(f"no target is called {target!r}.", hint=f"Choose one of {', '.join(TARGETS)}.")
    named = [layout for layout in LAYOUTS if layout.target == target]
    holding = [layout for layout in named if weight in layout.weights]
    if not holding:
        held = "; ".join(str(held) for layout in named for held in layout.weights)
        others = dict.fromkeys(layout.target for layout in LAYOUTS if weight in layout.weights)
        raise UsageError(
            f"target {target} holds {held}; these weights are {weight}.",
            hint=f"Targets for them: {', '.join(others) or 'none'}.",
        )
    fitting = [layout for layout in holding if arch is None or arch in layout.archs]
    if len(fitting) != 1:
        archs = ", ".join(dict.fromkeys(arch for layout in holding for arch in layout.archs))
        raise UsageError(
            f"target {target} for {weight} is read on {archs}, "
            f"got {arch if arch else 'no architecture to choose by'}.",
            hint="Give one of these with --arch.",
        )
    return fitting[0]


def layout_named(name: str) -> WeightLayout:
    """The layout called `name`, as in a manifest; CheckpointError when this version has none such."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise CheckpointError(
        f"no weight layout is called {name!r}; known are {', '.join(layout.name for layout in LAYOUTS)}."
    )

"""The registry of weight layouts, and how a target and a scheme choose one.

Public here: `Chain`, `WeightLayout`, `LAYOUTS`, `layout_for`, `layout_named`.
"""

from __future__ import annotations

from ...errors import CheckpointError, UsageError
from ...problem import layouts
from ...problem.layouts import TARGETS
from ...problem.schemes import WeightFormat
from ..recipe.chain import BLOCK_BYTES, Chain
from .cpu import CPU
from .cutlass import CUTLASS
from .marlin import INTEGER as MARLIN_INTEGER
from .marlin_float import FLOAT as MARLIN_FLOAT
from .mtile64 import MTILE64
from .plain import PLAIN
from .triton_blackwell import TRITON_BLACKWELL
from .triton_hopper import TRITON_HOPPER
from .trtllm import TRTLLM
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
    *MARLIN_INTEGER,
    *MARLIN_FLOAT,
    *TRTLLM,
    TRITON_HOPPER,
    TRITON_BLACKWELL,
    *CUTLASS,
    *PLAIN,
    *CPU,
    MTILE64,
)
"""Every layout. Registering one here and in `moectl.problem.layouts` offers it, and tests it."""


def layout_for(
    target: str, weight: WeightFormat, arch: str | None = None, act: str | None = None
) -> WeightLayout:
    """The layout of `target` that holds `weight`, for kernels of `arch` and activations `act` where given.

    Where activations alone tell layouts apart and none are given, the usual ones count. Raises
    UsageError, naming the choices, when there is no layout, or several that only `arch` tells apart.
    """
    if target not in TARGETS:
        raise UsageError(f"no target is called {target!r}.", hint=f"Choose one of {', '.join(TARGETS)}.")
    named = [layout for layout in LAYOUTS if layout.target == target]
    holding = [layout for layout in named if weight in layout.weights]
    if not holding:
        every = [held for layout in named for held in layout.weights]
        alike = [str(held) for held in every if held.name == weight.name]
        held = ", ".join(dict.fromkeys(alike or [held.name for held in every]))
        others = dict.fromkeys(layout.target for layout in LAYOUTS if weight in layout.weights)
        raise UsageError(
            f"target {target} holds {held}; these weights are {weight}.",
            hint=f"Targets for them: {', '.join(others) or 'none'}.",
        )
    fitting = [layout for layout in holding if arch is None or arch in layout.archs]
    taking = [layout for layout in fitting if act is None or act in layout.acts]
    if fitting and not taking:
        acts = ", ".join(dict.fromkeys(act for layout in fitting for act in layout.acts))
        raise UsageError(
            f"target {target} for {weight} is read with {acts} activations, got {act}.",
            hint="Give one of these with --act.",
        )
    if len(taking) > 1:
        taking = [layout for layout in taking if not layouts.LAYOUTS[layout.name].instead_of]
    if len(taking) != 1:
        archs = ", ".join(dict.fromkeys(arch for layout in holding for arch in layout.archs))
        raise UsageError(
            f"target {target} for {weight} is read on {archs}, "
            f"got {arch if arch else 'no architecture to choose by'}.",
            hint="Give one of these with --arch.",
        )
    return taking[0]


def layout_named(name: str) -> WeightLayout:
    """The layout called `name`, as in a manifest; CheckpointError when this version has none such."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise CheckpointError(
        f"no weight layout is called {name!r}; known are {', '.join(layout.name for layout in LAYOUTS)}."
    )

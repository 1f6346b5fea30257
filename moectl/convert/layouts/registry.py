"""The registry of weight layouts, and the choice of one by target and weight format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import CheckpointError, UsageError
from ...problem import layouts
from ...problem.layer_ranges import layers_of
from ...problem.layouts import TARGETS
from ...problem.schemes import WeightFormat
from ..recipe.chain import BLOCK_BYTES, Chain
from .aiter import AITER
from .cpu import CPU
from .cutlass import CUTLASS
from .humming import INTEGER as HUMMING_INTEGER
from .humming_float import FLOAT as HUMMING_FLOAT
from .marlin import INTEGER as MARLIN_INTEGER
from .marlin_float import FLOAT as MARLIN_FLOAT
from .mtile64 import MTILE64
from .plain import PLAIN
from .rows import ROWS
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
    "layout_for_all",
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
    *HUMMING_INTEGER,
    *HUMMING_FLOAT,
    *AITER,
    *CPU,
    MTILE64,
    *ROWS,
)
"""All layouts. A layout registered here and in `moectl.problem.layouts` is available, and tested."""


def layout_for(
    target: str, weight: WeightFormat, arch: str | None = None, act: str | None = None
) -> WeightLayout:
    """The layout of `target` for `weight`, for kernels of `arch` and activations `act` if given.

    If layouts differ only in their activations, `act` defaults to the usual ones. Raises UsageError with
    the choices if there is no layout, or several that differ in `arch`.

    Example:
        >>> from moectl.problem.schemes import MXFP4
        >>> layout_for("marlin", MXFP4).name
        'marlin-mxfp4'
    """
    if target not in TARGETS:
        raise UsageError(f"no target is called {target!r}.", hint=f"Choose one of {', '.join(TARGETS)}.")
    of_target = [layout for layout in LAYOUTS if layout.target == target]
    holding = [layout for layout in of_target if weight in layout.weights]
    if not holding:
        formats = [supported for layout in of_target for supported in layout.weights]
        same_name = [str(supported) for supported in formats if supported.name == weight.name]
        names = ", ".join(dict.fromkeys(same_name or [supported.name for supported in formats]))
        others = dict.fromkeys(layout.target for layout in LAYOUTS if weight in layout.weights)
        raise UsageError(
            f"target {target} holds {names}; these weights are {weight}.",
            hint=f"For {weight} weights use one of: {', '.join(others)}."
            if others
            else f"No target holds {weight} weights.",
        )
    fitting = [layout for layout in holding if arch is None or arch in layout.archs]
    matching = [layout for layout in fitting if act is None or act in layout.acts]
    if fitting and not matching:
        acts = ", ".join(dict.fromkeys(act for layout in fitting for act in layout.acts))
        raise UsageError(
            f"target {target} for {weight} is read with {acts} activations, got {act}.",
            hint="Give one of these with --act.",
        )
    if len(matching) > 1:
        matching = [layout for layout in matching if not layouts.LAYOUTS[layout.name].instead_of]
    if len(matching) != 1:
        archs = ", ".join(dict.fromkeys(arch for layout in holding for arch in layout.archs))
        raise UsageError(
            f"target {target} for {weight} is read on {archs}, "
            f"got {arch if arch else 'no architecture to choose by'}.",
            hint="Give one of these with --arch.",
        )
    return matching[0]


def layout_named(name: str) -> WeightLayout:
    """The layout called `name`, as in a manifest; CheckpointError when this version does not have it."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise CheckpointError(
        f"no weight layout is called {name!r}; known are {', '.join(layout.name for layout in LAYOUTS)}."
    )


def layout_for_all(
    target: str, layers: Mapping[WeightFormat, Sequence[int]], arch: str | None = None, act: str | None = None
) -> WeightLayout:
    """The layout of `target` that holds all `layers`, their numbers by weight format, as `layout_for`.

    Raises UsageError as that does, and if no layout of `target` holds all formats.
    """

    def holds_all(layout: WeightLayout) -> bool:
        return all(weight in layout.weights for weight in layers)

    fitting = tuple(dict.fromkeys(layout.target for layout in LAYOUTS if holds_all(layout)))
    if len(layers) > 1 and target in TARGETS and target not in fitting:
        formats = ", ".join(f"{layers_of(numbers)} in {weight}" for weight, numbers in layers.items())
        raise UsageError(
            f"no layout of target {target} holds all layers, which differ in format: {formats}.",
            hint=f"For these weights use one of: {', '.join(fitting)}."
            if fitting
            else "No target has one that does. Use the checkpoint itself, whose layers `moectl run` and "
            "`bench` repack as they load them, or a portable format, such as --to bf16.",
        )
    return layout_for(target, next(iter(layers)), arch, act)

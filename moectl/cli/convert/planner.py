"""The planner of a conversion to a kernel layout or a portable format."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ...convert.portable.options import PortableOptions, unsuitable
from ...errors import UsageError
from ...problem.layer_ranges import layers_of
from ...problem.layouts import ACTS, LAYOUTS, OWN_TARGET, TARGETS
from ...problem.portable_formats import CONTAINERS, PORTABLE
from ...problem.schemes import WeightFormat
from ..options import option, pick

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ...convert.plan.conversion_plan import ConversionPlan
    from ...convert.rank_slice import RankShard


WISHES = {
    "gptq": "--to int4-g128 --container gptq (or int4-g32, int8)",
    "awq": "--to int4-g128: AWQ is read but not written, and the default container holds its zero points",
    "fp8": "--to fp8-block (a scale per 128 x 128) or --to fp8-channel (a scale per row)",
    "fp4": "--to nvfp4 or --to mxfp4",
    "int4": "--to int4-g128 or --to int4-g32",
    "w4a16": "--to int4-g128",
    "w8a16": "--to int8",
    "w8a8": "--to fp8-channel",
    "compressed_tensors": "a format, such as --to int4-g128; compressed-tensors is its default container",
    "modelopt": "--to nvfp4 --container native",
    "gptq_marlin": "--to int4-g128 --container gptq for engines, which repack it, or --to marlin for moectl",
    "awq_marlin": "--to int4-g128 for engines, which repack it, or --to marlin for moectl",
    "mxfp8": "--to fp8-block or --to mxfp4: MXFP8 is read but not written",
    "bnb": "--to nvfp4, mxfp4 or int4-g128: moectl neither reads nor writes bitsandbytes",
    "bitsandbytes": "--to nvfp4, mxfp4 or int4-g128: moectl neither reads nor writes bitsandbytes",
    "gguf": "llama.cpp's convert_hf_to_gguf.py: moectl does not write GGUF",
}
"""What to type for names that are no values of ``--to``, by their lower-case spelling with underscores."""


COMMON = ("moectl", "marlin", "humming", "triton-hopper", "trtllm")
"""Layouts that the help names; `moectl list layouts` has all."""


def target_named(name: str) -> str:
    """The layout or format called `name`, ignoring case and dashes; UsageError with what to type instead."""
    wish = WISHES.get(name.lower().replace("-", "_"))
    if wish is not None:
        raise UsageError(f"layout or format {name!r} is not known.", hint=f"Use {wish}.")
    return pick(name, [*TARGETS, *PORTABLE], "layout or format")


@dataclass(frozen=True)
class TargetOptions:
    """Options that select the output; those of portable formats are in `PortableOptions`."""

    to: Annotated[
        str,
        option(
            "--to",
            help=f"Layout, such as {', '.join(COMMON)}; or portable format: {', '.join(PORTABLE)}.",
            show_default=False,
        ),
    ]
    arch: Annotated[
        str | None, option("--arch", help="sm90, sm100, ...; needed if --to alone is ambiguous.")
    ] = None
    act: Annotated[str | None, option("--act", help=f"Activations: {', '.join(ACTS)}.")] = None
    experts_only: Annotated[bool, option("--experts-only", help="Skip non-expert tensors.")] = False

    def spelled(self) -> "TargetOptions":
        """The options with names in their canonical spelling; UsageError for unknown names."""
        archs = sorted({a for facts in LAYOUTS.values() for a in facts.archs})
        return replace(
            self,
            to=target_named(self.to),
            arch=None if self.arch is None else pick(self.arch, archs, "architecture"),
            act=None if self.act is None else pick(self.act, ACTS, "activation format"),
        )


def planner(
    source: "Checkpoint", target: TargetOptions, portable: PortableOptions, max_memory: int | None = None
) -> "Callable[[RankShard], ConversionPlan]":
    """A function that plans one rank's conversion of `source`; UsageError for conflicting options."""
    if target.to in PORTABLE:
        return _portable(source, target, portable, max_memory)
    if portable.given:
        raise unsuitable(next(iter(portable.given)), target.to, "applies to portable formats only")
    from ...convert.layouts.registry import layout_for_all
    from ...convert.plan.kernel_layout_plan import plan_conversion

    layers: dict[WeightFormat, list[int]] = {}
    for group in source.groups:
        layers.setdefault(group.problem.scheme.weight, []).extend(group.layers)
    layout = layout_for_all(target.to, layers, target.arch, target.act or _own_act(source, target.to))
    if target.to == OWN_TARGET:
        _read_in(layout.name, source)
    if portable.requantize:
        layout = layout.requantizing()
    return lambda shard: plan_conversion(
        source, layout, max_memory=max_memory, experts_only=target.experts_only, shard=shard
    )


def _own_act(source: "Checkpoint", target: str) -> str | None:
    """The `--act` of the layout in which moectl's own kernels read the first layers; None for other
    targets, or where the layout has no other activations."""
    from ...capabilities.own_kernels import TRITON

    facts = LAYOUTS[TRITON.layout_of(source.groups[0].problem.scheme)]
    return facts.acts[0] if target == OWN_TARGET and facts.instead_of else None


def _read_in(layout: str, source: "Checkpoint") -> None:
    """UsageError if moectl's own kernels read layers in another layout than `layout`, by the activations
    that the checkpoint declares."""
    from ...capabilities.own_kernels import TRITON

    for group in source.groups:
        wanted = TRITON.layout_of(group.problem.scheme)
        if wanted != layout:
            raise UsageError(
                f"moectl's kernels read {layers_of(group.layers)} ({group.problem.scheme}) in {wanted}, "
                f"not in {layout}.",
                hint="Leave out --act; if layers differ in their activations, use the checkpoint itself, "
                "whose layers `moectl run` and `bench` repack as they load them.",
            )


def _portable(
    source: "Checkpoint", target: TargetOptions, portable: PortableOptions, max_memory: int | None
) -> "Callable[[RankShard], ConversionPlan]":
    for name, value in (("--arch", target.arch), ("--act", target.act)):
        if value:
            raise unsuitable(name, target.to, "applies to kernel layouts only")

    from ...convert.codecs import E8M0_RULES
    from ...convert.portable.portable_plan import plan_portable
    from ...convert.quantize import METHODS
    from ...kernels.activation import activate

    def picked(value: str | None, names: tuple[str, ...], what: str) -> str | None:
        return None if value is None else pick(value, names, what)

    options = replace(
        portable,
        container=picked(portable.container, tuple(CONTAINERS), "container"),
        method=picked(portable.method, METHODS, "method"),
    )
    if options.rule is not None and options.format.has_scale_rules:
        options = replace(options, rule=pick(options.rule, E8M0_RULES, "rule for scales"))
    options.check()

    def plan(shard: "RankShard") -> "ConversionPlan":
        if shard.ranks > 1:
            raise UsageError(
                "a portable checkpoint is not sliced; engines slice it themselves.",
                hint="Leave out --tp-size, --ep-size and --rank.",
            )
        return plan_portable(
            source,
            options,
            activate=lambda h, problem, rows: activate(h, problem.activation, rows),
            max_memory=max_memory,
            experts_only=target.experts_only,
        )

    return plan

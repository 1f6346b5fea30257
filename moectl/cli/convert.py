"""`moectl convert`: expert weights in a backend's kernel layout, ahead of time."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CheckpointError, UsageError
from ..ranges import ranges
from ..targets import LAYOUTS, TARGETS
from .options import Activation, CheckpointArg, Offline, Routing, framed, option, pick
from .output import Output, count, duration, size, table

if TYPE_CHECKING:
    from ..convert.plan import Plan

EXAMPLES = (
    "moectl convert ./gpt-oss-20b ./marlin --to marlin",
    "moectl convert ./kimi ./trtllm --to trtllm --dry-run",
    "moectl convert ./gpt-oss-20b ./marlin --to marlin --resume",
)
MORE = ["Layouts, and who reads them:"]
MORE += [f"  {target}: {'; '.join(map(str, readers))}" for target, readers in TARGETS.items()]


ESTIMATED_RATE = 300e6
"""Expert bytes a second that a conversion is estimated with: what two CPU cores reach on a local disk."""


@framed("convert")
def convert(
    checkpoint: CheckpointArg,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.", show_default=False)],
    to: Annotated[str, option("--to", help=f"Layout: {', '.join(TARGETS)}.", show_default=False)],
    arch: Annotated[
        str | None, option("--arch", help="sm90, sm100, ...: where --to alone is ambiguous.")
    ] = None,
    dry_run: Annotated[bool, option("--dry-run", help="Plan from headers alone; write nothing.")] = False,
    resume: Annotated[bool, option("--resume", help="Finish a conversion that was interrupted.")] = False,
    experts_only: Annotated[
        bool, option("--experts-only", help="Leave out tensors that are no experts.")
    ] = False,
    max_memory: Annotated[
        str | None, option("--max-memory", help="Bound such as 2GB; default: a quarter of RAM.")
    ] = None,
    threads: Annotated[
        int | None, option("--threads", help="1: one thing after another; default: overlapped.", min=1)
    ] = None,
    activation: Activation = None,
    routing: Routing = None,
    offline: Offline = False,
    *,
    out: Output,
) -> None:
    """Write expert weights in a backend's kernel layout.

    Streamed layer by layer, resumable, and bit-exactly reversible. The result is a cache for that
    backend, not a portable checkpoint.
    """
    to = pick(to, TARGETS, "layout")
    memory = None if max_memory is None else parse_size(max_memory)
    if arch is not None:
        arch = pick(arch, sorted({a for facts in LAYOUTS.values() for a in facts.archs}), "architecture")

    from ..checkpoint import open_checkpoint
    from ..checkpoint.stated import parse_stated

    source = open_checkpoint(checkpoint, offline=offline, stated=parse_stated(activation, routing))
    if not source.groups:
        raise CheckpointError(f"{checkpoint} has no MoE layers", hint="moectl explain shows what it holds")

    from ..convert.layout import layout_for
    from ..convert.plan import plan_conversion
    from ..convert.stream import check_output
    from ..convert.stream import convert as library

    layout = layout_for(to, source.groups[0].problem.scheme.weight, arch)
    check_output(source.folder, target, resume)
    plan = plan_conversion(source, layout, max_memory=memory, experts_only=experts_only)
    if source.origin.note:
        out.note(f"read from the {source.origin.kind}: {source.origin.note}")
    if dry_run:
        out.result(plan_document(plan), lambda console: draw_plan(plan, console), str(plan.bytes_out))
        return
    out.note(f"{plan.layout.name}: {size(plan.bytes_in)} of experts -> {size(plan.bytes_out)} in {target}")
    begin = time.perf_counter()
    try:
        with out.progress("converting") as progress:
            summary = library(plan, target, resume=resume, progress=progress, threads=threads)
    except KeyboardInterrupt:
        out.note(f"the layers that are finished stay in {target}; --resume goes on from there")
        raise
    seconds = time.perf_counter() - begin
    document = {
        **plan_document(plan),
        "folder": str(target),
        "converted_layers": list(summary.converted),
        "resumed_layers": list(summary.resumed),
        "skipped_files": list(summary.skipped_files),
        "seconds": seconds,
    }

    def draw(console: Any) -> None:
        rate = f", {size(summary.bytes_in / seconds)}/s" if summary.bytes_in else ""
        done = f"{count(len(summary.converted), 'layer')} converted in {duration(seconds)}{rate}"
        done += f"; {len(summary.resumed)} finished before" if summary.resumed else ""
        console.print(f"{target}: {plan.layout.name}, {done}", markup=False)
        for name in summary.skipped_files:
            console.print(f"left out: {name}", markup=False)

    out.result(document, draw, str(target))
    out.note(f"check it with: moectl verify {target}")


def plan_document(plan: "Plan") -> dict[str, Any]:
    """A plan as plain data; sizes in bytes."""
    layout = plan.layout
    return {
        "layout": layout.name,
        "layout_version": layout.version,
        "readers": [str(reader) for reader in layout.readers],
        "tensors_in": plan.tensors_in,
        "tensors_out": plan.tensors_out,
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "other_bytes": plan.rest_bytes,
        "disk_bytes": plan.disk_needed,
        "peak_memory_bytes": plan.peak_memory,
        "seconds_estimate": plan.bytes_in / ESTIMATED_RATE,
        "layers": [
            {
                "layer": layer.layer,
                "file": layer.file.name,
                "bytes_in": layer.bytes_in,
                "bytes_out": layer.file.size,
                "tensors": {
                    info.name: {
                        "stored_dtype": info.dtype,
                        "stored_shape": list(info.shape),
                        "logical_dtype": layer.holds.get(info.name, info.dtype),
                    }
                    for info in layer.file.tensors.values()
                },
            }
            for layer in plan.layers
        ],
    }


def draw_plan(plan: "Plan", console: Any) -> None:
    """What a conversion would do, for a person."""
    first = plan.layers[0]
    made = table(
        "tensor",
        "stored as",
        "holds",
        title=f"{plan.layout.name}: each of layers {ranges([layer.layer for layer in plan.layers])}",
    )
    for info in first.file.tensors.values():
        holds = first.holds.get(info.name, info.dtype)
        made.add_row(info.name, f"{info.dtype} {list(info.shape)}", holds)
    console.print(made)
    rows = {
        "read by": "; ".join(str(reader) for reader in plan.layout.readers),
        "expert tensors": f"{plan.tensors_in} in, {plan.tensors_out} out",
        "expert bytes": f"{size(plan.bytes_in)} in, {size(plan.bytes_out)} out",
        "other tensors": f"{size(plan.rest_bytes)} linked or copied" if plan.rest else "left out",
        "disk needed": size(plan.disk_needed),
        "peak memory": f"{size(plan.peak_memory)} above the program's own",
        "time": f"about {duration(plan.bytes_in / ESTIMATED_RATE)} at {size(ESTIMATED_RATE)}/s",
    }
    for name, value in rows.items():
        console.print(f"{name:<15} {value}", markup=False)
    console.print("nothing was written (--dry-run)")


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}


def parse_size(text: str) -> int:
    """Bytes of ``2GB``, ``512MiB``, ``1.5G`` or ``1000000``; UsageError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise UsageError(f"a size must look like 2GB, 512MiB or 1000000, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])

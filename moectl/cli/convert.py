"""`moectl convert`: expert weights in a backend's kernel layout, ahead of time."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CheckpointError, UsageError
from ..portable import CONTAINERS, PORTABLE
from ..ranges import ranges
from ..targets import ACTS, LAYOUTS, TARGETS
from .converting import Asked, draw_costs, planner
from .options import Activation, CheckpointArg, Offline, Routing, framed, option, pick
from .output import Output, count, duration, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..convert.estimate import Rate
    from ..convert.plan import Plan
    from ..convert.rank_plans import RankPlan
    from ..convert.stream import Summary

EXAMPLES = (
    "moectl convert ./gpt-oss-20b ./marlin --to marlin",
    "moectl convert ./gpt-oss-20b ./marlin-tp4 --to marlin --tp-size 4",
    "moectl convert ./Qwen3-30B-A3B ./int4 --to int4-g128",
    "moectl convert ./kimi ./marlin --to marlin --device cuda --part 2/4",
)
MORE = ["Who reads what: moectl list layouts, moectl list formats"]


@framed("convert")
def convert(
    checkpoint: CheckpointArg,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.", show_default=False)],
    to: Annotated[
        str,
        option(
            "--to",
            help=f"Layout: {', '.join(TARGETS)}; or portable format: {', '.join(PORTABLE)}.",
            show_default=False,
        ),
    ],
    arch: Annotated[
        str | None, option("--arch", help="sm90, sm100, ...: where --to alone is ambiguous.")
    ] = None,
    act: Annotated[
        str | None, option("--act", help=f"Activations the layout is for: {', '.join(ACTS)}.")
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
        int | None, option("--threads", help="1: one thing after another; default: all cores.", min=1)
    ] = None,
    device: Annotated[
        str,
        option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.", own=True),
    ] = "cpu",
    part: Annotated[
        str | None, option("--part", help="2/4: the second of four processes that fill OUT together.")
    ] = None,
    finish: Annotated[bool, option("--finish", help="Complete OUT when all its parts are there.")] = False,
    tp_size: Annotated[int, option("--tp-size", help="Slice each expert over so many ranks.", min=1)] = 1,
    ep_size: Annotated[int, option("--ep-size", help="Spread experts over so many ranks.", min=1)] = 1,
    rank: Annotated[
        int | None, option("--rank", help="This rank alone, into OUT; default: all, OUT/rank-00, ...", min=0)
    ] = None,
    container: Annotated[
        str | None, option("--container", help=f"Of a portable format: {', '.join(CONTAINERS)}.")
    ] = None,
    method: Annotated[
        str | None, option("--method", help="search (default), rtn; gptq (default with --calibration).")
    ] = None,
    mx_scale: Annotated[
        str | None, option("--mx-scale", help="MXFP4's block scales: floor (default), even, up.")
    ] = None,
    calibration: Annotated[
        Path | None, option("--calibration", help="Safetensors with activations x [tokens, hidden].")
    ] = None,
    requantize: Annotated[
        bool, option("--requantize", help="Let weights that were quantized before lose more.")
    ] = False,
    activation: Activation = None,
    routing: Routing = None,
    offline: Offline = False,
    *,
    out: Output,
) -> None:
    """Write expert weights in a backend's kernel layout, or in another portable format.

    Streamed layer by layer and resumable. A layout is a cache for its backend, bit-exactly reversible;
    a portable format is an ordinary checkpoint. Ranks (--tp-size, --ep-size) get folders of their own.
    """
    to = pick(to, [*TARGETS, *PORTABLE], "layout or format")
    memory = None if max_memory is None else parse_size(max_memory)
    if arch is not None:
        arch = pick(arch, sorted({a for facts in LAYOUTS.values() for a in facts.archs}), "architecture")

    if act is not None:
        act = pick(act, ACTS, "activation format")

    from ..checkpoint import open_checkpoint
    from ..checkpoint.stated import parse_stated

    source = open_checkpoint(checkpoint, offline=offline, stated=parse_stated(activation, routing))
    if not source.groups:
        raise CheckpointError(f"{checkpoint} has no MoE layers", hint="moectl explain shows what it holds")

    from ..convert.portions import portion_of
    from ..convert.rank_plans import check_outputs, convert_ranks, plan_ranks
    from ..convert.stream import complete
    from ..convert.stream import convert as library

    asked = Asked(to, arch, act, container, method, mx_scale, calibration, requantize, memory, experts_only)
    plans = plan_ranks(target, tp_size, ep_size, rank, planner(source, asked))
    layout = plans[0].plan.layout
    portion = None if part is None else portion_of(part)
    if finish:
        if portion is not None or dry_run or resume:
            raise UsageError("--finish goes with neither --part nor --resume nor --dry-run")
        draw_finished([complete(item.plan, item.folder) for item in plans], target, layout.name, out)
        return
    plans = tuple(replace(item, portion=portion) for item in plans)
    check_outputs(source.folder, target, plans, resume)
    if source.origin.note:
        out.note(f"read from the {source.origin.kind}: {source.origin.note}")
    written = sum(item.own.bytes_out for item in plans)
    if dry_run:
        from ..convert.estimate import measured_rate

        rate = measured_rate(plans[0].plan, threads)
        estimates = [
            {
                **plan_document(item.own),
                "seconds_estimate": item.own.bytes_in / rate.bytes_per_second,
                "rate_measured": rate.measured,
            }
            for item in plans
        ]
        document = ranks_document(estimates)
        out.result(document, lambda console: draw_plans(plans, rate, console), str(written))
        return
    read = sum(item.own.bytes_in for item in plans)
    out.note(f"{layout.name}: {size(read)} of experts -> {size(written)} in {target}")
    begin = time.perf_counter()
    try:
        with out.progress("converting") as progress:
            summaries = convert_ranks(
                plans,
                lambda item, tell: library(
                    item.plan,
                    item.folder,
                    resume=resume,
                    progress=tell,
                    threads=threads,
                    device=device,
                    portion=portion,
                ),
                progress,
            )
    except KeyboardInterrupt:
        out.note(f"the layers that are finished stay in {target}; --resume goes on from there")
        raise
    seconds = time.perf_counter() - begin
    documents = [
        {
            **plan_document(item.own),
            "folder": str(item.folder),
            "converted_layers": list(summary.converted),
            "resumed_layers": list(summary.resumed),
            "skipped_files": list(summary.skipped_files),
            "seconds": seconds,
        }
        for item, summary in zip(plans, summaries, strict=True)
    ]

    def draw(console: Any) -> None:
        converted, resumed = (
            sum(layer >= 0 for found in lists for layer in found)
            for lists in ([s.converted for s in summaries], [s.resumed for s in summaries])
        )
        moved = sum(summary.bytes_in for summary in summaries)
        rate = f", {size(moved / seconds)}/s" if moved else ""
        done = f"{count(converted, 'layer')} converted in {duration(seconds)}{rate}"
        done += f"; {resumed} finished before" if resumed else ""
        held = f" of {count(len(plans), 'rank')}" if len(plans) > 1 else ""
        console.print(f"{target}: {layout.name}, {done}{held}", markup=False)
        for name in summaries[0].skipped_files:
            console.print(f"left out: {name}", markup=False)
        if to in PORTABLE and portion is None:
            draw_costs(target, console)

    out.result(ranks_document(documents), draw, str(target))
    if portion is None:
        out.note(f"check it with: moectl verify {target}")
    else:
        out.note(f"part {portion} is there; complete {target} with --finish when all parts are")


def draw_finished(summaries: "list[Summary]", target: Path, layout: str, out: Output) -> None:
    """What `--finish` has completed."""
    documents = [
        {
            "folder": str(summary.folder),
            "layout": layout,
            "resumed_layers": list(summary.resumed),
            "skipped_files": list(summary.skipped_files),
        }
        for summary in summaries
    ]
    layers = sum(len(summary.resumed) for summary in summaries)
    text = f"{target}: {layout}, complete with {count(layers, 'layer')}"
    out.result(ranks_document(documents), lambda console: console.print(text, markup=False), str(target))
    out.note(f"check it with: moectl verify {target}")


def ranks_document(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One plan's document, or those of every rank, by rank."""
    return documents[0] if len(documents) == 1 else {"ranks": documents}


def plan_document(plan: "Plan") -> dict[str, Any]:
    """A plan as plain data; sizes in bytes."""
    layout = plan.layout
    return {
        "rank": plan.shard.rank,
        "tp_size": plan.shard.tp_size,
        "ep_size": plan.shard.ep_size,
        "shares": [
            {
                "layers": list(group.layers),
                "experts": list(group.experts),
                "intermediate": list(group.intermediate),
                "padded_intermediate": group.problem.dims.padded_intermediate,
            }
            for group in plan.groups
        ],
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


def draw_plans(plans: "Sequence[RankPlan]", rate: "Rate", console: Any) -> None:
    """What conversions would do, rank by rank, for a person: the first one's tensors, then the shares."""
    if plans[0].plan.shard.ranks > 1:
        made = table("rank", "layers", "experts", "intermediate", "padded", "written", "disk needed")
        for item in plans:
            for group in item.own.groups:
                first, last = group.experts
                low, high = group.intermediate
                made.add_row(
                    str(item.own.shard.rank),
                    ranges(group.layers),
                    f"{first}-{last - 1}",
                    f"{low}-{high - 1}",
                    str(group.problem.dims.padded_intermediate),
                    size(item.own.bytes_out),
                    size(item.own.disk_needed),
                )
        console.print(made)
    draw_plan(plans[0].own, rate, console)


def draw_plan(plan: "Plan", rate: "Rate", console: Any) -> None:
    """What a conversion would do, for a person."""
    if not plan.layers:
        console.print("no layers fall to this part; nothing was written (--dry-run)", markup=False)
        return
    first = plan.layers[0]
    numbers = [layer.layer for layer in plan.layers if layer.layer >= 0]
    made = table(
        "tensor",
        "stored as",
        "holds",
        title=f"{plan.layout.name}: each of layers {ranges(numbers)}",
    )
    seen: dict[str, tuple[str, str]] = {}
    for info in first.file.tensors.values():
        stored = (f"{info.dtype} {list(info.shape)}", first.holds.get(info.name, info.dtype))
        seen.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", info.name), stored)
    for name, stored in seen.items():
        made.add_row(name, *stored)
    console.print(made)
    rows = {
        "read by": "; ".join(str(reader) for reader in plan.layout.readers),
        "expert tensors": f"{plan.tensors_in} in, {plan.tensors_out} out",
        "expert bytes": f"{size(plan.bytes_in)} in, {size(plan.bytes_out)} out",
        "other tensors": f"{size(plan.rest_bytes)} linked or copied" if plan.rest else "left out",
        "disk needed": size(plan.disk_needed),
        "peak memory": f"{size(plan.peak_memory)} above the program's own",
        "time": f"about {duration(plan.bytes_in / rate.bytes_per_second)}, "
        f"at {size(rate.bytes_per_second)}/s as {'measured on this CPU' if rate.measured else 'assumed'}",
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

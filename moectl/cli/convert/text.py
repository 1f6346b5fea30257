"""What a conversion would do or has done: for a person, and as plain data."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...problem.layer_ranges import ranges
from ..output import count, duration, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...convert.execute.convert import ConversionSummary
    from ...convert.execute.rank_plans import RankPlan
    from ...convert.plan.conversion_plan import ConversionPlan
    from ...convert.plan.rate_estimate import ConversionRate


def ranks_document(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One plan's document, or those of every rank, by rank."""
    return documents[0] if len(documents) == 1 else {"ranks": documents}


def plan_document(plan: "ConversionPlan") -> dict[str, Any]:
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


def draw_plans(plans: "Sequence[RankPlan]", rate: "ConversionRate", console: Any) -> None:
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


def draw_plan(plan: "ConversionPlan", rate: "ConversionRate", console: Any) -> None:
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


def finished_document(item: "RankPlan", summary: "ConversionSummary", seconds: float) -> dict[str, Any]:
    """A conversion that is done as plain data: its plan, and what came of it."""
    return {
        **plan_document(item.own),
        "folder": str(item.folder),
        "converted_layers": list(summary.converted),
        "resumed_layers": list(summary.resumed),
        "skipped_files": list(summary.skipped_files),
        "seconds": seconds,
    }


def draw_done(
    target: Path,
    plans: "Sequence[RankPlan]",
    summaries: "Sequence[ConversionSummary]",
    seconds: float,
    console: Any,
    *,
    costs: bool,
) -> None:
    """What was converted, for a person; with what quantizing has cost where `costs`."""
    converted, resumed = (
        sum(layer >= 0 for found in lists for layer in found)
        for lists in ([s.converted for s in summaries], [s.resumed for s in summaries])
    )
    moved = sum(summary.bytes_in for summary in summaries)
    rate = f", {size(moved / seconds)}/s" if moved else ""
    done = f"{count(converted, 'layer')} converted in {duration(seconds)}{rate}"
    done += f"; {resumed} finished before" if resumed else ""
    held = f" of {count(len(plans), 'rank')}" if len(plans) > 1 else ""
    console.print(f"{target}: {plans[0].plan.layout.name}, {done}{held}", markup=False)
    for name in summaries[0].skipped_files:
        console.print(f"left out: {name}", markup=False)
    if costs:
        draw_costs(target, console)


def draw_costs(folder: Path, console: Any) -> None:
    """The summary of the report that a portable output holds."""
    from ...convert.portable.report_fragments import CostTable, read_report

    costs = CostTable(read_report(folder)["layers"])
    made = table(*costs.columns)
    for row in costs.rows():
        made.add_row(*row)
    console.print(made)

"""Plans and results of conversions as tables and as JSON data."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...problem.layer_ranges import ranges
from ...problem.layouts import FOLDER_READERS
from ..output import count, duration, gib, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...convert.execute.convert import ConversionSummary
    from ...convert.execute.rank_plans import RankPlan
    from ...convert.plan.conversion_plan import ConversionPlan
    from ...convert.plan.rate_estimate import ConversionRate


def ranks_document(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The document of the only rank, or one with the documents of all ranks."""
    return documents[0] if len(documents) == 1 else {"ranks": documents}


KINDS = {
    "repacked": "codes and scales are moved, not quantized again",
    "decoded": "to the model's 16-bit dtype",
    "quantized": "to the new format",
    "kept": "unquantized, as in the source; --include-unquantized converts them, too",
}
"""What becomes of experts, by the kind in the plan."""


def layer_kinds(plan: "ConversionPlan") -> dict[str, tuple[int, ...]]:
    """Layers by what becomes of their experts; empty for a kernel layout, which changes no value."""
    return dict(plan.finalizer.kinds) if plan.finalizer else {}


def _named(layers: "Sequence[int]") -> str:
    """Layers by number."""
    return f"{'layer' if len(layers) == 1 else 'layers'} {ranges(layers)}"


def unread_warning(plan: "ConversionPlan") -> str:
    """What to know before work begins if no engine loads the output; empty if one does."""
    if plan.finalizer is None:
        others = [reader for reader in FOLDER_READERS if reader.engine != "moectl"]
        programs = ", ".join(name for reader in FOLDER_READERS for name in reader.backends)
        return "" if others else f"no engine loads this directory yet; it is for moectl ({programs})"
    if plan.finalizer.served:
        return ""
    readers = " and ".join(["moectl", *plan.layout.readers])
    model = plan.checkpoint.groups[0].problem.model_type
    return f"no engine loads {model} in {plan.layout.name}; {readers} read it"


def source_bytes(plans: "Sequence[RankPlan]") -> int:
    """Bytes of expert tensors that the plans of all ranks read, each range counted once."""
    extents: dict[str, list[tuple[int, int]]] = {}
    for layer in (layer for item in plans for layer in item.worker_plan.layers):
        for info, start, stop in layer.map.extents:
            extents.setdefault(info.name, []).append((start, stop))
    total = 0
    for spans in extents.values():
        end = 0
        for start, stop in sorted(spans):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
    return total


def plan_document(plan: "ConversionPlan") -> dict[str, Any]:
    """A plan as plain data; sizes in bytes."""
    layout, portable = plan.layout, plan.finalizer is not None
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
        "readers": list(layout.readers) if portable else [str(reader) for reader in FOLDER_READERS],
        "kernels": [] if portable else list(layout.readers),
        "layer_kinds": {kind: list(layers) for kind, layers in layer_kinds(plan).items()},
        "tensors_in": plan.tensors_in,
        "tensors_out": plan.tensors_out,
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "other_bytes": plan.passthrough_bytes,
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
                        "logical_dtype": layer.logical_dtypes.get(info.name, info.dtype),
                    }
                    for info in layer.file.tensors.values()
                },
            }
            for layer in plan.layers
        ],
    }


def draw_plans(plans: "Sequence[RankPlan]", rate: "ConversionRate", console: Any) -> None:
    """Prints the plans of all ranks: a table of their slices, then the first plan in detail."""
    if plans[0].plan.shard.ranks > 1:
        plan_table = table(
            "rank",
            "layers",
            "experts",
            "intermediate",
            "padded",
            "written",
            "disk needed",
            optional=("padded", "written"),
        )
        for item in plans:
            for group in item.worker_plan.groups:
                first, last = group.experts
                low, high = group.intermediate
                plan_table.add_row(
                    str(item.worker_plan.shard.rank),
                    ranges(group.layers),
                    f"{first}-{last - 1}",
                    f"{low}-{high - 1}",
                    str(group.problem.dims.padded_intermediate),
                    size(item.worker_plan.bytes_out),
                    size(item.worker_plan.disk_needed),
                )
        console.print(plan_table)
    draw_plan(plans[0].worker_plan, rate, console)


def draw_plan(plan: "ConversionPlan", rate: "ConversionRate", console: Any) -> None:
    """Prints a plan: its tensors, readers, sizes, and estimated duration."""
    if not plan.layers:
        console.print("this part has no layers; nothing was written (--dry-run)", markup=False)
        return
    first = plan.layers[0]
    numbers = [layer.layer for layer in plan.layers if layer.layer >= 0]
    plan_table = table(
        "tensor",
        "stored as",
        "holds",
        title=f"{plan.layout.name}: each of layers {ranges(numbers)}",
    )
    seen: dict[str, tuple[str, str]] = {}
    for info in first.file.tensors.values():
        stored = (f"{info.dtype} {list(info.shape)}", first.logical_dtypes.get(info.name, info.dtype))
        seen.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", info.name), stored)
    for name, stored in seen.items():
        plan_table.add_row(name, *stored)
    console.print(plan_table)
    readers = "; ".join(plan.layout.readers) or "no engine"
    rows = {
        **({"read by": readers} if plan.finalizer else folder_rows(plan)),
        **{kind: f"{_named(layers)}: {KINDS[kind]}" for kind, layers in layer_kinds(plan).items()},
        "expert tensors": f"{plan.tensors_in} in, {plan.tensors_out} out",
        "expert bytes": f"{size(plan.bytes_in)} in, {size(plan.bytes_out)} out",
        "other tensors": f"{size(plan.passthrough_bytes)} linked or copied"
        if plan.passthrough
        else "skipped",
        "disk needed": size(plan.disk_needed),
        "peak memory": f"{gib(plan.peak_memory)} above the program's own",
        "time": f"about {duration(plan.bytes_in / rate.bytes_per_second)}, "
        f"at {size(rate.bytes_per_second)}/s as {'measured on this CPU' if rate.measured else 'assumed'}",
    }
    for name, value in rows.items():
        console.print(f"{name:<15} {value}", markup=False)
    console.print("nothing was written (--dry-run)")


def folder_rows(plan: "ConversionPlan") -> dict[str, str]:
    """Who loads a directory in a kernel layout, and which kernels have that layout."""
    return {
        "loaded by": "; ".join(map(str, FOLDER_READERS)),
        "layout of": f"{'; '.join(plan.layout.readers)} (in memory)",
    }


def finished_document(item: "RankPlan", summary: "ConversionSummary", seconds: float) -> dict[str, Any]:
    """A finished conversion as JSON data: its plan and its result."""
    return {
        **plan_document(item.worker_plan),
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
    """Prints what was converted; with `costs`, also the quantization errors."""
    written = {layer for summary in summaries for layer in summary.converted if layer >= 0}
    converted = len(written)
    resumed = len({layer for summary in summaries for layer in summary.resumed if layer >= 0} - written)
    moved = sum(summary.bytes_in for summary in summaries)
    rate = f", {size(moved / seconds)}/s" if moved else ""
    text = f"{count(converted, 'layer')} converted in {duration(seconds)}{rate}"
    text += f"; {resumed} finished before" if resumed else ""
    scope = f" of {count(len(plans), 'rank')}" if len(plans) > 1 else ""
    console.print(f"{target}: {plans[0].plan.layout.name}, {text}{scope}", markup=False)
    for name in summaries[0].skipped_files:
        console.print(f"skipped: {name}", markup=False)
    if costs:
        draw_costs(target, console)


def draw_costs(folder: Path, console: Any) -> None:
    """Prints the quantization errors from the report of a portable output."""
    from ...convert.portable.report_fragments import CostTable, read_report

    report = read_report(folder)
    costs = CostTable(report["layers"])
    for kind, layers in report["layer_kinds"].items():
        word = "repacked exactly" if kind == "repacked" and costs.lossless(layers) else kind
        what = "" if word == "repacked exactly" else f": {KINDS[kind]}"
        console.print(f"{word:<17} {_named(layers)}{what}", markup=False)
    plan_table = table(*costs.columns)
    for row in costs.rows():
        plan_table.add_row(*row)
    console.print(plan_table)

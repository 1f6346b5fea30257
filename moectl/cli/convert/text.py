"""Plans and results of conversions as tables and as JSON data."""

import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...problem.layer_ranges import layers_of, ranges
from ...problem.layouts import folder_readers
from ..output import count, duration, gib, size, table
from ..text_layout import labelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...convert.execute.convert import ConversionSummary
    from ...convert.execute.rank_plans import RankPlan
    from ...convert.plan.conversion_plan import ConversionPlan
    from ...convert.plan.rate_estimate import ConversionRate
    from ...problem.layouts import DirectoryReader
    from ...problem.moe_problem import MoEProblem


def ranks_document(plans: "Sequence[RankPlan]", documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The document of the only plan, or one with the documents of all ranks."""
    if len(documents) == 1:
        return documents[0]
    return {"ranks": documents, "other_bytes": shared_tensor_bytes(plans)}


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


def unread_warning(plan: "ConversionPlan") -> str:
    """What to know before work begins if no engine loads the output; empty if one does."""
    if plan.finalizer is None:
        return _unserved_warning(plan)
    if plan.finalizer.served:
        return ""
    readers = " and ".join(["moectl", *plan.layout.readers])
    model = plan.checkpoint.groups[0].problem.model_type
    return f"no engine loads {model} in {plan.layout.name}; {readers} read it"


def _unserved_warning(plan: "ConversionPlan") -> str:
    """The same for a kernel layout: why engines refuse the directory, and which lay it out again."""
    from ...integrations.served_engines import RELAID, SERVED_ENGINES

    layout, problems, readers = plan.layout.name, _problems(plan), _readers(plan)
    if any(reader.serve for reader in readers):
        return ""
    programs = " and ".join(f"{reader.program} ({', '.join(reader.how)})" for reader in readers)
    why = "; ".join(dict.fromkeys(filter(None, _refusals(plan).values())))
    again = [
        engine.title
        for engine in SERVED_ENGINES.values()
        if all(engine.relays(problem, layout) for problem in problems)
    ]
    text = f"no serving engine loads this directory as it is{': ' if why else ''}{why}; it is for {programs}"
    return text + (f"; in {' and '.join(again)} it is {RELAID}, if moectl has a kernel for it" * bool(again))


def _refusals(plan: "ConversionPlan") -> dict[str, str]:
    """By the official name of an engine, why its plug-in does not take the directory; empty if it may."""
    from ...integrations.served_engines import SERVED_ENGINES

    layout, problems = plan.layout.name, _problems(plan)
    return {
        engine.title: next(filter(None, (engine.refuses(problem, layout) for problem in problems)), "")
        for engine in SERVED_ENGINES.values()
    }


def _readers(plan: "ConversionPlan") -> "list[DirectoryReader]":
    """Who loads the directory as it is."""
    refusals = _refusals(plan)
    return [reader for reader in folder_readers(plan.layout.name) if not refusals.get(reader.program)]


def _problems(plan: "ConversionPlan") -> "tuple[MoEProblem, ...]":
    return tuple(dict.fromkeys(group.problem for group in plan.groups))


def serve_commands(plan: "ConversionPlan", target: Path) -> tuple[str, ...]:
    """The commands by which engines serve the finished `target` as it is; none for experts alone."""
    if plan.finalizer is not None or plan.experts_only:
        return ()
    from ...integrations.served_engines import directory_commands

    shard = plan.shard
    return directory_commands(str(target), plan.layout.name, _problems(plan), shard.tp_size, shard.ep_size)


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


def shared_tensor_bytes(plans: "Sequence[RankPlan]") -> int:
    """Bytes of the tensors that are written once above the directories of several ranks."""
    from ...convert.plan.kernel_layout_plan import shared_passthrough

    if plans[0].plan.shard.ranks == 1:
        return 0
    return sum(info.nbytes for item in shared_passthrough(plans[0].plan) for info in item.tensors)


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
        "readers": list(layout.readers) if portable else list(map(str, _readers(plan))),
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
        parts = [item.worker_plan for item in plans]
        written, disk = (sum(part.bytes_out for part in parts), sum(part.disk_needed for part in parts))
        seconds = sum(part.bytes_in for part in parts) / rate.bytes_per_second
        total = f"{size(written)} written, {size(disk)} of disk needed, in about {duration(seconds)}"
        shared = size(shared_tensor_bytes(plans))
        rows = {f"all {len(parts)} ranks": total} if len(parts) > 1 else {}
        _print_labelled(rows | {"above them": f"{shared} of other tensors, linked or copied once"}, console)
    draw_plan(plans[0].worker_plan, rate, console)


def _print_labelled(rows: dict[str, str], console: Any) -> None:
    """Prints labels and values, wrapped to the console's width."""
    for line, _ in labelled(tuple(rows.items()), console.width, 0):
        console.print(line, soft_wrap=True)


def draw_plan(plan: "ConversionPlan", rate: "ConversionRate", console: Any) -> None:
    """Prints a plan: its tensors, readers, sizes, and estimated duration."""
    if not plan.layers:
        console.print("this part has no layers; nothing was written (--dry-run)")
        return
    first = plan.layers[0]
    numbers = [layer.layer for layer in plan.layers if layer.layer >= 0]
    seen: dict[str, tuple[str, str]] = {}
    for info in first.file.tensors.values():
        stored = (f"{info.dtype} {list(info.shape)}", first.logical_dtypes.get(info.name, info.dtype))
        seen.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", info.name), stored)
    # What all names begin with is in the head of their column.
    parts = zip(*(name.split(".")[:-1] for name in seen), strict=False)
    common = ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))
    # Only what is stored in another dtype than its own has to be told apart.
    packed = any(stored[0].split()[0] != stored[1] for stored in seen.values())
    of = f"rank {plan.shard.rank}, " if plan.shard.ranks > 1 else ""
    plan_table = table(
        f"{common}." if common else "tensor",
        "stored as",
        *(["holds"] if packed else []),
        title=f"{of}{plan.layout.name}: {'each of ' if len(numbers) > 1 else ''}{layers_of(numbers)}",
    )
    for name, stored in seen.items():
        plan_table.add_row(name[len(common) + 1 :] if common else name, *stored[: 2 if packed else 1])
    console.print(plan_table)
    readers = "; ".join(plan.layout.readers) or "no engine"
    rows = {
        **({"read by": readers} if plan.finalizer else folder_rows(plan)),
        **{kind: f"{layers_of(layers)}: {KINDS[kind]}" for kind, layers in layer_kinds(plan).items()},
        "expert tensors": f"{plan.tensors_in} in, {plan.tensors_out} out",
        "expert bytes": f"{size(plan.bytes_in)} in, {size(plan.bytes_out)} out"
        + (f" (rank {plan.shard.rank}'s share of them)" if plan.shard.ranks > 1 else ""),
        "other tensors": f"{size(plan.passthrough_bytes)} linked or copied"
        if plan.passthrough
        else "skipped"
        if plan.experts_only or plan.shard.ranks == 1
        else "above all ranks, once",
        "disk needed": size(plan.disk_needed),
        "peak memory": f"{gib(plan.peak_memory)} above the program's own",
        "time": f"about {duration(plan.bytes_in / rate.bytes_per_second)}, "
        f"at {size(rate.bytes_per_second)}/s as {'measured on this CPU' if rate.measured else 'assumed'}",
    }
    _print_labelled(rows, console)
    console.print("nothing was written (--dry-run)")


def folder_rows(plan: "ConversionPlan") -> dict[str, str]:
    """Who loads a directory in a kernel layout, and which kernels have that layout."""
    return {
        "loaded by": "; ".join(map(str, _readers(plan))),
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
    console.print(f"{target}: {plans[0].plan.layout.name}, {text}{scope}")
    for name in summaries[0].skipped_files:
        console.print(f"skipped: {name}")
    if costs:
        draw_costs(target, console)


def draw_costs(folder: Path, console: Any) -> None:
    """Prints the quantization errors from the report of a portable output."""
    from ...convert.portable.report_fragments import CostTable, read_report

    report = read_report(folder)
    costs = CostTable(report["layers"])
    kinds = {}
    for kind, layers in report["layer_kinds"].items():
        exact = kind == "repacked" and costs.lossless(layers)
        named = layers_of(layers)
        kinds["repacked exactly" if exact else kind] = named if exact else f"{named}: {KINDS[kind]}"
    _print_labelled(kinds, console)
    rows = list(costs.rows())
    filled = [i for i in range(len(costs.columns)) if any(row[i] for row in rows)]
    plan_table = table(*(costs.columns[i] for i in filled))
    for row in rows:
        plan_table.add_row(*(row[i] for i in filled))
    if rows:
        console.print(plan_table)

"""`moectl convert`: writes expert weights in a kernel layout or a portable format, ahead of time."""

import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...convert.portable.options import PortableOptions
from ...errors import CheckpointError, ExitCode, UsageError
from ...files.strict_json import shown
from ...problem.portable_formats import CONTAINERS, PORTABLE
from ..options import (
    ActivationOption,
    CheckpointArg,
    Offline,
    RecordOptions,
    RoutingOption,
    framed,
    option,
    split_names,
)
from ..output import Output, count, size
from ..warm.warming import MOST_TOKENS, Warmed, compiled, converted_layers, named_gpu
from .planner import TargetOptions, planner
from .text import (
    draw_done,
    draw_plans,
    finished_document,
    plan_document,
    ranks_document,
    serve_commands,
    source_bytes,
    unread_warning,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...convert.execute.convert import ConversionSummary
    from ...convert.execute.rank_plans import RankPlan
    from ...environment import Device

EXAMPLES = (
    "moectl convert ./gpt-oss-20b ./marlin-tp4 --to marlin --tp-size 4",
    "moectl convert ./Qwen3-30B-A3B ./int4 --to int4-g128",
    "moectl convert ./kimi ./marlin --to marlin --device cuda --part 2/4",
)
MORE = ["Readers of layouts and formats: moectl list layouts, moectl list formats"]


PORTABLE_OPTIONS = RecordOptions(
    PortableOptions,
    container=option("--container", help=f"For a portable format: {', '.join(CONTAINERS)}."),
    method=option("--method", help="search (default), rtn; gptq (default with --calibration)."),
    rule=option("--mx-scale", help="MXFP4's block scales: floor (default), even, up."),
    calibration=option("--calibration", help="Safetensors with activations x [tokens, hidden]."),
    requantize=option("--requantize", help="Allow lossy requantization of quantized weights."),
    include_unquantized=option(
        "--include-unquantized", help="Also convert layers that the source leaves 16-bit."
    ),
)
"""Options of portable formats; `requantize` also applies to layouts."""


@dataclass(frozen=True)
class RankOptions:
    """Options that select the ranks whose slices of the experts are converted."""

    tp_size: Annotated[int, option("--tp-size", help="Slice each expert over this many ranks.", min=1)] = 1
    ep_size: Annotated[int, option("--ep-size", help="Distribute experts over this many ranks.", min=1)] = 1
    rank: Annotated[int | None, option("--rank", help="This rank alone, into OUT/rank-NN.", min=0)] = None


@dataclass(frozen=True)
class ExecutionOptions:
    """Options that control how a conversion is executed."""

    dry_run: Annotated[bool, option("--dry-run", help="Plan from headers alone; write nothing.")] = False
    resume: Annotated[bool, option("--resume", help="Finish a conversion that was interrupted.")] = False
    part: Annotated[str | None, option("--part", help="2/4: the second of four processes to fill OUT.")] = (
        None
    )
    finish: Annotated[bool, option("--finish", help="Complete OUT once all parts or ranks are done.")] = False
    threads: Annotated[
        int | None, option("--threads", help="Worker threads; default: all cores.", min=1, max=1024)
    ] = None
    device: Annotated[
        str,
        option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.", own=True),
    ] = "cpu"
    warm: Annotated[
        str | None, option("--warm", help="Then compile moectl's kernels for GPUs: h200,sm120.")
    ] = None

    def check(self, ranks: RankOptions) -> None:
        """Raises UsageError for options that cannot be combined."""
        if self.finish and (self.part is not None or self.dry_run or self.resume):
            raise UsageError("--finish cannot be combined with --part, --resume or --dry-run")
        partial = self.part is not None or self.dry_run or (ranks.rank is not None and not self.finish)
        if self.warm is not None and partial:
            raise UsageError(
                "--warm needs a complete directory, which --part, --rank and --dry-run do not write",
                hint="give it to --finish, or leave it out",
            )

    def gpus(self, layout: str) -> "list[Device]":
        """The GPUs for which the kernels of a directory in `layout` are compiled.

        Raises UsageError if moectl has none for one of them, or compiles none for the layout.
        """
        if self.warm is None:
            return []
        from ...kernels.triton.offline_gpu import OfflineGpu
        from ...layer.warm_layers import own_layouts

        if layout not in (own := own_layouts()):
            raise UsageError(
                f"--warm compiles moectl's kernels, which read {', '.join(own)}, not {layout}",
                hint="leave it out, or convert --to moectl",
            )
        devices = [named_gpu(name, "--warm") for name in split_names(self.warm, "--warm")]
        for device in devices:
            OfflineGpu.of(device)
        return devices


@framed("convert")
def convert(
    checkpoint: CheckpointArg,
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new or empty directory.", show_default=False)
    ],
    *,
    output: TargetOptions,
    portable: Annotated[Callable[..., PortableOptions], PORTABLE_OPTIONS],
    max_memory: Annotated[
        str | None, option("--max-memory", help="Bound such as 2GB; default: a quarter of RAM.")
    ] = None,
    ranks: RankOptions,
    execution: ExecutionOptions,
    activation: ActivationOption = None,
    routing: RoutingOption = None,
    offline: Offline = False,
    out: Output,
) -> ExitCode:
    """Write expert weights in a kernel's layout or another format.

    Streamed and resumable. A layout is a bit-exactly reversible cache that moectl and its plug-ins load;
    a portable format is an ordinary checkpoint for engines.
    """
    output = output.spelled()
    memory = None if max_memory is None else parse_size(max_memory)
    execution.check(ranks)

    from ...checkpoint import open_checkpoint
    from ...checkpoint.config.user_assumptions import parse_assumptions

    source = open_checkpoint(checkpoint, offline=offline, assumptions=parse_assumptions(activation, routing))
    if not source.groups:
        raise CheckpointError(f"{checkpoint} has no MoE layers", hint="`moectl explain` shows what it holds")

    from ...convert.execute.rank_plans import check_outputs, plan_ranks
    from ...convert.worker_partition import parse_partition

    plan = planner(source, output, portable(target=output.to), memory)
    plans = plan_ranks(target, ranks.tp_size, ranks.ep_size, ranks.rank, plan)
    gpus = execution.gpus(plans[0].plan.layout.name)
    if execution.finish:
        return _finish(plans, target, gpus, out)
    partition = None if execution.part is None else parse_partition(execution.part)
    plans = tuple(replace(item, partition=partition) for item in plans)
    check_outputs(source.folder, target, plans, execution.resume)
    if source.origin.note:
        out.note(f"read from the {source.origin.kind}: {source.origin.note}")
    for note in source.notes:
        out.note(note)
    if warning := unread_warning(plans[0].plan):
        out.note(warning)
    if execution.dry_run:
        _plan(plans, execution.threads, out)
        return ExitCode.DONE
    begin = time.perf_counter()
    summaries = _convert(plans, execution, target, out)
    seconds = time.perf_counter() - begin
    documents = [
        finished_document(item, summary, seconds) for item, summary in zip(plans, summaries, strict=True)
    ]
    costs = output.to in PORTABLE and partition is None
    code = _result(
        plans,
        documents,
        target,
        gpus,
        lambda console: draw_done(target, plans, summaries, seconds, console, costs=costs),
        out,
    )
    if partition is None:
        _what_next(plans, target, out)
    else:
        out.note(f"part {partition} is done; complete {target} with --finish when all parts are")
    return code


def _result(
    plans: "Sequence[RankPlan]",
    documents: list[dict[str, Any]],
    target: Path,
    gpus: "Sequence[Device]",
    draw: Callable[[Any], None],
    out: Output,
) -> ExitCode:
    """Compiles the directories' kernels for `gpus`, and prints what was done."""
    warmed = _warmed(target, gpus, out)
    document = ranks_document(plans, documents)
    if warmed:
        document["warmed"] = [result.document() for result in warmed]

    def draw_all(console: Any) -> None:
        draw(console)
        for result in warmed:
            result.draw(console)

    out.result(document, draw_all, str(target))
    return ExitCode.FOUND if any(result.failed for result in warmed) else ExitCode.DONE


def _warmed(target: Path, gpus: "Sequence[Device]", out: Output) -> list[Warmed]:
    if not gpus:
        return []
    from ...layer.warm_layers import WarmPlan

    layers = converted_layers(target)
    return [compiled(layers, WarmPlan(gpu, MOST_TOKENS), out) for gpu in gpus]


def _finish(plans: "Sequence[RankPlan]", target: Path, gpus: "Sequence[Device]", out: Output) -> ExitCode:
    """Finishes directories that all workers have filled."""
    from ...convert.execute.rank_plans import complete_ranks

    summaries = complete_ranks(plans)
    layout = plans[0].plan.layout.name
    documents = [
        {
            "folder": str(summary.folder),
            "layout": layout,
            "resumed_layers": list(summary.resumed),
            "skipped_files": list(summary.skipped_files),
        }
        for summary in summaries
    ]
    layers = len({layer for summary in summaries for layer in summary.resumed if layer >= 0})
    text = f"{target}: {layout}, complete with {count(layers, 'layer')}"
    code = _result(plans, documents, target, gpus, lambda console: console.print(text), out)
    _what_next(plans, target, out)
    return code


def _what_next(plans: "Sequence[RankPlan]", target: Path, out: Output) -> None:
    """Says what to do once the plans are executed: check and serve, or convert the ranks that it lacks."""
    from ...convert.execute.shared_files import unfinished_ranks
    from ...problem.layer_ranges import ranges

    ranks = plans[0].plan.shard.ranks
    if ranks > 1 and (missing := unfinished_ranks(target, ranks)):
        name = "rank" if len(missing) == 1 else "ranks"
        out.note(f"{target} lacks {name} {ranges(missing)} of {ranks}; it is completed with the last of them")
        return
    out.note(f"check it with: {shlex.join(['moectl', 'verify', str(target)])}")
    for command in serve_commands(plans[0].plan, target):
        out.note(f"serve it with: {command}")


def _plan(plans: "Sequence[RankPlan]", threads: int | None, out: Output) -> None:
    """Prints the plan and an estimate of its duration."""
    from ...convert.plan.rate_estimate import measured_rate

    rate = measured_rate(plans[0].plan, threads)
    estimates = [
        {
            **plan_document(item.worker_plan),
            "seconds_estimate": item.worker_plan.bytes_in / rate.bytes_per_second,
            "rate_measured": rate.measured,
        }
        for item in plans
    ]
    written = sum(item.worker_plan.bytes_out for item in plans)
    out.result(
        ranks_document(plans, estimates), lambda console: draw_plans(plans, rate, console), str(written)
    )


def _convert(
    plans: "Sequence[RankPlan]", execution: ExecutionOptions, target: Path, out: Output
) -> "list[ConversionSummary]":
    """Converts the ranks one after the other."""
    import_module("torch")  # before anything is written
    from ...convert.execute.convert import convert as convert_rank
    from ...convert.execute.rank_plans import convert_ranks

    read, written = source_bytes(plans), sum(item.worker_plan.bytes_out for item in plans)
    out.note(f"{plans[0].plan.layout.name}: {size(read)} of experts -> {size(written)} in {target}")
    try:
        with out.progress("converting") as progress:
            return convert_ranks(
                plans,
                lambda item, report: convert_rank(
                    item.plan,
                    item.folder,
                    resume=execution.resume,
                    progress=report,
                    threads=execution.threads,
                    device=execution.device,
                    partition=item.partition,
                ),
                progress,
            )
    except KeyboardInterrupt:
        out.note(f"finished layers remain in {target}; continue with --resume")
        raise


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}


def parse_size(text: str) -> int:
    """Bytes of ``2GB``, ``512MiB``, ``1.5G`` or ``1000000``; UsageError for anything else."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise UsageError(f"a size must look like 2GB, 512MiB or 1000000, got {shown(text)}")
    if float(match[1]) * UNITS[match[2]] >= 1 << 60:
        raise UsageError(f"a size must be below {1 << 60} bytes, got {shown(text)}")
    return int(float(match[1]) * UNITS[match[2]])

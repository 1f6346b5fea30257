"""`moectl convert`: expert weights in a backend's kernel layout, ahead of time."""

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckpointError, UsageError
from ..portable import CONTAINERS, PORTABLE
from ..targets import ACTS, LAYOUTS, TARGETS
from .converted import draw_done, draw_plans, finished_document, plan_document, ranks_document
from .converting import Asked, planner
from .options import Activation, CheckpointArg, Offline, Routing, framed, option, pick
from .output import Output, count, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..convert.rank_plans import RankPlan
    from ..convert.stream import Summary

EXAMPLES = (
    "moectl convert ./gpt-oss-20b ./marlin --to marlin",
    "moectl convert ./gpt-oss-20b ./marlin-tp4 --to marlin --tp-size 4",
    "moectl convert ./Qwen3-30B-A3B ./int4 --to int4-g128",
    "moectl convert ./kimi ./marlin --to marlin --device cuda --part 2/4",
)
MORE = ["Who reads what: moectl list layouts, moectl list formats"]


@dataclass(frozen=True)
class Wanted:
    """Options that say what is made."""

    to: Annotated[
        str,
        option(
            "--to",
            help=f"Layout: {', '.join(TARGETS)}; or portable format: {', '.join(PORTABLE)}.",
            show_default=False,
        ),
    ]
    arch: Annotated[str | None, option("--arch", help="sm90, sm100, ...: where --to alone is ambiguous.")] = (
        None
    )
    act: Annotated[str | None, option("--act", help=f"Activations the layout is for: {', '.join(ACTS)}.")] = (
        None
    )
    experts_only: Annotated[bool, option("--experts-only", help="Leave out tensors that are no experts.")] = (
        False
    )
    container: Annotated[
        str | None, option("--container", help=f"Of a portable format: {', '.join(CONTAINERS)}.")
    ] = None
    method: Annotated[
        str | None, option("--method", help="search (default), rtn; gptq (default with --calibration).")
    ] = None
    mx_scale: Annotated[
        str | None, option("--mx-scale", help="MXFP4's block scales: floor (default), even, up.")
    ] = None
    calibration: Annotated[
        Path | None, option("--calibration", help="Safetensors with activations x [tokens, hidden].")
    ] = None
    requantize: Annotated[
        bool, option("--requantize", help="Let weights that were quantized before lose more.")
    ] = False
    max_memory: Annotated[
        str | None, option("--max-memory", help="Bound such as 2GB; default: a quarter of RAM.")
    ] = None

    def asked(self) -> Asked:
        """The same in the spelling of what is known; UsageError for what is not."""
        archs = sorted({a for facts in LAYOUTS.values() for a in facts.archs})
        return Asked(
            pick(self.to, [*TARGETS, *PORTABLE], "layout or format"),
            None if self.arch is None else pick(self.arch, archs, "architecture"),
            None if self.act is None else pick(self.act, ACTS, "activation format"),
            self.container,
            self.method,
            self.mx_scale,
            self.calibration,
            self.requantize,
            None if self.max_memory is None else parse_size(self.max_memory),
            self.experts_only,
        )


@dataclass(frozen=True)
class Ranks:
    """Options that say whose share of the experts is converted."""

    tp_size: Annotated[int, option("--tp-size", help="Slice each expert over so many ranks.", min=1)] = 1
    ep_size: Annotated[int, option("--ep-size", help="Spread experts over so many ranks.", min=1)] = 1
    rank: Annotated[
        int | None, option("--rank", help="This rank alone, into OUT; default: all, OUT/rank-00, ...", min=0)
    ] = None


@dataclass(frozen=True)
class Doing:
    """Options that say how far a conversion goes, and with what."""

    dry_run: Annotated[bool, option("--dry-run", help="Plan from headers alone; write nothing.")] = False
    resume: Annotated[bool, option("--resume", help="Finish a conversion that was interrupted.")] = False
    part: Annotated[
        str | None, option("--part", help="2/4: the second of four processes that fill OUT together.")
    ] = None
    finish: Annotated[bool, option("--finish", help="Complete OUT when all its parts are there.")] = False
    threads: Annotated[
        int | None, option("--threads", help="1: one thing after another; default: all cores.", min=1)
    ] = None
    device: Annotated[
        str,
        option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.", own=True),
    ] = "cpu"

    def check(self) -> None:
        """UsageError for options that do not go together."""
        if self.finish and (self.part is not None or self.dry_run or self.resume):
            raise UsageError("--finish goes with neither --part nor --resume nor --dry-run")


@framed("convert")
def convert(
    checkpoint: CheckpointArg,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.", show_default=False)],
    *,
    wanted: Wanted,
    ranks: Ranks,
    doing: Doing,
    activation: Activation = None,
    routing: Routing = None,
    offline: Offline = False,
    out: Output,
) -> None:
    """Write expert weights in a kernel's layout or another format.

    Streamed layer by layer and resumable. A layout is a cache for its backend, bit-exactly reversible;
    a portable format is an ordinary checkpoint. Ranks (--tp-size, --ep-size) get folders of their own.
    """
    asked = wanted.asked()
    doing.check()

    from ..checkpoint import open_checkpoint
    from ..checkpoint.stated import parse_stated

    source = open_checkpoint(checkpoint, offline=offline, stated=parse_stated(activation, routing))
    if not source.groups:
        raise CheckpointError(f"{checkpoint} has no MoE layers", hint="`moectl explain` shows what it holds")

    from ..convert.portions import portion_of
    from ..convert.rank_plans import check_outputs, plan_ranks

    plans = plan_ranks(target, ranks.tp_size, ranks.ep_size, ranks.rank, planner(source, asked))
    if doing.finish:
        return _finish(plans, target, out)
    portion = None if doing.part is None else portion_of(doing.part)
    plans = tuple(replace(item, portion=portion) for item in plans)
    check_outputs(source.folder, target, plans, doing.resume)
    if source.origin.note:
        out.note(f"read from the {source.origin.kind}: {source.origin.note}")
    for note in source.notes:
        out.note(note)
    if doing.dry_run:
        return _plan(plans, doing.threads, out)
    begin = time.perf_counter()
    summaries = _convert(plans, doing, target, out)
    seconds = time.perf_counter() - begin
    documents = [
        finished_document(item, summary, seconds) for item, summary in zip(plans, summaries, strict=True)
    ]
    out.result(
        ranks_document(documents),
        lambda console: draw_done(
            target, plans, summaries, seconds, console, costs=asked.to in PORTABLE and portion is None
        ),
        str(target),
    )
    if portion is None:
        out.note(f"check it with: moectl verify {target}")
    else:
        out.note(f"part {portion} is there; complete {target} with --finish when all parts are")
    return None


def _finish(plans: "Sequence[RankPlan]", target: Path, out: Output) -> None:
    """Completes what all parts have written."""
    from ..convert.stream import complete

    summaries = [complete(item.plan, item.folder) for item in plans]
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
    layers = sum(len(summary.resumed) for summary in summaries)
    text = f"{target}: {layout}, complete with {count(layers, 'layer')}"
    out.result(ranks_document(documents), lambda console: console.print(text, markup=False), str(target))
    out.note(f"check it with: moectl verify {target}")


def _plan(plans: "Sequence[RankPlan]", threads: int | None, out: Output) -> None:
    """Shows what would be done."""
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
    written = sum(item.own.bytes_out for item in plans)
    out.result(ranks_document(estimates), lambda console: draw_plans(plans, rate, console), str(written))


def _convert(plans: "Sequence[RankPlan]", doing: Doing, target: Path, out: Output) -> "list[Summary]":
    """Converts one rank after the other."""
    from ..convert.rank_plans import convert_ranks
    from ..convert.stream import convert as library

    read, written = (
        sum(sizes) for sizes in zip(*((it.own.bytes_in, it.own.bytes_out) for it in plans), strict=True)
    )
    out.note(f"{plans[0].plan.layout.name}: {size(read)} of experts -> {size(written)} in {target}")
    try:
        with out.progress("converting") as progress:
            return convert_ranks(
                plans,
                lambda item, tell: library(
                    item.plan,
                    item.folder,
                    resume=doing.resume,
                    progress=tell,
                    threads=doing.threads,
                    device=doing.device,
                    portion=item.portion,
                ),
                progress,
            )
    except KeyboardInterrupt:
        out.note(f"the layers that are finished stay in {target}; --resume goes on from there")
        raise


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}


def parse_size(text: str) -> int:
    """Bytes of ``2GB``, ``512MiB``, ``1.5G`` or ``1000000``; UsageError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise UsageError(f"a size must look like 2GB, 512MiB or 1000000, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])

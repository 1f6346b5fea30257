"""Conversion plans of one rank or of all ranks, each with its output directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_folder, rank_number
from ...errors import UsageError
from ...files.lock import Busy
from ...files.output_folder import refuse_small_disk
from ..manifest.manifest_records import LOG, READY
from ..manifest.progress_log import Progress, remove_logs, silent
from ..plan.conversion_plan import ConversionPlan
from ..plan.kernel_layout_plan import shared_passthrough
from ..rank_slice import RankShard, shard_of
from ..worker_partition import WorkerPartition
from .convert import ConversionSummary, complete
from .output_checks import check_output
from .shared_files import finish_ranks, shared_bytes, unfinished_ranks


@dataclass(frozen=True)
class RankPlan:
    """A rank's plan, its output directory, and this worker's partition of the layers (None: all layers)."""

    folder: Path
    plan: ConversionPlan
    partition: WorkerPartition | None = None

    @property
    def worker_plan(self) -> ConversionPlan:
        """The part of the plan that this worker executes."""
        return self.plan if self.partition is None else self.plan.for_partition(self.partition)


def plan_ranks(
    out: Path, tp_size: int, ep_size: int, rank: int | None, plan: Callable[[RankShard], ConversionPlan]
) -> tuple[RankPlan, ...]:
    """The plan of `rank`, or of every rank, whose directories are ``out/rank-00`` and so on.

    With a single rank there is one plan, whose directory is `out`. Raises UsageError for a rank out of range,
    and what `plan` raises.
    """
    ranks = tp_size * ep_size
    if ranks == 1:
        return (RankPlan(out, plan(shard_of(rank or 0, tp_size, ep_size))),)
    numbers = range(ranks) if rank is None else (rank,)
    shards = [shard_of(number, tp_size, ep_size) for number in numbers]
    return tuple(RankPlan(rank_folder(out, shard.rank), plan(shard)) for shard in shards)


def check_outputs(source: Path | None, out: Path, plans: Sequence[RankPlan], resume: bool) -> None:
    """Raises UsageError if the plans of a checkpoint in `source` cannot be written to their directories.

    A directory of several ranks must contain only those, and what `finish_ranks` writes beside them; each
    rank's is checked by `check_output`.
    """
    ranks = plans[0].plan.shard.ranks
    if ranks > 1:
        if rank_number(out) is not None:
            raise UsageError(
                f"the output directory {out} has the name of one rank's, expected that of all ranks.",
                hint=f"Give {out.parent}, in which the directories of ranks are written.",
            )
        if out.exists() and not out.is_dir():
            raise UsageError(f"the output {out} is a file, not a directory.", hint="Choose another name.")
        of_ranks = {rank_folder(out, rank) for rank in range(ranks)}
        others = {path.name for path in out.iterdir() if path not in of_ranks} if out.is_dir() else set()
        if others and not others & {LOG, READY}:
            raise UsageError(
                f"the output directory {out} is for ranks only, but holds {min(others)}.",
                hint="Choose an empty directory.",
            )
        # Workers of a partitioned conversion find directories that other workers have created.
        existing = [item.folder.name for item in plans if item.folder.exists() and item.partition is None]
        if existing and not resume:
            raise UsageError(
                f"the output directory {out} has {', '.join(existing[:3])} already.",
                hint="Finish all ranks with --resume, or choose an empty directory.",
            )
        if others and not resume:
            raise UsageError(
                f"the output directory {out} holds a conversion: it has {min(others & {LOG, READY})}.",
                hint="Finish it with --resume, or choose an empty directory.",
            )
    for item in plans:
        check_output(source, item.folder, resume, item.partition, item.plan.mark)


def convert_ranks(
    plans: Sequence[RankPlan],
    convert: Callable[[RankPlan, Progress], ConversionSummary],
    progress: Progress = silent,
) -> list[ConversionSummary]:
    """Executes every plan with `convert`, one after the other, and returns the summaries.

    When the directories of all ranks are finished after that, whoever converted them, `finish_ranks` writes
    what they share. Raises Unavailable before the first one if the disk has no room for all of them. After an
    error, finished ranks remain; resuming recognizes them.
    """
    first = plans[0]
    shared = shared_passthrough(first.plan) if first.plan.shard.ranks > 1 else ()
    needed = sum(item.worker_plan.bytes_out for item in plans if not item.folder.exists())
    if len(plans) > 1 and needed:
        refuse_small_disk(
            first.folder, needed + shared_bytes(shared), "Make room, or convert rank by rank with --rank."
        )
    totals = [item.worker_plan.bytes_in + item.worker_plan.passthrough_bytes for item in plans]
    totals.append(sum(info.nbytes for item in shared for info in item.tensors))

    def report(step: int, name: str) -> Progress:
        before, total = sum(totals[:step]), sum(totals)
        return lambda done, _, text: progress(before + done, total, name + text)

    summaries = [
        convert(item, report(i, f"{item.folder.name}, " if len(plans) > 1 else ""))
        for i, item in enumerate(plans)
    ]
    if first.plan.shard.ranks > 1 and first.partition is None:
        skipped = _finish_if_all(first, report(len(plans), ""))
        summaries = [replace(summary, skipped_files=skipped) for summary in summaries]
    return summaries


def _finish_if_all(item: RankPlan, progress: Progress) -> tuple[str, ...]:
    out = item.folder.parent
    if unfinished_ranks(out, item.plan.shard.ranks):
        return ()
    try:
        return finish_ranks(item.plan, out, progress=progress)
    except Busy:  # The other process saw all ranks finished, too.
        return ()


def complete_ranks(plans: Sequence[RankPlan]) -> list[ConversionSummary]:
    """Finishes what parts have filled: each plan's directory, then what all ranks share if all are finished.

    Raises like `complete` and `finish_ranks`.
    """
    ranks = plans[0].plan.shard.ranks
    if ranks == 1:
        return [complete(item.plan, item.folder) for item in plans]
    summaries = [
        _found(item) if (item.folder / item.plan.mark).exists() else complete(item.plan, item.folder)
        for item in plans
    ]
    out = plans[0].folder.parent
    if len(plans) == ranks or not unfinished_ranks(out, ranks):
        skipped = finish_ranks(plans[0].plan, out)
        summaries = [replace(summary, skipped_files=skipped) for summary in summaries]
    return summaries


def _found(item: RankPlan) -> ConversionSummary:
    """The summary of a rank that was finished before; `finish_ranks` checks it."""
    remove_logs(item.folder, item.plan.mark)
    return ConversionSummary(item.folder, (), tuple(layer.layer for layer in item.plan.layers), 0, 0)

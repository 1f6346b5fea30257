"""Conversion plans of one rank or of all ranks, each with its output directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_folder
from ...errors import UsageError
from ...files.output_folder import refuse_small_disk
from ..manifest.progress_log import Progress, silent
from ..plan.conversion_plan import ConversionPlan
from ..rank_slice import RankShard, shard_of
from ..worker_partition import WorkerPartition
from .convert import ConversionSummary, check_output


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
    """The plan of `rank`, whose directory is `out`, or of every rank, in ``out/rank-00`` and so on.

    With a single rank there is one plan, whose directory is `out`. Raises UsageError for a rank out of range,
    and what `plan` raises.
    """
    ranks = tp_size * ep_size
    if rank is not None or ranks == 1:
        return (RankPlan(out, plan(shard_of(rank or 0, tp_size, ep_size))),)
    shards = [shard_of(number, tp_size, ep_size) for number in range(ranks)]
    return tuple(RankPlan(rank_folder(out, shard.rank), plan(shard)) for shard in shards)


def check_outputs(source: Path | None, out: Path, plans: Sequence[RankPlan], resume: bool) -> None:
    """Raises UsageError if the plans of a checkpoint in `source` cannot be written to their directories.

    A directory of all ranks must not contain anything else; each rank's is checked by `check_output`.
    """
    rank_folders = {item.folder for item in plans}
    if rank_folders != {out}:
        others = {path for path in out.iterdir() if path not in rank_folders} if out.is_dir() else set()
        if others:
            raise UsageError(
                f"the output directory {out} is for ranks only, but holds {min(others).name}.",
                hint="Choose an empty directory.",
            )
        if out.exists() and not out.is_dir():
            raise UsageError(f"the output {out} is a file, not a directory.", hint="Choose another name.")
        # Workers of a partitioned conversion find directories that other workers have created.
        existing = [item.folder.name for item in plans if item.folder.exists() and item.partition is None]
        if existing and not resume:
            raise UsageError(
                f"the output directory {out} has {', '.join(existing[:3])} already.",
                hint="Finish all ranks with --resume, or choose an empty directory.",
            )
    for item in plans:
        check_output(source, item.folder, resume, item.partition)


def convert_ranks(
    plans: Sequence[RankPlan],
    convert: Callable[[RankPlan, Progress], ConversionSummary],
    progress: Progress = silent,
) -> list[ConversionSummary]:
    """Executes every plan with `convert`, one after the other, and returns the summaries.

    Raises Unavailable before the first one if the disk has no room for all of them. After an error, finished
    ranks remain; resuming recognizes them.
    """
    needed = sum(item.worker_plan.bytes_out for item in plans if not item.folder.exists())
    if len(plans) > 1 and needed:
        refuse_small_disk(plans[0].folder, needed, "Make room, or convert rank by rank with --rank.")
    totals = [item.worker_plan.bytes_in + item.worker_plan.passthrough_bytes for item in plans]
    summaries: list[ConversionSummary] = []
    for i, item in enumerate(plans):
        before, name = sum(totals[:i]), f"{item.folder.name}, " if len(plans) > 1 else ""

        def report(done: int, total: int, text: str, before: int = before, name: str = name) -> None:
            progress(before + done, sum(totals), name + text)

        summaries.append(convert(item, report))
    return summaries

"""Plans of one rank or of all, each with the folder it is converted to."""

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
    """A rank's plan, its folder, and the part of its layers that is asked for; None for all."""

    folder: Path
    plan: ConversionPlan
    portion: WorkerPartition | None = None

    @property
    def own(self) -> ConversionPlan:
        """The plan of the part."""
        return self.plan if self.portion is None else self.plan.of_portion(self.portion)


def plan_ranks(
    out: Path, tp_size: int, ep_size: int, rank: int | None, plan: Callable[[RankShard], ConversionPlan]
) -> tuple[RankPlan, ...]:
    """The plan of `rank`, whose folder is `out`, or of every rank, in ``out/rank-00`` and so on.

    Layers that nobody shares are one plan, whose folder is `out`. Raises UsageError for a rank that
    there is not, and whatever `plan` raises.
    """
    ranks = tp_size * ep_size
    if rank is not None or ranks == 1:
        return (RankPlan(out, plan(shard_of(rank or 0, tp_size, ep_size))),)
    shards = [shard_of(each, tp_size, ep_size) for each in range(ranks)]
    return tuple(RankPlan(rank_folder(out, shard.rank), plan(shard)) for shard in shards)


def check_outputs(source: Path | None, out: Path, plans: Sequence[RankPlan], resume: bool) -> None:
    """Raises UsageError when the plans of a checkpoint in `source` cannot be converted to their folders.

    Of the folder of all ranks, nothing else may be in it; errors as of `check_output` for each.
    """
    folders = {item.folder for item in plans}
    if folders != {out}:
        found = {path for path in out.iterdir() if path not in folders} if out.is_dir() else set()
        if found:
            raise UsageError(
                f"the output folder {out} is for ranks alone, and holds {min(found).name}.",
                hint="Choose an empty folder.",
            )
        if out.exists() and not out.is_dir():
            raise UsageError(f"the output {out} is a file, not a folder.", hint="Choose another name.")
        # A part finds the folders that other parts have made.
        begun = [item.folder.name for item in plans if item.folder.exists() and item.portion is None]
        if begun and not resume:
            raise UsageError(
                f"the output folder {out} has {', '.join(begun[:3])} already.",
                hint="Finish all ranks with --resume, or choose an empty folder.",
            )
    for item in plans:
        check_output(source, item.folder, resume, item.portion)


def convert_ranks(
    plans: Sequence[RankPlan],
    convert: Callable[[RankPlan, Progress], ConversionSummary],
    progress: Progress = silent,
) -> list[ConversionSummary]:
    """Carries out every plan with `convert`, one after the other, and the summaries.

    Raises Unavailable, before the first begins, when there is no room on the disk for all of them; what
    is finished stays, and is found finished by a conversion that resumes.
    """
    needed = sum(item.own.bytes_out for item in plans if not item.folder.exists())
    if len(plans) > 1 and needed:
        refuse_small_disk(plans[0].folder, needed, "Make room, or convert rank by rank with --rank.")
    totals = [item.own.bytes_in + item.own.rest_bytes for item in plans]
    summaries: list[ConversionSummary] = []
    for i, item in enumerate(plans):
        begun, name = sum(totals[:i]), f"{item.folder.name}, " if len(plans) > 1 else ""

        def tell(done: int, total: int, text: str, begun: int = begun, name: str = name) -> None:
            progress(begun + done, sum(totals), name + text)

        summaries.append(convert(item, tell))
    return summaries

"""Finishes the directory above those of several ranks: what they share, and a manifest that names theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_folder
from ...errors import CheckpointError, UsageError
from ...files.output_folder import refuse_small_disk
from ..manifest.manifest import Deployment, load_directory, load_rank_record
from ..manifest.manifest_records import (
    FORMAT_VERSION,
    MANIFEST,
    READY,
    DeploymentRecord,
    FileRecord,
    RankRecord,
    expert_names,
    rank_manifest,
)
from ..manifest.progress_log import (
    Meter,
    Progress,
    ProgressLog,
    open_log,
    refuse_other_conversion,
    silent,
)
from ..manifest.rank_directories import check_one_conversion
from ..plan.conversion_plan import ConversionPlan, PassthroughPlan, conversion_facts
from ..plan.kernel_layout_plan import shared_passthrough
from ..plan.memory_budget import MIB
from ..stream.source_reader import FolderReader
from .convert import folder_of, other_checkpoint, source_facts
from .finish import producer, write_signed, write_small_files
from .passthrough import passthrough_sha256, source_record, write_passthrough

OF_ONE_RANK = frozenset({"rank", "layer groups"})
"""Facts of a conversion in which ranks differ."""


def unfinished_ranks(out: Path, ranks: int) -> list[int]:
    """Numbers of the ranks whose directories in `out` are missing or not finished."""
    return [rank for rank in range(ranks) if not (rank_folder(out, rank) / MANIFEST).exists()]


def shared_bytes(passthrough: Sequence[PassthroughPlan]) -> int:
    """Bytes of disk that the files above the ranks take if none can be linked."""
    return sum(info.nbytes for item in passthrough for info in item.tensors) + 16 * MIB


def ranks_fingerprint(plan: ConversionPlan) -> dict[str, str]:
    """Facts that must be equal for finishing the ranks' directories to be resumed, by name."""
    shard = plan.shard
    return {**_shared_facts(plan), "ranks": f"tp {shard.tp_size}, ep {shard.ep_size}"}


def _shared_facts(plan: ConversionPlan) -> dict[str, str]:
    source = source_record(plan.checkpoint, folder_of(plan))
    facts = {**conversion_facts(plan), **source_facts(source)}
    return {key: value for key, value in facts.items() if key not in OF_ONE_RANK}


def finish_ranks(
    plan: ConversionPlan, out: Path, *, progress: Progress = silent, log: ProgressLog | None = None
) -> tuple[str, ...]:
    """Writes what all ranks in `out` share, their manifest, and READY last. Returns the skipped files.

    Passthrough tensors and small files of the source are there once, above the directories of the ranks,
    whose files are checked by their sizes. If `out` is finished already, it is only checked whether it is
    the same conversion; its manifest is written anew if a rank was converted again.

    Args:
        plan: the plan of any rank.
        log: the log of `out` with `ranks_fingerprint`, if it is open already; it is closed.

    Raises:
        UsageError: a rank is not finished, or a directory holds another conversion.
        CheckpointError: a rank's files are damaged, or ranks were converted from different bytes.
        Busy: another process is finishing `out`.
        Unavailable: no room on the disk.
    """
    folder, shard = folder_of(plan), plan.shard
    source, facts = source_record(plan.checkpoint, folder), _shared_facts(plan)
    if missing := unfinished_ranks(out, shard.ranks):
        names = ", ".join(rank_folder(out, rank).name for rank in missing[:8])
        raise UsageError(
            f"{out} is not complete: it lacks {names} of {shard.ranks} ranks.",
            hint="Convert what is missing with --rank, and with --resume if it was started.",
        )
    records = [_finished_rank(plan, out, rank, facts) for rank in range(shard.ranks)]
    check_one_conversion(records)
    passthrough = shared_passthrough(plan)
    if (out / READY).exists():
        if _names(out, plan.shard.ranks, passthrough, folder):
            return ()
        (out / READY).unlink()
    refuse_small_disk(out, shared_bytes(passthrough), "Make room, then finish with --finish.")
    log = log or open_log(out, ranks_fingerprint(plan))
    try:
        meter = Meter(progress, sum(info.nbytes for item in passthrough for info in item.tensors))
        with FolderReader(folder) as reader:
            rest = []
            for item in passthrough:
                meter.start(item.name)
                rest.append(write_passthrough(item, reader, folder, out, log, meter))
        files, documents, skipped = write_small_files(plan, passthrough, folder, out)
        record = DeploymentRecord(
            format_version=FORMAT_VERSION,
            producer=producer(),
            source=source,
            layout=plan.layout,
            tp_size=shard.tp_size,
            ep_size=shard.ep_size,
            experts_only=plan.experts_only,
            layers=tuple(layer.layer for layer in plan.layers),
            experts=expert_names(plan.groups),
            ranks=tuple(_manifest_file(out, rank) for rank in range(shard.ranks)),
            rest=tuple(rest),
            files=files,
            documents=documents,
        )
        write_signed(out, record)
    except BaseException:
        log.close()
        raise
    log.close(remove=True)
    return skipped


def _manifest_file(out: Path, rank: int) -> FileRecord:
    data = (rank_folder(out, rank) / MANIFEST).read_bytes()
    return FileRecord(rank_manifest(rank), len(data), hashlib.sha256(data).hexdigest())


def _finished_rank(plan: ConversionPlan, out: Path, rank: int, facts: dict[str, str]) -> RankRecord:
    """The manifest of a finished rank of the same conversion, whose files have their sizes."""
    folder = rank_folder(out, rank)
    record = load_rank_record(folder)
    shard = (record.shard.rank, record.shard.tp_size, record.shard.ep_size)
    if shard != (rank, plan.shard.tp_size, plan.shard.ep_size):
        raise UsageError(
            f"{folder} holds {record.shard}, not rank {rank} of {plan.shard.ranks} "
            f"(tp {plan.shard.tp_size}, ep {plan.shard.ep_size}).",
            hint="Put each rank's directory under its own name, or give the sizes of this deployment.",
        )
    existing = {**conversion_facts(record), **source_facts(record.source)}
    refuse_other_conversion(folder, {key: existing[key] for key in facts}, facts)
    for layer in record.layers:
        path = folder / layer.file
        if not path.is_file() or path.stat().st_size != layer.size:
            raise CheckpointError(
                f"{folder.name}/{layer.file} was finished but is now missing or changed.",
                hint=f"Remove {folder}, and convert it again with --rank {rank}.",
            )
    return record


def _names(out: Path, ranks: int, passthrough: Sequence[PassthroughPlan], folder: Path) -> bool:
    """Whether the manifest in `out` is that of the ranks there, which may have been converted again.

    Raises UsageError if it is another conversion's, or of a checkpoint with other bytes.
    """
    found = load_directory(out)
    if not isinstance(found, Deployment) or found.ranks != ranks:
        raise UsageError(f"{out} holds another conversion.", hint="Choose an empty directory.")
    hashes = {item.file: item.sha256 for item in found.record.rest}
    with FolderReader(folder) as reader:
        for item in passthrough:
            if passthrough_sha256(item, reader, folder) != hashes.get(item.name):
                raise other_checkpoint(out, item.name)
    return all(found.record.ranks[rank] == _manifest_file(out, rank) for rank in range(ranks))

"""Finishes the directory above those of several ranks: what they share, and a manifest that names theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_folder
from ...errors import CheckpointError, UsageError
from ...files.atomic import disk_errors, remove_file, sync_folder
from ...files.folder_handle import read_inside
from ...files.output_folder import refuse_small_disk
from ..manifest.manifest import Deployment, load_directory, load_rank_record
from ..manifest.manifest_records import (
    FORMAT_VERSION,
    MANIFEST,
    READY,
    DeploymentRecord,
    FileRecord,
    RankRecord,
    SourceRecord,
    expert_names,
    rank_manifest,
)
from ..manifest.progress_log import (
    Meter,
    Progress,
    ProgressLog,
    open_log,
    refuse_other_conversion,
    remove_logs,
    silent,
)
from ..manifest.rank_directories import check_one_conversion
from ..manifest.signed_document import LONGEST_MANIFEST
from ..plan.conversion_plan import ConversionPlan, PassthroughPlan, conversion_facts
from ..plan.kernel_layout_plan import shared_passthrough
from ..plan.memory_budget import MIB
from ..plan.source_pin import pin_source, source_record
from ..stream.source_reader import FolderReader
from .convert import folder_of, other_checkpoint, source_facts
from .finish import producer, write_signed, write_small_files
from .passthrough import passthrough_sha256, write_passthrough

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
    facts = _shared_facts(plan, source_record(plan.checkpoint, folder_of(plan)))
    return {**facts, "ranks": f"tp {shard.tp_size}, ep {shard.ep_size}"}


def _shared_facts(plan: ConversionPlan, source: SourceRecord) -> dict[str, str]:
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
        UsageError: a rank is not finished, or a directory holds another conversion, or one of a source with
            other bytes.
        CheckpointError: a rank's files are damaged, ranks were converted from different bytes, or the source
            changed meanwhile.
        Busy: another process is finishing `out`.
        Unavailable: no room on the disk.
    """
    if (out / READY).exists() and _is_finished(plan, out):
        remove_logs(out, READY)
        return ()
    shard, passthrough = plan.shard, shared_passthrough(plan)
    refuse_small_disk(out, shared_bytes(passthrough), "Make room, then finish with --finish.")
    _refuse_unfinished(plan, out)
    source = pin_source(plan.checkpoint, folder_of(plan))
    log = log or open_log(out, ranks_fingerprint(plan), access=source.access)
    try:
        # Another process may have finished, or converted a rank again, before the log was locked.
        if (out / READY).exists() and _is_finished(plan, out):
            log.close(remove=True)
            return ()
        _check_ranks(plan, source.record, out)
    except BaseException:
        log.close(remove=log.new)
        raise
    try:
        remove_file(out / READY)
        with disk_errors(out, 0):
            sync_folder(out)
        meter = Meter(progress, sum(info.nbytes for item in passthrough for info in item.tensors))
        with FolderReader(source.folder) as reader:
            source.check_open(reader)
            rest = []
            for item in passthrough:
                meter.start(item.name)
                rest.append(write_passthrough(item, reader, source, out, log, meter))
        files, documents, skipped = write_small_files(plan, passthrough, source, out)
        record = DeploymentRecord(
            format_version=FORMAT_VERSION,
            producer=producer(),
            source=source.record,
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
        source.check()
        write_signed(out, record, source.access)
    except BaseException:
        log.close()
        raise
    log.close(remove=True)
    return skipped


def _refuse_unfinished(plan: ConversionPlan, out: Path) -> None:
    """Raises UsageError if a rank's directory is missing or not finished."""
    shard = plan.shard
    if missing := unfinished_ranks(out, shard.ranks):
        names = ", ".join(rank_folder(out, rank).name for rank in missing[:8])
        raise UsageError(
            f"{out} is not complete: it lacks {names} of {shard.ranks} ranks.",
            hint="Convert what is missing with --rank, and with --resume if it was started.",
        )


def _check_ranks(plan: ConversionPlan, source: SourceRecord, out: Path) -> None:
    """Raises UsageError or CheckpointError unless the ranks in `out` are of `plan` and of one `source`."""
    _refuse_unfinished(plan, out)
    facts = _shared_facts(plan, source)
    records = [_finished_rank(plan, out, rank, facts) for rank in range(plan.shard.ranks)]
    check_one_conversion(records)
    for rank, record in enumerate(records):
        if changed := source.resampled(record.source):
            raise other_checkpoint(rank_folder(out, rank), changed[0])


def _is_finished(plan: ConversionPlan, out: Path) -> bool:
    """Whether the finished `out` has the manifest of the ranks that are there; raises like `finish_ranks`."""
    folder = folder_of(plan)
    _check_ranks(plan, source_record(plan.checkpoint, folder), out)
    return _names(out, plan.shard.ranks, shared_passthrough(plan), folder)


def _manifest_file(out: Path, rank: int) -> FileRecord:
    data = read_inside(rank_folder(out, rank), MANIFEST, LONGEST_MANIFEST, rank_manifest(rank))
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

"""Whether a conversion may be written to a directory: checks of what is there already."""

from __future__ import annotations

from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_number
from ...errors import UsageError
from ...files.folder_handle import read_inside
from ...files.lock import Busy
from ...files.output_folder import refuse_inside
from ...files.strict_json import parse_document
from ..manifest.manifest_records import MANIFEST, READY, REPORT
from ..manifest.progress_log import LOG, ProgressLog, logged_conversion, refuse_other_conversion
from ..manifest.signed_document import LONGEST_MANIFEST
from ..plan.conversion_plan import ConversionPlan
from ..worker_partition import WorkerPartition, partitions_in


def refuse_other_writers(
    plan: ConversionPlan, out: Path, log: ProgressLog, partition: WorkerPartition | None
) -> None:
    """Raises unless the conversion whose `log` this process has locked is the only one in `out`.

    Another one may have begun, or even finished, since `check_output`. Each writes its log before it looks
    for others', so that of two at least one sees the other.

    Raises:
        Busy: `out` has been finished by another process.
        UsageError: another conversion, or other parts, have been started in `out`.
    """
    finished = (MANIFEST, READY, REPORT) if log.new else (plan.mark,)
    if found := [name for name in finished if (out / name).exists()]:
        raise Busy(
            f"another conversion has finished in {out} meanwhile: it has {found[0]}.",
            hint="Check it with --resume, or choose an empty directory.",
        )
    parts = partitions_in(out)
    if partition is None and parts:
        raise UsageError(
            f"{out} holds parts of {parts[0].count} of a conversion.",
            hint=f"Convert them with --part N/{parts[0].count}, or choose an empty directory.",
        )
    if partition is not None and (out / LOG).exists():
        raise UsageError(
            f"another conversion, which is of no parts, has been started in {out}.",
            hint="Choose an empty directory.",
        )
    if log.new and all(other == partition for other in parts):
        log.refuse_company()
    for other in parts:
        if partition is not None and other.count != partition.count:
            raise _other_count(out, other, partition)
        logged = logged_conversion(out / other.log)
        if logged is not None:
            refuse_other_conversion(out, logged, plan.fingerprint())
    _refuse_other_sharing(plan, out)


def _refuse_other_sharing(plan: ConversionPlan, out: Path) -> None:
    """Raises UsageError if either the plan or what is in its directory, or above it, is of several ranks."""
    if plan.shard.ranks == 1:
        of_ranks = sorted(path.name for path in out.iterdir() if rank_number(path) is not None)
        if of_ranks:
            raise UsageError(
                f"{out} holds the directories of ranks: it has {of_ranks[0]}.",
                hint="Choose an empty directory.",
            )
        return
    if rank_number(out) is None:
        return
    above, manifest = out.parent, out.parent / MANIFEST
    found = (
        [parse_document(read_inside(above, MANIFEST, LONGEST_MANIFEST), MANIFEST)]
        if manifest.exists()
        else []
    )
    if (above / LOG).exists() and (logged := logged_conversion(above / LOG)) is not None:
        found.append(dict(logged))
    files = () if found or (above / LOG).exists() else [path for path in above.iterdir() if path.is_file()]
    if files or partitions_in(above) or any("ranks" not in document for document in found):
        raise UsageError(
            f"{out.parent} holds something that is not of ranks.", hint="Choose an empty directory."
        )


def _other_count(out: Path, other: WorkerPartition, partition: WorkerPartition) -> UsageError:
    return UsageError(
        f"{out} holds parts of {other.count}, part {partition} was requested.",
        hint="Use the same number of parts, or an empty directory.",
    )


def check_output(
    folder: Path | None,
    out: Path,
    resume: bool,
    partition: WorkerPartition | None = None,
    mark: str = READY,
) -> None:
    """Raises UsageError if a conversion of the checkpoint in `folder` cannot be written to `out`.

    `mark` is the file whose presence there shows that a conversion is finished.
    """
    if folder is not None:
        refuse_inside(folder, out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file, not a directory.", hint="Choose another name.")
    existing = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    parts = partitions_in(out)
    if partition is not None and parts and not {mark, REPORT} & set(existing):
        if any(other.count != partition.count for other in parts):
            raise _other_count(out, parts[0], partition)
        if partition in parts and not resume:
            raise UsageError(f"part {partition} was started in {out}.", hint="Finish it with --resume.")
        return
    log_name = LOG if partition is None else partition.log
    if existing and not resume:
        hint = "Choose an empty directory."
        if log_name in existing:
            hint = "Finish the conversion with --resume."
        elif parts:
            hint = f"Convert its parts with --part N/{parts[0].count}, then complete it with --finish."
        raise UsageError(
            f"the output directory {out} is not empty: it holds {', '.join(existing[:3])}.", hint=hint
        )
    if existing and not {log_name, mark, REPORT} & set(existing):
        raise UsageError(
            f"{out} holds no conversion to resume: it has no {log_name}.",
            hint="Choose an empty directory, and remove this one if it is not needed.",
        )

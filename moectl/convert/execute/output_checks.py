"""Whether a conversion may be written to a directory: checks of what is there already."""

from __future__ import annotations

from pathlib import Path

from ...errors import UsageError
from ...files.output_folder import refuse_inside
from ..manifest.manifest_records import READY, REPORT
from ..manifest.progress_log import LOG, logged_conversion, refuse_other_conversion
from ..plan.conversion_plan import ConversionPlan
from ..worker_partition import WorkerPartition, partitions_in


def refuse_other_parts(plan: ConversionPlan, out: Path) -> None:
    """Raises UsageError if parts of another conversion have been started in `out`."""
    for partition in partitions_in(out):
        logged = logged_conversion(out / partition.log)
        if logged is not None:
            refuse_other_conversion(out, logged, plan.fingerprint())


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
            raise UsageError(
                f"{out} holds parts of {parts[0].count}, part {partition} was requested.",
                hint="Use the same number of parts, or an empty directory.",
            )
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

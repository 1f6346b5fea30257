"""`moectl verify`: checks a converted directory, and that its source can be restored from it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError, ExitCode, UsageError
from .options import framed, option
from .output import Output, count, size

MOST_FINDINGS = 20
"""Findings that are printed; -q and --json have all."""

EXAMPLES = ("moectl verify ./marlin", "moectl verify ./marlin --source ./gpt-oss-20b --json")


@framed("verify")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A converted directory.", show_default=False)],
    source: Annotated[
        Path | None, option("--source", help="Also compare with the files of this checkpoint directory.")
    ] = None,
    *,
    out: Output,
) -> ExitCode:
    """Check a converted directory against its hashes and source.

    Checks sizes, hashes, the manifest, and that every tensor restores its source bit for bit; for a
    portable checkpoint, sizes and hashes.
    """
    from ..convert.portable.verify_portable import is_portable, verify_portable
    from ..convert.restore.verify import verify as verify_converted

    portable = is_portable(folder)
    if portable and source is not None:
        raise UsageError(
            f"{folder} is a portable checkpoint, from which the source cannot be restored.",
            hint="Leave --source out: its own hashes are checked.",
        )
    if source is not None and not source.is_dir():
        raise CheckpointError(
            f"--source {source} is not a directory", hint="give the directory that was converted"
        )
    with out.progress("verifying") as progress:
        report = (
            verify_portable(folder, progress=progress)
            if portable
            else verify_converted(folder, source, progress=progress)
        )

    def draw(console: Any) -> None:
        for finding in report.findings[:MOST_FINDINGS]:
            console.print(f"found: {finding}")
        if (more := len(report.findings) - MOST_FINDINGS) > 0:
            console.print(f"and {more} more, which -q and --json list")
        compared = " and bytes" if report.compared else ""
        if portable:
            checked = "every byte is as written"
        elif report.tensors or not report.slices:
            checked = f"{report.tensors} tensors, round trip matches source hashes{compared}"
        else:
            checked = f"{report.slices} slices, round trip matches the source's slices"
        verdict = f"OK: {checked}" if report.ok else count(len(report.findings), "finding")
        scope = f"{count(report.layers, 'layer')}, {count(report.files, 'other file')}"
        text = f"{folder}: {verdict} ({scope}, {size(report.bytes_read)} read)"
        console.print(text)

    document = {"folder": str(folder), "ok": report.ok, **asdict(report)}
    out.result(document, draw, "ok" if report.ok else list(report.findings))
    return ExitCode.DONE if report.ok else ExitCode.FOUND

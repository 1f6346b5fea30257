"""`moectl verify`: is a converted folder whole, and does it lead back to its source?"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError, ExitCode, UsageError
from .options import framed, option
from .output import Output, count, size

EXAMPLES = ("moectl verify ./marlin", "moectl verify ./marlin --source ./gpt-oss-20b --json")


@framed("verify")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A converted folder.", show_default=False)],
    source: Annotated[
        Path | None, option("--source", help="Compare with this checkpoint folder's bytes too.")
    ] = None,
    *,
    out: Output,
) -> ExitCode:
    """Check a converted folder against its hashes and its source.

    Lengths, hashes, the manifest, and that every tensor leads back to its source bit for bit. Of a
    portable checkpoint, lengths and hashes.
    """
    from ..convert.portable.verify_portable import is_portable, verify_portable
    from ..convert.restore.verify import verify as library

    portable = is_portable(folder)
    if portable and source is not None:
        raise UsageError(
            f"{folder} is a portable checkpoint, which holds no way back to its source.",
            hint="Leave --source out: its own hashes are checked.",
        )
    if source is not None and not source.is_dir():
        raise CheckpointError(f"--source {source} is no folder", hint="give the folder that was converted")
    with out.progress("verifying") as progress:
        report = (
            verify_portable(folder, progress=progress)
            if portable
            else library(folder, source, progress=progress)
        )

    def draw(console: Any) -> None:
        for finding in report.findings:
            console.print(f"found: {finding}", markup=False)
        compared = ", equal to the source's bytes" if report.compared else ""
        back = f"{report.tensors} tensors lead back to the source's hashes{compared}"
        cut = f"{report.slices} slices lead back to what was cut of the source"
        kept = "every byte is what was written"
        verdict = f"whole; {kept if portable else back if report.tensors or not report.slices else cut}"
        bad = count(len(report.findings), "finding")
        read = f"{count(report.layers, 'layer')}, {count(report.files, 'other file')}"
        text = f"{folder}: {verdict if report.ok else bad} ({read}, {size(report.bytes_read)} read)"
        console.print(text, markup=False)

    document = {"folder": str(folder), "ok": report.ok, **asdict(report)}
    out.result(document, draw, "ok" if report.ok else list(report.findings))
    return ExitCode.DONE if report.ok else ExitCode.FOUND

"""`moectl refit`: brings a converted directory up to date with a newer version of its checkpoint."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError, UsageError
from ..problem.layer_ranges import ranges
from .options import Offline, framed, option
from .output import Output, count, size

EXAMPLES = (
    "moectl refit ./marlin ./gpt-oss-20b-step-200",
    "moectl refit ./marlin ./gpt-oss-20b-step-200 --dry-run",
)
MORE = ["Live layers change in place with moectl.refit: docs/refit.md."]


@framed("refit")
def refit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A converted directory.", show_default=False)],
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A newer version of its checkpoint.", show_default=False)
    ],
    *,
    dry_run: Annotated[bool, option("--dry-run", help="Say what would change; write nothing.")] = False,
    device: Annotated[
        str, option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.", own=True)
    ] = "cpu",
    offline: Offline = False,
    out: Output,
) -> None:
    """Bring a converted directory up to date with its checkpoint.

    Writes the layers whose experts changed, and other changed tensors; the result is what converting CKPT
    anew gives. After an interrupt, run the same command again.
    """
    from ..checkpoint import open_checkpoint
    from ..convert.execute.update_folder import plan_updates, update_folder

    if not folder.is_dir():
        raise CheckpointError(f"there is no directory {folder}.", hint="Check the path.")
    source = open_checkpoint(checkpoint, offline=offline)
    if source.folder is not None and source.folder.resolve() == folder.resolve():
        raise UsageError(f"{folder} was given twice", hint="give the checkpoint as the second argument")
    with out.progress("comparing") as progress:
        updates = plan_updates(folder, source, progress=progress)
    for update in () if dry_run else updates:
        if update.needed:
            with out.progress("converting") as progress:
                update_folder(update, progress=progress, device=device)
    rows = [
        {
            "folder": str(update.folder),
            "layers": list(update.layers),
            "unchanged_layers": [record.layer for record in update.kept],
            "files": list(update.files),
            "bytes_out": update.bytes_out,
        }
        for update in updates
    ]

    def draw(console: Any) -> None:
        for update in updates:
            if not update.needed:
                console.print(f"{update.folder}: up to date", markup=False)
                continue
            verb = "would write" if dry_run else "wrote"
            parts = [f"layers {ranges(update.layers)} ({size(update.bytes_out)})"] if update.layers else []
            parts += [count(len(update.files), "other file")] if update.files else []
            parts += [] if parts else ["the manifest"]
            kept = count(len(update.kept), "layer")
            console.print(f"{update.folder}: {verb} {', '.join(parts)}; {kept} unchanged", markup=False)

    changed = any(update.needed for update in updates)
    document = {"checkpoint": checkpoint, "dry_run": dry_run, "changed": changed, "folders": rows}
    out.result(document, draw, "changed" if changed else "up to date")

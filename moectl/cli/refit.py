"""`moectl refit`: brings a converted directory up to date with a newer version of its checkpoint."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError, UsageError
from ..problem.layer_ranges import layers_of
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
    from ..convert.execute.update_folder import plan_update, update_folder

    if not folder.is_dir():
        raise CheckpointError(f"there is no directory {folder}.", hint="Check the path.")
    source = open_checkpoint(checkpoint, offline=offline)
    if source.folder is not None and source.folder.resolve() == folder.resolve():
        raise UsageError(f"{folder} was given twice", hint="give the checkpoint as the second argument")
    with out.progress("comparing") as progress:
        update = plan_update(folder, source, progress=progress)
    if update.needed and not dry_run:
        with out.progress("converting") as progress:
            update_folder(update, progress=progress, device=device)
    rows: list[dict[str, Any]] = [
        {
            "folder": str(part.folder),
            "layers": list(part.layers),
            "unchanged_layers": [record.layer for record in part.kept],
            "files": [],
            "bytes_out": part.bytes_out,
        }
        for part in update.parts
    ]
    if len(rows) > 1:  # what ranks share is above their directories
        rows.append(
            {"folder": str(folder), "layers": [], "unchanged_layers": [], "files": [], "bytes_out": 0}
        )
    rows[-1]["files"] = list(update.files)

    def draw(console: Any) -> None:
        if not update.needed:
            console.print(f"{folder}: up to date")
            return
        verb = "would rewrite" if dry_run else "rewrote"
        for row in rows:
            layers, files, kept = row["layers"], row["files"], row["unchanged_layers"]
            parts = [f"{layers_of(layers)} ({size(row['bytes_out'])})"] if layers else []
            parts += [count(len(files), "other file")] if files else []
            unchanged = f"; {count(len(kept), 'layer')} unchanged" if layers or kept else ""
            console.print(f"{row['folder']}: {verb} {', '.join(parts) or 'the manifest'}{unchanged}")

    changed = update.needed
    document = {"checkpoint": checkpoint, "dry_run": dry_run, "changed": changed, "folders": rows}
    out.result(document, draw, "changed" if changed else "up to date")

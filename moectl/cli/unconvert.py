"""`moectl unconvert`: restores the source checkpoint, bit for bit."""

from pathlib import Path
from typing import Annotated

import typer

from .options import framed
from .output import Output, count, size

EXAMPLES = ("moectl unconvert ./marlin ./gpt-oss-20b-again",)


@framed("unconvert")
def unconvert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A converted directory.", show_default=False)],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new or empty directory.", show_default=False)
    ],
    *,
    out: Output,
) -> None:
    """Restore the original checkpoint from a converted directory.

    Names, dtypes, shapes and bytes are those of the source.
    """
    from ..convert.restore.unconvert import unconvert as restore

    with out.progress("restoring") as progress:
        restored = restore(folder, target, progress=progress)
    files = f"{count(restored.tensors, 'tensor')} in {count(restored.files, 'file')}"
    text = f"{target}: {files}, {size(restored.nbytes)}, SHA-256 verified"
    if restored.experts_only:
        out.note("the directory was converted with --experts-only: the restored checkpoint has experts only")
    document = {
        "folder": str(target),
        "files": restored.files,
        "tensors": restored.tensors,
        "bytes": restored.nbytes,
        "experts_only": restored.experts_only,
    }
    out.result(document, lambda console: console.print(text), str(target))

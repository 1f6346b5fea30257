"""`moectl unconvert`: the source's tensors back, bit for bit."""

from pathlib import Path
from typing import Annotated

import typer

from .options import framed
from .output import Output, count, size

EXAMPLES = ("moectl unconvert ./marlin ./gpt-oss-20b-again",)


@framed("unconvert")
def unconvert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A converted folder.", show_default=False)],
    back: Annotated[Path, typer.Argument(metavar="BACK", help="A new or empty folder.", show_default=False)],
    *,
    out: Output,
) -> None:
    """Give the source checkpoint of a converted folder back.

    With the source's names, dtypes, shapes and bytes.
    """
    from ..convert.restore.unconvert import unconvert as library

    with out.progress("restoring") as progress:
        done = library(folder, back, progress=progress)
    files = f"{count(done.tensors, 'tensor')} in {count(done.files, 'file')}"
    text = f"{back}: {files}, {size(done.nbytes)}, with the source's hashes"
    if done.experts_only:
        out.note("the folder was converted with --experts-only: what comes back is no complete checkpoint")
    document = {
        "folder": str(back),
        "files": done.files,
        "tensors": done.tensors,
        "bytes": done.nbytes,
        "experts_only": done.experts_only,
    }
    out.result(document, lambda console: console.print(text, markup=False), str(back))

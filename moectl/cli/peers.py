"""`moectl peers`: the kernels of other libraries, fetched from PyPI for comparisons."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..capabilities.kernel_packages import KERNEL_PACKAGES
from ..capabilities.unpacked_libraries import LIBRARIES, VARIABLE, default_folder, peers_folder
from ..environment.installed_packages import find_package
from ..errors import ExitCode, Unavailable, UsageError
from ..files.user_paths import user_path
from ..peers.fetch import DONE, MISSING, OTHER, fetch, state_of, usable_already
from ..peers.pinned import PinnedPeer, pinned_peer
from ..peers.wheel_stream import WholeFileNeeded
from .options import framed, option, pick, split_names
from .output import Output, count, duration, size, table

EXAMPLES = (
    "moectl peers",
    "moectl peers marlin,humming,triton_kernels",
    "moectl peers all --peers ./peers && tar c peers | ssh gpu-box tar x",
)
MORE = (
    "Only the files that are needed are transferred, in ranges of wheels on PyPI; each is checked against a",
    "pinned SHA-256. Nothing is installed into an environment. `moectl bench --with NAMES` fetches what is",
    "missing itself.",
)

FLASHINFER = "flashinfer"
"""A library that is not fetched."""

NOT_FETCHED = (
    "flashinfer cannot be fetched into a directory: it needs packages of its own, and nvcc for its kernels"
)
INSTALL_FLASHINFER = "pip install 'moectl[flashinfer]'"
FLASHINFER_BACKENDS = ("flashinfer_cutlass", "flashinfer_trtllm")

STATES = {DONE: "fetched", OTHER: "another version", MISSING: "not here"}

INDEX_VARIABLE = "MOECTL_INDEX_URL"
"""Environment variable of ``--index-url``, which `moectl bench --with` uses, too."""

PeersDirectory = Annotated[
    Path | None,
    option("--peers", metavar="DIR", help="Directory of fetched libraries; default: in the user's cache."),
]


@framed("peers")
def peers(
    names: Annotated[
        str | None,
        typer.Argument(metavar="[NAMES]", help=f"{', '.join(LIBRARIES)}, or all; without: what is here."),
    ] = None,
    peers: PeersDirectory = None,
    index_url: Annotated[
        str, option("--index-url", metavar="URL", help="A mirror of PyPI, such as https://mirror/simple.")
    ] = "",
    replace: Annotated[bool, option("--replace", help="Replace another version in the directory.")] = False,
    yes: Annotated[bool, option("--yes", "-y", help="Download whole wheels if necessary.")] = False,
    *,
    out: Output,
) -> ExitCode:
    """Fetch the kernels of other libraries to compare with.

    Pinned releases of DeepGEMM, Humming, Marlin, triton_kernels, and an engine's Triton experts and CUTLASS
    GEMMs, from PyPI. `moectl bench`, `run`, `explain` and `doctor` find them in the user's cache, or in the
    directory MOECTL_PEERS, which can be copied to a machine without network.
    """
    folder = directory_of(peers)
    every = names is None or names.strip().lower() == "all"
    wanted = [pinned_peer(name) for name in (LIBRARIES if every else peer_names(names or ""))]
    begun, fetched = time.monotonic(), 0
    if names is not None:
        states = [(peer, state_of(peer, folder)) for peer in wanted]
        for peer, state in states:
            if state == OTHER and not replace:
                release = f"{peer.project} {peer.version}"
                out.warn(f"{folder} has another {peer.backend} than {release}: --replace fetches it")
        replaced = (MISSING, OTHER) if replace else (MISSING,)
        fetched = _fetch([peer for peer, state in states if state in replaced], folder, index_url, yes, out)
    elapsed = time.monotonic() - begun
    _show(wanted, folder, fetched, elapsed, out)
    if fetched and peers is not None and os.environ.get(VARIABLE, "") != str(peers):
        out.note(f"other commands find it with {VARIABLE}={folder}")
    return ExitCode.DONE


def directory_of(named: Path | None) -> Path:
    """The directory that was `named`, else the one of the user's cache."""
    return (user_path(named) if named is not None else default_folder()).resolve()


def peer_names(text: str) -> list[str]:
    """Libraries of a list such as ``marlin,humming``; UsageError for others, and for FlashInfer."""
    names = _picked(text, "NAMES")
    if FLASHINFER in names:
        raise UsageError(NOT_FETCHED, hint=INSTALL_FLASHINFER)
    return names


def peer_backends(text: str) -> tuple[str, ...]:
    """Backends of ``--with`` and such a list, in which FlashInfer stands for all of its backends.

    Raises UsageError for unknown names, and Unavailable for FlashInfer if it is not installed.
    """
    names = _picked(text, "--with") if text else []
    if FLASHINFER in names and not find_package(FLASHINFER, KERNEL_PACKAGES[FLASHINFER]).present:
        raise Unavailable(NOT_FETCHED, hint=INSTALL_FLASHINFER)
    backends = (FLASHINFER_BACKENDS if name == FLASHINFER else (name,) for name in names)
    return tuple(backend for group in backends for backend in group)


def _picked(text: str, what: str) -> list[str]:
    names = (pick(name, (*LIBRARIES, FLASHINFER), "library") for name in split_names(text, what))
    return list(dict.fromkeys(names))


def fetch_missing(backends: Sequence[str], *, offline: bool, out: Output) -> None:
    """Fetches those libraries of `backends` that are neither installed nor in the directory.

    The package index is that of the variable `INDEX_VARIABLE`, else PyPI.
    """
    folder = peers_folder() or directory_of(None)
    pinned = [pinned_peer(name) for name in backends if name in LIBRARIES]
    missing = [peer for peer in pinned if not usable_already(peer, folder)]
    if missing and offline:
        listed = ",".join(peer.backend for peer in missing)
        raise Unavailable(
            f"--with {listed} needs files that are not on this machine, and --offline fetches nothing",
            hint=f"leave --offline out, or bring a directory that `moectl peers {listed}` has filled",
        )
    _fetch(missing, folder, os.environ.get(INDEX_VARIABLE, ""), False, out)


def _fetch(peers: Sequence[PinnedPeer], folder: Path, index: str, yes: bool, out: Output) -> int:
    """Fetches `peers`, and returns the bytes transferred. A whole wheel is read if the user agrees."""
    if not peers:
        return 0
    listed = ", ".join(f"{peer.backend} ({peer.project} {peer.version})" for peer in peers)
    out.note(f"fetching {listed}: {size(sum(peer.download for peer in peers))} into {folder}")
    begun = time.monotonic()
    try:
        with out.progress("fetching") as progress:
            fetched = fetch(peers, folder, index=index, allow_whole=yes, progress=progress)
    except WholeFileNeeded as error:
        if yes or out.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        if not typer.confirm(f"moectl: {error.what}. Read all of it?", err=True):
            raise
        return _fetch(peers, folder, index, True, out)
    out.note(f"fetched {size(fetched)} in {duration(time.monotonic() - begun)}")
    return fetched


def _show(peers: Sequence[PinnedPeer], folder: Path, fetched: int, elapsed: float, out: Output) -> None:
    rows: list[dict[str, Any]] = []
    for peer in peers:
        state = state_of(peer, folder)
        path = usable_already(peer, folder)
        rows.append(
            {
                "name": peer.backend,
                "state": "installed" if state == MISSING and path else STATES[state],
                "path": path,
                "download_bytes": peer.download,
                "unpacked_bytes": peer.unpacked,
                "files": len(peer.files),
                **{key: value for key, value in asdict(peer).items() if key not in ("backend", "files")},
            }
        )
    document = {
        "folder": str(folder),
        "fetched_bytes": fetched,
        "seconds": round(elapsed, 3),
        "libraries": rows,
    }

    def draw(console: Any) -> None:
        shown = table(
            "library", "release", "download", "on disk", "state", "needs", right=("download", "on disk")
        )
        for row in rows:
            release = f"{row['project']} {row['version']}"
            needs = f"torch for CUDA {row['cuda']}" if row["cuda"] else ""
            sizes = (size(row["download_bytes"]), size(row["unpacked_bytes"]))
            shown.add_row(row["name"], release, *sizes, row["state"], needs)
        console.print(shown)
        console.print(f"{count(len(rows), 'library').replace('librarys', 'libraries')} in {folder}")

    out.result(document, draw, [f"{row['name']}\t{row['state']}\t{row['path']}" for row in rows])

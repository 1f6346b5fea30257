"""Converted directories of both format versions, changed manifests, and how engines' loaders choose files."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMAT_1 = Path(__file__).parents[1] / "data" / "converted" / "format_1.tar.xz"
"""What moectl wrote in format version 1: a gpt-oss of two layers and two experts (``source``), converted with
``--to moectl`` (``whole``), ``--tp-size 2`` (``tp``), ``--ep-size 2`` (``ep``) and ``--experts-only``."""

Edit = Callable[[dict[str, Any]], object]


def format_1(folder: Path) -> Path:
    """`folder`, with the directories of `FORMAT_1`."""
    with tarfile.open(FORMAT_1) as archive:
        archive.extractall(folder, filter="data")
    return folder


def sign(folder: Path, document: Any) -> None:
    """Writes `document` as the manifest of `folder`, and READY as an attacker would."""
    data = json.dumps(document).encode()
    (folder / "moectl.json").write_bytes(data)
    (folder / "READY").write_text(hashlib.sha256(data).hexdigest() + "\n")


def edit_manifest(folder: Path, change: Edit) -> None:
    """Changes the manifest of a directory that READY is in."""
    document = json.loads((folder / "moectl.json").read_text())
    change(document)
    sign(folder, document)


def edit_rank(folder: Path, rank: int, change: Edit) -> None:
    """Changes the manifest of one rank below `folder`, and what is above it accordingly."""
    path = folder / f"rank-{rank:02d}" / "moectl.json"
    document = json.loads(path.read_text())
    change(document)
    data = json.dumps(document).encode()
    path.write_bytes(data)

    def name(above: dict[str, Any]) -> None:
        above["ranks"][rank] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    edit_manifest(folder, name)


def chosen_files(folder: Path) -> list[str]:
    """The weight files that vLLM 0.33.0 and SGLang open in a local directory.

    These are ``*.safetensors`` beside config.json, or else ``*.bin`` and ``*.pt``; of those the ones that the
    index names, if there is one, all of which must be there.
    """
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        if files := {path.name for path in folder.glob(pattern)}:
            break
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(files)
    named = set(json.loads(index.read_text())["weight_map"].values())
    if named - files:
        raise FileNotFoundError(f"the index names {sorted(named - files)}")
    return sorted(files & named)

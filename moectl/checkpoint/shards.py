"""The safetensors files of a checkpoint: which they are, and their tensors together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointError
from .header import read_header
from .model import TensorInfo
from .strict_json import DOCUMENT_LIMIT, parse_json_object, shown

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors")


def index_files(document: Mapping[str, Any], where: str = INDEX) -> dict[str, str]:
    """The index's map from tensor name to file name, every file name safe to join to the folder.

    Raises:
        CheckpointError: no ``weight_map`` of strings, or a file name that is absolute, leads out of
            the folder or is no safetensors file's.
    """
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: weight_map must be an object that maps tensors to files.")
    checked: set[str] = set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                f"{where}: the file of tensor {shown(tensor)} must be a name, got {shown(file)}."
            )
        if file not in checked:
            _check_file_name(file, tensor, where)
            checked.add(file)
    return weight_map


def _check_file_name(file: str, tensor: str, where: str) -> None:
    path = PurePosixPath(file)
    parts = file.split("/")
    bad = path.is_absolute() or "\\" in file or "\0" in file or ":" in file or {"", ".", ".."} & set(parts)
    if bad or not file.endswith(SUFFIX):
        raise CheckpointError(
            f"{where}: tensor {shown(tensor)} is said to be in {shown(file)}, "
            "expected the name of a safetensors file inside the checkpoint's folder.",
            reason="Absolute paths and '..' are refused.",
        )


def shard_names(listed: Iterable[str], index: Mapping[str, str] | None) -> list[str]:
    """The weight files to read: those of the index, else every safetensors file among `listed`.

    Raises:
        CheckpointError: the index names a file that is not listed, or a numbered file is missing.
    """
    present = set(listed)
    if index is not None:
        for tensor, file in index.items():
            if file not in present:
                raise CheckpointError(
                    f"{INDEX}: tensor {shown(tensor)} is said to be in {shown(file)}, which does not exist.",
                    hint="The checkpoint is incomplete; download it again.",
                )
        return sorted(set(index.values()))
    names = sorted(name for name in present if name.endswith(SUFFIX) and "/" not in name)
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            continue
        same = [
            other for other in names if _NUMBERED.fullmatch(other) and other.startswith(match["stem"] + "-")
        ]
        if len(same) != int(match["count"]):
            raise CheckpointError(
                f"{name}: the checkpoint has {int(match['count'])} files by its name, {len(same)} are there.",
                hint="Download the others.",
            )
    return names


def join_tensors(
    shards: Iterable[Mapping[str, TensorInfo]], index: Mapping[str, str] | None
) -> dict[str, TensorInfo]:
    """The tensors of all files by name.

    Raises:
        CheckpointError: a name in two files, or a tensor that is not where the index says.
    """
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in shard.items():
            if name in tensors:
                raise CheckpointError(
                    f"{info.file}: tensor {shown(name)} is there a second time, "
                    f"first in {tensors[name].file}."
                )
            tensors[name] = info
    for name, file in (index or {}).items():
        found = tensors.get(name)
        if found is None or found.file != file:
            raise CheckpointError(
                f"{file}: tensor {shown(name)} is missing, though {INDEX} says it is there.",
                hint="The checkpoint is incomplete; download it again.",
            )
    return tensors


def read_document(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in `folder`'s file `name`, or None when there is no such file.

    Raises CheckpointError when it is damaged, too long, or leads out of the folder.
    """
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return None
    inside(folder, name)
    if path.stat().st_size > DOCUMENT_LIMIT:
        raise CheckpointError(f"{path}: a JSON file of {path.stat().st_size} bytes is refused.")
    try:
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error


def inside(folder: Path, name: str) -> Path:
    """The file `name` in `folder`, links resolved; CheckpointError when it is none, or leads out.

    A Hub cache keeps ``models--ORG--NAME/snapshots/REVISION``, whose files are links to ``blobs``
    beside it: those links are a checkpoint's own.
    """
    try:
        real = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{name}: the file cannot be found ({error}).") from error
    root = folder.resolve()
    roots, repository = [root], root.parent.parent
    if root.parent.name == "snapshots" and repository.name.startswith("models--"):
        roots.append(repository / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{name} is a link to {real}, outside of the checkpoint.",
            hint="Replace the link by the file, or give the folder that it points to.",
        )
    if not real.is_file():
        raise CheckpointError(f"{name} is not a file.")
    return real


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The names of a local checkpoint's weight files, and its index if there is one.

    Raises CheckpointError when the index is damaged or a file is missing.
    """
    document = read_document(folder, INDEX)
    index = None if document is None else index_files(document)
    listed = {path.name for path in folder.glob(f"*{SUFFIX}")}
    listed |= {file for file in set((index or {}).values()) if (folder / file).exists()}
    return shard_names(listed, index), index


def read_folder(folder: Path) -> dict[str, TensorInfo] | None:
    """Every tensor of a local checkpoint by name, or None when it has no safetensors file or index.

    Raises:
        CheckpointError: a file is missing, damaged, or outside of the folder.
    """
    names, index = weight_files(folder)
    if not names:
        return None
    return join_tensors((_read_local(folder, name) for name in names), index)


def _read_local(folder: Path, name: str) -> dict[str, TensorInfo]:
    path = inside(folder, name)
    try:
        with path.open("rb") as file:
            return read_header(file, path.stat().st_size, name)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror or error}.") from error

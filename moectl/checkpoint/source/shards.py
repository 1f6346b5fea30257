"""The safetensors shards of a checkpoint: their names, and the tensors of all of them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import CheckpointError
from ...files.folder_handle import FolderHandle
from ...files.safe_reading import bounded, read_bounded
from ...files.safetensors_header import Budget, read_header
from ...files.strict_json import FETCH_AGAIN, parse_json_object, shown
from ...files.tensor_table import TensorTable, joined

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"

QUANTIZATION_FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "auto-round",
}
"""Separate files with the quantization config, and the `quant_method` of each."""


def separate_quantization(
    documents: Mapping[str, Mapping[str, Any] | None],
) -> tuple[Mapping[str, Any] | None, str]:
    """The quantization config of the first of `QUANTIZATION_FILES` in `documents`, and its file name.

    None and an empty name if there is no such file, or only empty ones.
    """
    for name, method in QUANTIZATION_FILES.items():
        document = documents.get(name)
        if document:
            return {"quant_method": method, **document}, name
    return None, ""


DOCUMENT_LIMIT = 64 << 20
"""Maximum size of a config or index, bytes; the index of a model with 200 000 tensors has 23 MB."""

SHARD_LIMIT = 10_000
"""Maximum number of weight files in a checkpoint."""

FILE_NAME_LIMIT = 255
"""Maximum length of a file name in bytes, as in common file systems."""

_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors", re.ASCII)


def index_files(document: Mapping[str, Any], where: str = INDEX) -> dict[str, str]:
    """The index's map from tensor name to file name; every file name is safe to join to the directory.

    Raises:
        CheckpointError: no ``weight_map`` of strings, or a file name that is absolute, points outside
            the directory or does not end in ``.safetensors``.
    """
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{where}: weight_map must be an object that maps tensors to files.", hint=FETCH_AGAIN
        )
    checked: set[str] = set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                f"{where}: the file of tensor {shown(tensor)} must be a name, got {shown(file)}.",
                hint=FETCH_AGAIN,
            )
        if file not in checked:
            _check_file_name(file, tensor, where)
            checked.add(file)
            if len(checked) > SHARD_LIMIT:
                raise _too_many_files(f"more than {SHARD_LIMIT}")
    return weight_map


def _check_file_name(file: str, tensor: str, where: str) -> None:
    parts = file.split("/")
    unsafe = PurePosixPath(file).is_absolute() or {"", ".", ".."} & set(parts) or {"\\", ":"} & set(file)
    too_long = len(file) > 4 * FILE_NAME_LIMIT or any(
        len(part.encode("utf-8", "replace")) > FILE_NAME_LIMIT for part in parts
    )
    if unsafe or too_long or not file.isprintable() or not file.endswith(SUFFIX):
        raise CheckpointError(
            f"{where}: tensor {shown(tensor)} is said to be in {shown(file)}, "
            "expected the name of a safetensors file inside the checkpoint's folder.",
            reason=f"Absolute paths, '..' and names over {FILE_NAME_LIMIT} bytes are refused.",
            hint=FETCH_AGAIN,
        )


def shard_names(listed: Iterable[str], index: Mapping[str, str] | None) -> list[str]:
    """The weight files to read: those in the index, else every safetensors file among `listed`.

    Raises:
        CheckpointError: the index names a file that is not listed, or a numbered file is missing.
    """
    available = set(listed)
    if index is not None:
        for tensor, file in index.items():
            if file not in available:
                raise CheckpointError(
                    f"{INDEX}: tensor {shown(tensor)} is said to be in {shown(file)}, which does not exist.",
                    hint="The checkpoint is incomplete; download it again.",
                )
        return _few(sorted(set(index.values())))
    names = _few(sorted(name for name in available if name.endswith(SUFFIX) and "/" not in name))
    numbered = {name: match for name in names if (match := _NUMBERED.fullmatch(name))}
    numbers_of: dict[str, set[int]] = defaultdict(set)
    for match in numbered.values():
        numbers_of[match["stem"]].add(int(match["number"]))
    ranges = {stem: (len(numbers), min(numbers), max(numbers)) for stem, numbers in numbers_of.items()}
    for name, match in numbered.items():
        count, (present, first, last) = int(match["count"]), ranges[match["stem"]]
        if present != count or last - first >= count or first > 1:
            raise CheckpointError(
                f"{name}: the checkpoint has {count} files by its name, "
                f"{present} are there, with numbers from {first} to {last}.",
                hint="Download the others, or remove those that belong to another checkpoint.",
            )
    return names


def _few(names: list[str]) -> list[str]:
    """`names`; CheckpointError when there are more than `SHARD_LIMIT`."""
    if len(names) > SHARD_LIMIT:
        raise _too_many_files(str(len(names)))
    return names


def _too_many_files(count: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint has {count} weight files, expected at most {SHARD_LIMIT}.",
        hint="Store it in fewer, larger files.",
    )


def join_tensors(shards: Iterable[TensorTable], index: Mapping[str, str] | None) -> TensorTable:
    """The tensors of all shards by name.

    Raises:
        CheckpointError: a name occurs in two files, or a tensor is not in the file that the index names.
    """
    tensors = joined(shards)
    if tensors.repeated is not None:
        name, first, second = tensors.repeated
        raise CheckpointError(
            f"{second}: tensor {shown(name)} is there a second time, first in {first}.",
            hint="Remove the file that does not belong to the checkpoint.",
        )
    if index is not None and not _agrees(tensors, index):
        for name, file in index.items():
            info = tensors.get(name)
            if info is None or info.file != file:
                raise CheckpointError(
                    f"{file}: tensor {shown(name)} is missing, though {INDEX} says it is there.",
                    hint="The checkpoint is incomplete; download it again.",
                )
    return tensors


def _agrees(tensors: TensorTable, index: Mapping[str, str]) -> bool:
    """True when every tensor of the index is in the file that the index names."""
    return tensors.has_all(index.keys()) and all(
        {file, None}.issuperset(map(index.get, names)) for file, names in tensors.by_file()
    )


def read_document(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in file `name` of `folder`, or None when there is no such file.

    Raises CheckpointError when it is damaged, too long, not a regular file, or a link to the outside.
    """
    where = str(folder / name)
    if not os.path.lexists(where):
        return None
    with FolderHandle(folder) as handle, handle.file(name, where) as file:
        return parse_json_object(bounded(file, DOCUMENT_LIMIT, where), where)


def parse_document(path: Path, where: str) -> dict[str, Any]:
    """The JSON object in the regular file `path`, of at most `DOCUMENT_LIMIT` bytes.

    Raises CheckpointError for anything else; `where` names the file in error messages.
    """
    return parse_json_object(read_bounded(path, DOCUMENT_LIMIT, where), where)


def check_document_size(nbytes: int, where: str) -> None:
    """CheckpointError when a config or index has more than `DOCUMENT_LIMIT` bytes."""
    if nbytes > DOCUMENT_LIMIT:
        raise CheckpointError(
            f"{where} has {nbytes} bytes, expected at most {DOCUMENT_LIMIT} of a config or index.",
            hint=FETCH_AGAIN,
        )


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The names of a local checkpoint's weight files, and the map of its index if there is one.

    Raises CheckpointError when the index is damaged or a file is missing.
    """
    document = read_document(folder, INDEX)
    index = None if document is None else index_files(document)
    listed = {path.name for path in folder.glob(f"*{SUFFIX}")}
    listed |= {file for file in set((index or {}).values()) if (folder / file).exists()}
    return shard_names(listed, index), index


def read_folder(folder: Path) -> TensorTable | None:
    """Every tensor of a local checkpoint by name, or None without safetensors files.

    Raises:
        CheckpointError: a file is missing, damaged, or outside of the directory.
    """
    names, index = weight_files(folder)
    if not names:
        return None
    budget = Budget()
    with FolderHandle(folder) as handle:
        return join_tensors((_read_local(handle, name, budget) for name in names), index)


def _read_local(folder: FolderHandle, name: str, budget: Budget) -> TensorTable:
    with folder.file(name) as file:
        return read_header(file, os.fstat(file.fileno()).st_size, name, budget)

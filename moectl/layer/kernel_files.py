"""Compiled kernels as a directory that can be taken to another machine.

``DIR/kernels.json`` lists what ``DIR/KEY/`` holds, with SHA-256; KEY is the kernel's key in Triton's cache. A
kernel is code that runs on the GPU, so a directory is only read when the user names it, and only those
kernels are taken from it whose keys this machine computes itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..cache.measurement_keys import built
from ..errors import CheckpointError, UsageError
from ..files.atomic import PARTIAL, disk_errors, write_file
from ..files.folder_handle import read_inside
from ..files.lock import folder_lock
from ..files.output_folder import create_folder
from ..files.records import from_json, to_json
from ..files.strict_json import parse_document
from ..kernels.triton.layer_binaries import Binary, compiler
from .compile_ahead import cache_directory

INDEX = "kernels.json"
VERSION = 1

KEY = re.compile(r"[A-Z2-7]{40,64}")
SUFFIXES = ("json", "cubin")
"""Files of a kernel that are needed to launch it: its description and its code."""

MOST_BYTES = 64 << 20
"""Size up to which a file is read."""


@dataclass(frozen=True)
class KernelFiles:
    """One kernel of the index: its function's name, and the SHA-256 of its files by their suffix."""

    name: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class KernelIndex:
    """``kernels.json``: the kernels by key, and what they were compiled with."""

    version: int
    built: Mapping[str, str]
    kernels: Mapping[str, KernelFiles]


def export_kernels(binaries: Iterable[Binary], folder: Path) -> int:
    """Copies the cached ones of `binaries` to `folder`, beside what is there; returns their number.

    Raises UsageError if `folder` has other things in it, and CheckpointError if its index is damaged.
    """
    create_folder(folder)
    with disk_errors(folder, 0), folder_lock(folder):  # of two writers neither loses the other's kernels
        if not (folder / INDEX).exists():
            if any(path.name != f"{INDEX}{PARTIAL}" for path in folder.iterdir()):
                raise UsageError(
                    f"{folder} is not empty and has no {INDEX}", hint="give --to a new directory"
                )
            _write_index(folder, {})  # an interrupted export goes on in the directory
        kernels = dict(read_index(folder).kernels)
        copied = 0
        for binary in binaries:
            if not binary.cached:
                continue
            files = {}
            create_folder(folder / binary.key)
            for suffix in SUFFIXES:
                name = _file(binary.name, suffix)
                data = _read(cache_directory() / binary.key, name)
                write_file(folder / binary.key / name, data)
                files[suffix] = hashlib.sha256(data).hexdigest()
            kernels[binary.key] = KernelFiles(binary.name, files)
            copied += 1
        _write_index(folder, kernels)
    return copied


def _write_index(folder: Path, kernels: Mapping[str, KernelFiles]) -> None:
    index = KernelIndex(VERSION, _built(), dict(sorted(kernels.items())))
    write_file(folder / INDEX, (json.dumps(to_json(index), indent=1) + "\n").encode())


def import_kernels(binaries: Iterable[Binary], folder: Path) -> int:
    """Puts those of `binaries` that `folder` has into Triton's cache; returns the number that were new.

    Raises CheckpointError if the index or a kernel's file is missing, damaged or not as the index says.
    """
    index = read_index(folder)
    taken = 0
    for binary in binaries:
        listed = index.kernels.get(binary.key)
        if listed is None or binary.cached:
            continue
        contents = {}
        for suffix in SUFFIXES:
            name = _file(binary.name, suffix)
            data = _read(folder, f"{binary.key}/{name}")
            if hashlib.sha256(data).hexdigest() != listed.files.get(suffix):
                raise CheckpointError(
                    f"{folder / binary.key / name} does not have the contents that {INDEX} lists",
                    hint="copy the directory again",
                )
            contents[name] = data
        target = cache_directory() / binary.key
        create_folder(target)
        for name, data in contents.items():
            write_file(target / name, data)
        # Triton finds a kernel's files by this group, which names them with their directory.
        paths = {name: str(target / name) for name in contents}
        group = json.dumps({"child_paths": paths}).encode()
        write_file(target / f"__grp__{_file(binary.name, 'json')}", group)
        taken += 1
    return taken


def read_index(folder: Path) -> KernelIndex:
    """The index of a directory that `export_kernels` wrote; CheckpointError if it is none or damaged."""
    file = folder / INDEX
    if not file.exists():
        raise CheckpointError(
            f"{folder} has no {INDEX}", hint="moectl warm CKPT --gpu NAME --to DIR writes it"
        )
    index = from_json(KernelIndex, parse_document(_read(folder, INDEX), INDEX), INDEX)
    if index.version != VERSION:
        raise CheckpointError(
            f"{file} has version {index.version}, this moectl reads {VERSION}",
            hint="write it again with this moectl",
        )
    for key in index.kernels:
        if not KEY.fullmatch(key):
            raise CheckpointError(f"{file} lists {key[:80]!r}, which is not a key of Triton's cache")
    return index


def differences(folder: Path) -> list[str]:
    """What was of another version when `folder` was written, such as ``triton 3.6.0 there, 3.7.0 here``.

    With another Triton or minor version of Python no kernel of it has a key of this machine.
    """
    here, there = _built(), read_index(folder).built
    return [
        f"{name} {there.get(name, 'unknown')} there, {here[name]} here"
        for name in here
        if there.get(name) != here[name]
    ]


def _built() -> dict[str, str]:
    """What kernels are compiled with."""
    return {**built(), **compiler()}


def _file(name: str, suffix: str) -> str:
    return f"{name[:150]}.{suffix}"


def _read(folder: Path, name: str) -> bytes:
    return read_inside(folder, name, MOST_BYTES, str(folder / name))

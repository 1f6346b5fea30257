"""Checkpoints: configs of every quantization tool, indices, headers of every format, answers of a Hub."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .headers import packed
from .outcomes import command, function
from .search import Reader

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"

LONGEST_SEED = 10_000
"""Bytes; changes of longer checkpoints are mostly changes of their lists of modules."""

EXPLAIN = ("explain", "IN", "--gpu", "h200", "--json", "--offline")


def checkpoint_readers(work: Path) -> Iterator[Reader]:
    """The readers of a checkpoint's files, in folders below `work`."""
    configs, layers = config_seeds(), list(layer_seeds())
    yield Reader("configs", configs, partial(_opened, work / "configs"), share=30)
    yield Reader("configs, explain", configs, partial(_commanded, work / "explained", EXPLAIN), share=1)
    yield Reader("checkpoints", layers, partial(_opened, work / "checkpoints"), share=20)
    for name, words in {
        "explain": ("explain", "IN", "--gpu", "h100", "--verbose", "--offline"),
        "explain --html": ("explain", "IN", "--gpu", "h100", "--offline", "--html", "OUT"),
        "convert --dry-run": ("convert", "IN", "OUT", "--to", "marlin", "--dry-run"),
        "convert to NVFP4": ("convert", "IN", "OUT", "--to", "nvfp4", "--requantize", "--dry-run"),
        "serve-check": ("serve-check", "IN", "--engine", "vllm", "--gpu", "h100", "--json"),
    }.items():
        yield Reader(
            f"checkpoints, {name}", layers, partial(_commanded, work / "commanded", words), share=0.7
        )
    yield Reader("indices", list(_index_seeds()), partial(_indexed, work / "indexed"), share=30)


def config_seeds() -> list[bytes]:
    """The configs that tests read: every family with every method, as the files of a checkpoint."""
    from support.written_configs import written_configs

    found: dict[tuple[str, str], list[bytes]] = {}
    for written in written_configs():
        files = {"config.json": written.config, **written.documents}
        found.setdefault((written.family.root, written.method), []).append(json.dumps(files).encode())
    return [text for texts in found.values() for text in texts[:3]]


def layer_seeds() -> Iterator[bytes]:
    """Small checkpoints of the built-in models: their documents, and dtype and shape of every tensor."""
    from moectl.checkpoint.source.catalogue import model_names, read_entry
    from moectl.errors import MoectlError
    from moectl.synth import Resized, SynthSizes, resized

    for model in model_names():
        entry = read_entry(model)
        try:
            config = resized(entry, SynthSizes(1, 4, 256, 256, 2))
            listing = Resized(entry, config).listing()
        except MoectlError:
            continue
        tensors = {name: [info.dtype, *info.shape] for name, info in listing.items()}
        text = json.dumps({"config.json": config, **entry.documents, "tensors": tensors}).encode()
        if len(text) < LONGEST_SEED:
            yield text


def _index_seeds() -> Iterator[bytes]:
    two = {f"t{n}": f"model-0000{n % 2 + 1}-of-00002.safetensors" for n in range(4)}
    yield json.dumps({"metadata": {"total_size": 32}, "weight_map": two}).encode()
    yield json.dumps({"weight_map": dict.fromkeys(two, WEIGHTS)}).encode()


def write_files(folder: Path, data: bytes) -> None:
    """Makes a checkpoint of a JSON object: documents by name, and ``tensors`` with dtype and sizes by name.

    What is not such an object is the config.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        files = None
    if not isinstance(files, dict):
        (folder / "config.json").write_bytes(data)
        return
    for name, content in files.items():
        if name == "tensors" and isinstance(content, dict):
            write_tensors(folder / WEIGHTS, content)
        elif name.endswith(".json") and "/" not in name and name.isprintable() and len(name) < 200:
            (folder / name).write_text(json.dumps(content))


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """A safetensors file of tensors, each a dtype and its sizes; the data are a hole, as far as it can be."""
    from moectl.dtypes import DTYPE_BITS

    header, start = {}, 0
    for name, form in tensors.items():
        dtype, *shape = form if isinstance(form, list) and form else ["U8", form]
        whole = all(isinstance(size, int) and size >= 0 for size in shape)
        bits = DTYPE_BITS.get(dtype, 8) if isinstance(dtype, str) else 8
        nbytes = math.prod(shape) * bits // 8 if whole else 0
        nbytes = nbytes if start + nbytes < 1 << 40 else 0
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(packed(text, 0))
    os.truncate(path, 8 + len(text) + start)


def _opened(folder: Path, data: bytes) -> str:
    """What opening a checkpoint says, and what was read from it."""
    from moectl.checkpoint import open_checkpoint
    from moectl.printable import printable

    write_files(folder, data)
    found: list[str] = []

    def read() -> None:
        checkpoint = open_checkpoint(folder, offline=True)
        found.extend(f"{group.layers} {group.problem}" for group in checkpoint.groups)

    return function(read) + printable("".join(found))


def _commanded(folder: Path, words: Sequence[str], data: bytes) -> str:
    write_files(folder, data)
    out = folder.with_name("out")
    try:
        return command(*({"IN": folder, "OUT": out}.get(word, word) for word in words))
    finally:
        shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink(missing_ok=True)


def _indexed(folder: Path, data: bytes) -> str:
    from moectl.checkpoint.source.shards import read_folder

    if not folder.exists():
        folder.mkdir()
        for name, tensors in ((1, ("t0", "t2")), (2, ("t1", "t3"))):
            path = folder / f"model-0000{name}-of-00002.safetensors"
            write_tensors(path, {tensor: ["U8", 4] for tensor in tensors})
        write_tensors(folder / WEIGHTS, {f"t{n}": ["U8", 4] for n in range(4)})
    (folder / INDEX).write_bytes(data)
    return function(lambda: read_folder(folder))

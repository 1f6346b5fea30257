"""Synthetic checkpoints with a published model's tensor schema and random, quantized weights."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, LayerGroup, Origin
from ..checkpoint.source.shards import CONFIG, INDEX
from ..convert.manifest.progress_log import Meter, Progress, only_writer, silent
from ..dtypes import MODEL_DTYPES
from ..files.atomic import disk_errors, replacing, write_exactly, write_file
from ..files.output_folder import refuse_filled, refuse_small_disk
from ..files.safetensors_writer import FilePlan, TensorSpec, plan_file
from ..files.tensor_table import TensorInfo
from .model_schema import schema_of
from .random_weights import BANK_ROWS, TensorMaker
from .resize import VOCABULARY, Resized, SynthSizes, resized

__all__ = ["BANK_ROWS", "Resized", "SynthSizes", "resized", "synthesize"]

SHARD_BYTES = 2 << 30
"""Most bytes of one file, unless a single tensor has more."""


def synthesize(
    model: str,
    out: Path,
    *,
    layers: int | None = None,
    experts: int | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    top_k: int | None = None,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> Path:
    """Writes a checkpoint of `model` at the given sizes to the directory `out`; returns `out`.

    `model` is a built-in model, a checkpoint's directory or a config.json (`schema_of`).

    It contains config.json, the MoE layers' tensors (experts, router, shared experts) under their published
    names, a small embedding, the last norm, and an index if there is more than one file. It lacks what the
    catalogue does not list: attention, the layers' norms, dense layers, the output head and the tokenizer, so
    that no engine can generate text with it. Weights are drawn with standard deviation ``1 / sqrt(fan_in)``
    and quantized with the format's codec; an expert's rows are picked from `BANK_ROWS` such rows and rotated
    by whole groups, so that a layer of full size takes seconds. Equal arguments give equal bytes. Top-k never
    exceeds the experts.

    Args:
        layers: number of MoE layers; dense layers before them are in the config but have no tensors.
        shard_bytes: as `SHARD_BYTES`.
        progress: called with bytes done, total bytes, and the file being written.

    Raises:
        UsageError: an unknown model, a size that does not fit the format, or `out` is not empty.
        Unavailable: `out` cannot be written, or the disk is too full. After any error, including an
            interrupt, `out` is as it was before.
    """
    entry, own_config = schema_of(model)
    sizes = SynthSizes(layers, experts, hidden, intermediate, top_k)
    config = resized(replace(entry, config=own_config), sizes)
    model_tensors = Resized(entry, config)
    listing = model_tensors.listing()
    groups = model_tensors.groups(listing)
    maker = TensorMaker(seed)
    maker.add(Checkpoint(config, listing, groups, Origin("catalogue", entry.name)))
    listing |= _outer_tensors(groups[0])
    refuse_filled(out)
    with disk_errors(out, 0):
        total = sum(info.nbytes for info in listing.values())
        refuse_small_disk(out, total, "Choose fewer layers or experts, or write to another disk.")
    files = _files(_shards(list(listing.values()), shard_bytes))
    weight_map = {name: file.name for file in files for name in file.tensors}
    documents: dict[str, Any] = dict(entry.documents)
    if files[1:]:
        documents[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    # Last, so that an unfinished directory has no config.json and is not taken for a checkpoint.
    documents[CONFIG] = config
    meter = Meter(progress, total)
    with only_writer(out, "synthetic", [*(file.name for file in files), *documents]):
        for file in files:
            _write(out / file.name, file, maker, meter)
        for name, document in documents.items():
            write_file(out / name, json.dumps(document, indent=2).encode() + b"\n")
    return out


def _outer_tensors(group: LayerGroup) -> dict[str, TensorInfo]:
    """Tensors that belong to no layer: a small embedding and the last norm."""
    hidden, dtype = group.problem.model_hidden, MODEL_DTYPES[group.problem.dtype]
    root = re.split(r"(?:layers|blocks)\.\{layer\}", group.names.experts["w2"])[0]
    shapes = {f"{root}embed_tokens.weight": (VOCABULARY, hidden), f"{root}norm.weight": (hidden,)}
    return {
        name: TensorInfo(name, dtype, shape, "", 0, 2 * math.prod(shape)) for name, shape in shapes.items()
    }


def _shards(tensors: list[TensorInfo], shard_bytes: int) -> list[list[TensorInfo]]:
    """`tensors` in consecutive shards of at most `shard_bytes`."""
    shards: list[list[TensorInfo]] = [[]]
    room = shard_bytes
    for info in tensors:
        if shards[-1] and info.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(info)
        room -= info.nbytes
    return shards


def _files(shards: list[list[TensorInfo]]) -> list[FilePlan]:
    """A plan for each shard's file, with the usual names."""
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    return [
        plan_file(name, (TensorSpec(info.name, info.dtype, info.shape) for info in shard), {"format": "pt"})
        for name, shard in zip(names, shards, strict=True)
    ]


def _write(path: Path, file: FilePlan, maker: TensorMaker, meter: Meter) -> None:
    meter.start(file.name)
    with replacing(path, file.size) as fd:
        write_exactly(fd, memoryview(file.header), 0)
        for info in file.tensors.values():
            offset = info.start
            for part in maker.parts(info):
                write_exactly(fd, part.numpy().data, offset)
                offset += part.numel()
                meter.advance(part.numel())
            assert offset == info.end, f"{info.name}: {offset - info.start} bytes, not {info.nbytes}"

"""Synthetic checkpoints with a published model's tensor schema and random, quantized weights."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, LayerGroup, Origin
from ..checkpoint.source.catalogue import built_in
from ..checkpoint.source.shards import CONFIG, INDEX
from ..convert.manifest.progress_log import Meter, Progress, silent
from ..dtypes import MODEL_DTYPES
from ..files.atomic import disk_errors, replacing, write_exactly, write_file
from ..files.output_folder import all_or_none, refuse_filled, refuse_small_disk
from ..files.safetensors_writer import FilePlan, TensorSpec, plan_file
from ..files.tensor_table import TensorInfo
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
    """The directory `out` with a checkpoint of the built-in `model`, its sizes changed as asked.

    It holds config.json, the MoE layers' tensors (experts, router, shared experts) under their
    published names, a small embedding and the last norm, and an index when there is more than one
    file. It leaves out what the catalogue does not list: attention, the layers' norms, dense layers,
    the output head and the tokenizer, so that no engine can generate text with it. Weights are drawn
    with standard deviation ``1 / sqrt(fan_in)`` and quantized with the format's codec; an expert's
    rows are picked from `BANK_ROWS` such rows and turned by whole groups, so that a layer
    of full size takes seconds. Equal arguments give equal bytes. Top-k never exceeds the experts.

    Args:
        layers: MoE layers; dense layers before them count in the config, and have no tensors.
        shard_bytes: as `SHARD_BYTES`.
        progress: called with bytes done, bytes in all, and the file being written.

    Raises:
        UsageError: an unknown model, a size that does not fit the format, or `out` is not empty.
        Unavailable: `out` cannot be written, or the disk has not enough room. After any error, an
            interrupt included, `out` is as it was.
    """
    entry = built_in(model)
    config = resized(entry, SynthSizes(layers, experts, hidden, intermediate, top_k))
    model_at = Resized(entry, config)
    listing = model_at.listing()
    groups = model_at.groups(listing)
    maker = TensorMaker(seed)
    maker.add(Checkpoint(config, listing, groups, Origin("catalogue", entry.name)))
    listing |= _rest(groups[0])
    refuse_filled(out)
    with disk_errors(out, 0):
        total = sum(info.nbytes for info in listing.values())
        refuse_small_disk(out, total, "Ask for fewer layers or experts, or write to another disk.")
    files = _files(_shards(list(listing.values()), shard_bytes))
    weight_map = {name: file.name for file in files for name in file.tensors}
    documents: dict[str, Any] = dict(entry.documents)
    if files[1:]:
        documents[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    # Last: a directory that was not finished has no config.json, so that nothing takes it for a checkpoint.
    documents[CONFIG] = config
    meter = Meter(progress, total)
    with all_or_none(out, [*(file.name for file in files), *documents]):
        for file in files:
            _write(out / file.name, file, maker, meter)
        for name, document in documents.items():
            write_file(out / name, json.dumps(document, indent=2).encode() + b"\n")
    return out


def _rest(group: LayerGroup) -> dict[str, TensorInfo]:
    """Tensors that belong to no MoE layer: a small embedding and the last norm, with no file yet."""
    hidden, dtype = group.problem.model_hidden, MODEL_DTYPES[group.problem.dtype]
    root = re.split(r"(?:layers|blocks)\.\{layer\}", group.names.experts["w2"])[0]
    shapes = {f"{root}embed_tokens.weight": (VOCABULARY, hidden), f"{root}norm.weight": (hidden,)}
    return {
        name: TensorInfo(name, dtype, shape, "", 0, 2 * math.prod(shape)) for name, shape in shapes.items()
    }


def _shards(tensors: list[TensorInfo], shard_bytes: int) -> list[list[TensorInfo]]:
    """`tensors` in runs of at most `shard_bytes`."""
    runs: list[list[TensorInfo]] = [[]]
    room = shard_bytes
    for info in tensors:
        if runs[-1] and info.nbytes > room:
            runs.append([])
            room = shard_bytes
        runs[-1].append(info)
        room -= info.nbytes
    return runs


def _files(shards: list[list[TensorInfo]]) -> list[FilePlan]:
    """A plan for each shard's file, named as published checkpoints name them."""
    names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    return [
        plan_file(name, (TensorSpec(it.name, it.dtype, it.shape) for it in shard), {"format": "pt"})
        for name, shard in zip(names, shards, strict=True)
    ]


def _write(path: Path, file: FilePlan, maker: TensorMaker, meter: Meter) -> None:
    meter.start(file.name)
    with replacing(path, file.size) as fd:
        write_exactly(fd, memoryview(file.header), 0)
        for info in file.tensors.values():
            at = info.start
            for part in maker.parts(info):
                write_exactly(fd, part.numpy().data, at)
                at += part.numel()
                meter.advance(part.numel())
            assert at == info.end, f"{info.name}: {at - info.start} bytes, not {info.nbytes}"

"""Checkpoints with a published model's tensor schema and random, really quantized weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint.catalogue import Entry, built_in
from .checkpoint.fields import KEYS, Fields
from .checkpoint.layers import layer_groups
from .checkpoint.model import LayerGroup, TensorInfo
from .checkpoint.moe_layers import moe_layers
from .checkpoint.shards import CONFIG, INDEX
from .convert.codecs import codec_for
from .convert.disk import (
    all_or_none,
    disk_errors,
    refuse_filled,
    refuse_small_disk,
    replacing,
    write_exactly,
    write_file,
)
from .convert.progress import Meter, Progress, silent
from .convert.safetensors_file import TORCH_DTYPES, FilePlan, TensorSpec, plan_file
from .errors import UsageError

SHARD_BYTES = 2 << 30
"""Most bytes of one file, unless a single tensor has more."""

BANK_ROWS = 4096
"""Rows of each matrix kind that are drawn and quantized; every expert is made of such rows."""

VOCABULARY = 256
ROUTER_SPREAD = 2.0
"""Standard deviation of router logits for inputs of unit variance: far enough apart to rank experts."""

BIAS_SPREAD = 0.05


@dataclass(frozen=True)
class Sizes:
    """What of a published model is made smaller; None keeps the published value.

    `layers` counts MoE layers.
    """

    layers: int | None = None
    experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    top_k: int | None = None


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
    """The folder `out` with a checkpoint of the built-in `model`, its sizes changed as asked.

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
    if not entry.resizable:
        raise UsageError(
            f"weights of {entry.name} cannot be made: synth knows the MXFP4 experts of gpt-oss and the "
            "packed integers of compressed-tensors only.",
            hint="Take openai/gpt-oss-20b or moonshotai/Kimi-K2-Thinking, with other sizes if need be.",
        )
    config = resized(entry, Sizes(layers, experts, hidden, intermediate, top_k))
    listing = {**entry.listing(config), **_rest(config)}
    (group,) = layer_groups(config, listing)
    _check_groups(group)
    refuse_filled(out)
    with disk_errors(out, 0):
        total = sum(info.nbytes for info in listing.values())
        refuse_small_disk(out, total, "Ask for fewer layers or experts, or write to another disk.")
    files = _files(_shards(list(listing.values()), shard_bytes))
    weight_map = {name: file.name for file in files for name in file.tensors}
    documents = {INDEX: {"metadata": {"total_size": total}, "weight_map": weight_map}} if files[1:] else {}
    # Last: a folder that was not finished has no config.json, so that nothing takes it for a checkpoint.
    documents[CONFIG] = config
    maker, meter = _Maker(group, seed), Meter(progress, total)
    with all_or_none(out, [*(file.name for file in files), *documents]):
        for file in files:
            _write(out / file.name, file, maker, meter)
        for name, document in documents.items():
            write_file(out / name, json.dumps(document, indent=2).encode() + b"\n")
    return out


def resized(entry: Entry, sizes: Sizes) -> dict[str, Any]:
    """The published config with `sizes` in place of its own, under every key that holds them.

    Raises UsageError when a size is not positive, or there are not so many layers.
    """
    for name, value in vars(sizes).items():
        if value is not None and value < 1:
            raise UsageError(
                f"{name} must be at least 1, got {value}.", hint="Leave it out for the published size."
            )
    config = json.loads(json.dumps(entry.config))
    fields = Fields(config)
    count = fields.integer("layers", KEYS["layers"])
    if sizes.layers is not None:
        published = len(moe_layers(fields, count))
        if sizes.layers > published:
            raise UsageError(
                f"{entry.name} has {published} MoE layers, {sizes.layers} were asked for.",
                hint=f"Ask for 1 to {published}, or leave it out for all.",
            )
        count = moe_layers(fields, count)[sizes.layers - 1] + 1
    experts = sizes.experts or fields.integer("experts", KEYS["experts"])
    top_k = sizes.top_k or min(experts, fields.integer("top_k", KEYS["top_k"]))
    if top_k > experts:
        raise UsageError(
            f"top-k {top_k} is more than the {experts} experts.", hint=f"Ask for at most {experts}."
        )
    changes = {
        "layers": (KEYS["layers"], count),
        "experts": (KEYS["experts"], experts),
        "top_k": (KEYS["top_k"], top_k),
        "hidden": (KEYS["hidden"], sizes.hidden),
        "intermediate": ((fields.key_of(KEYS["intermediate"]) or "",), sizes.intermediate),
        "vocabulary": (("vocab_size",), VOCABULARY),
    }
    for keys, value in changes.values():
        for key in keys:
            if key in config and value is not None:
                config[key] = value
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:count]
    return dict(config)


def _check_groups(group: LayerGroup) -> None:
    dims, block = group.problem.dims, group.problem.scheme.weight.group
    for name, size in (("hidden", dims.hidden), ("intermediate", dims.intermediate)):
        if block > 0 and size % block:
            raise UsageError(
                f"{name} must be a multiple of {block}, the weights' group size, got {size}.",
                hint=f"Ask for {-(-size // block) * block}.",
            )


def _rest(config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Tensors that belong to no MoE layer: a small embedding and the last norm, with no file yet."""
    hidden = Fields(config).integer("hidden", KEYS["hidden"])
    shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    return {
        name: TensorInfo(name, "BF16", shape, "", 0, 2 * math.prod(shape)) for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class _Bank:
    """Quantized rows ``[BANK_ROWS, groups, bytes]`` of codes and of scales."""

    codes: Tensor
    scales: Tensor


class _Maker:
    """Makes each tensor's bytes from the seed and its own name, so that order and batch do not matter."""

    def __init__(self, group: LayerGroup, seed: int) -> None:
        self._group, self._seed = group, seed
        self._banks: dict[int, _Bank] = {}
        templates = group.names.experts
        self._roles: dict[str, tuple[str, str, int, int | None]] = {}
        per_expert = any("{expert}" in template for template in templates.values())
        experts: list[int | None] = list(range(group.problem.experts)) if per_expert else [None]
        for layer in group.layers:
            for kind, names in (
                ("expert", templates),
                ("router", group.names.router),
                ("shared", group.names.shared),
            ):
                for role, template in names.items():
                    for expert in experts if kind == "expert" else [None]:
                        self._roles[template.format(layer=layer, expert=expert)] = (kind, role, layer, expert)

    def parts(self, info: TensorInfo) -> Iterator[Tensor]:
        """The tensor in pieces of whole experts, each contiguous bytes."""
        kind, role, layer, expert = self._roles.get(info.name, ("rest", "", 0, None))
        if kind != "expert":
            yield _as_bytes(self._plain(info, kind, role))
            return
        make = {"": self._codes, "_scale": self._scales, "_shape": self._shape, "_bias": self._bias}
        matrix, _, suffix = role.partition("_")
        maker = make["_" + suffix if suffix else ""]
        experts = range(self._group.problem.experts) if expert is None else (expert,)
        for index in experts:
            yield _as_bytes(maker(info, matrix, layer, index))

    def _generator(self, *key: object) -> torch.Generator:
        """A generator that depends on the seed and `key` alone."""
        digest = hashlib.blake2b(repr((self._seed, *key)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def _plain(self, info: TensorInfo, kind: str, role: str) -> Tensor:
        """Router, shared experts and the rest."""
        if info.name.endswith("norm.weight"):
            return torch.ones(info.shape, dtype=TORCH_DTYPES[info.dtype])
        values = torch.randn(info.shape, generator=self._generator(info.name))
        if len(info.shape) == 1:
            values *= BIAS_SPREAD
        else:
            values *= (ROUTER_SPREAD if kind == "router" else 1.0) / math.sqrt(info.shape[-1])
        return values.to(TORCH_DTYPES[info.dtype])

    def _extents(self, matrix: str) -> tuple[int, int]:
        """Rows and columns of an expert's matrix."""
        dims = self._group.problem.dims
        rows = {"w13": 2 * dims.intermediate, "w1": dims.intermediate, "w3": dims.intermediate}
        return (dims.hidden, dims.intermediate) if matrix == "w2" else (rows[matrix], dims.hidden)

    def _bank(self, columns: int) -> _Bank:
        if columns not in self._banks:
            codec = codec_for(self._group.problem.scheme.weight)
            weights = torch.randn(1, BANK_ROWS, columns, generator=self._generator("bank", columns))
            # Piece by piece: encoding takes several times the memory of what it encodes.
            parts = [codec.encode(part / math.sqrt(columns)) for part in torch.split(weights, 1024, dim=1)]
            codes = torch.cat([part.codes for part in parts], 1)[0]
            scales = torch.cat([part.scale for part in parts if part.scale is not None], 1)[0]
            groups = scales.shape[1]
            self._banks[columns] = _Bank(
                codes.view(BANK_ROWS, groups, -1), scales.view(BANK_ROWS, groups, -1)
            )
        return self._banks[columns]

    def _pick(self, rows: Tensor, matrix: str, layer: int, expert: int) -> Tensor:
        """One expert's rows, turned by whole groups; codes and scales of a matrix alike."""
        generator = self._generator(matrix, layer, expert)
        chosen = torch.randint(BANK_ROWS, (self._extents(matrix)[0],), generator=generator)
        turn = int(torch.randint(rows.shape[1], (), generator=generator))
        return rows[chosen].roll(turn, dims=1)

    def _codes(self, info: TensorInfo, matrix: str, layer: int, expert: int) -> Tensor:
        return self._pick(self._bank(self._extents(matrix)[1]).codes, matrix, layer, expert)

    def _scales(self, info: TensorInfo, matrix: str, layer: int, expert: int) -> Tensor:
        return self._pick(self._bank(self._extents(matrix)[1]).scales, matrix, layer, expert)

    def _shape(self, info: TensorInfo, matrix: str, layer: int, expert: int) -> Tensor:
        return torch.tensor(self._extents(matrix), dtype=TORCH_DTYPES[info.dtype])

    def _bias(self, info: TensorInfo, matrix: str, layer: int, expert: int) -> Tensor:
        generator = self._generator(matrix, "bias", layer, expert)
        values = torch.randn(self._extents(matrix)[0], generator=generator) * BIAS_SPREAD
        return values.to(TORCH_DTYPES[info.dtype])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


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


def _write(path: Path, file: FilePlan, maker: _Maker, meter: Meter) -> None:
    meter.say(file.name)
    with replacing(path, file.size) as fd:
        write_exactly(fd, memoryview(file.header), 0)
        for info in file.tensors.values():
            at = info.start
            for part in maker.parts(info):
                write_exactly(fd, part.numpy().data, at)
                at += part.numel()
                meter.advance(part.numel())
            assert at == info.end, f"{info.name}: {at - info.start} bytes, not {info.nbytes}"

"""A planned conversion carried out: layer by layer, bounded in memory, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..checkpoint.model import TensorInfo
from ..errors import CheckpointError, Unavailable, UsageError
from .batches import (
    Arena,
    Digests,
    FolderReader,
    Piece,
    as_bytes,
    run_stages,
    spans,
)
from .canonical import byte_scales
from .codecs import check_scales
from .disk import (
    PARTIAL,
    create_folder,
    range_sha256,
    refuse_inside,
    refuse_small_disk,
    replacing,
    write_exactly,
    write_file,
)
from .manifest import load_manifest
from .manifest_record import (
    CONFIG,
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    READY,
    SOURCE_CONFIG,
    FileRecord,
    LayerRecord,
    ManifestRecord,
    PartHashes,
    RestRecord,
    SourceRecord,
    converted_config,
    manifest_bytes,
    ready_bytes,
)
from .plan import LayerPlan, Plan, conversion_facts, digest_of
from .progress import LOG, Meter, Progress, ProgressLog, open_log, refuse_another, silent
from .records import to_json
from .rest import copy_small_files, file_matches, rest_sha256, source_record, write_rest
from .shards import SliceHashes
from .sources import carve, read_batch
from .values import Facts, Tensors

SCALES_AT_ONCE = 1 << 20
"""Bytes of scales that are looked at together: counting takes several times as much memory."""


@dataclass(frozen=True)
class Summary:
    """What a conversion did: layers converted now and found finished, bytes read and written."""

    folder: Path
    converted: tuple[int, ...]
    resumed: tuple[int, ...]
    bytes_in: int
    bytes_out: int
    skipped_files: tuple[str, ...] = ()


def convert(
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress = silent,
    threads: int | None = None,
) -> Summary:
    """Carries out `plan` into `out`, and the `Summary` of it.

    The source is only read. Files appear under their names when they are whole and synced; READY
    appears last, after everything else. What an interrupted run finished is kept, checked by its
    hashes, and completed with `resume`; the result is the same, byte for byte.

    Args:
        out: a folder that is empty, does not exist yet, or (`resume`) holds the same conversion.
        threads: 1 does one thing after another; more, the default, overlap reading, converting and
            writing.

    Raises:
        UsageError: `out` cannot be used.
        Unavailable: no data on this machine, or no room on the disk; resumable.
        CheckpointError: the source's bytes are not what its headers say, or hold a NaN scale.
    """
    folder = plan.checkpoint.folder
    if folder is None:
        raise Unavailable(
            f"{plan.checkpoint.origin.name} has headers but no weights on this machine.",
            hint="Download the checkpoint, then convert its folder.",
        )
    check_output(folder, out, resume)
    if resume and (out / READY).exists():
        return _already_done(plan, folder, out, progress)
    refuse_small_disk(out, plan.disk_needed, "Make room, choose another folder, or give --experts-only.")
    create_folder(out)
    log = open_log(out, plan.fingerprint())
    try:
        summary = _convert(plan, folder, out, log, progress, overlap=threads != 1)
    except BaseException:
        log.close()
        raise
    log.close(remove=True)
    return summary


def check_output(folder: Path | None, out: Path, resume: bool) -> None:
    """Raises UsageError when a conversion of the checkpoint in `folder` cannot be written to `out`."""
    if folder is not None:
        refuse_inside(folder, out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file, not a folder.", hint="Choose another name.")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if found and not resume:
        begun = LOG in found
        raise UsageError(
            f"the output folder {out} is not empty: it holds {', '.join(found[:3])}.",
            hint="Finish the conversion with --resume." if begun else "Choose an empty folder.",
        )
    if found and LOG not in found and READY not in found:
        raise UsageError(
            f"{out} holds no conversion to resume: it has no {LOG}.",
            hint="Choose an empty folder, and remove this one if it is not needed.",
        )


def _already_done(plan: Plan, folder: Path, out: Path, progress: Progress) -> Summary:
    """The summary of a finished conversion, after it was held to the plan and to the source's bytes."""
    manifest = load_manifest(out)
    record = manifest.record
    held = {**conversion_facts(record), **_source_facts(record.source)}
    wanted = {**conversion_facts(plan), **_source_facts(source_record(plan.checkpoint, folder))}
    refuse_another(out, held, wanted)
    meter = Meter(progress, plan.bytes_in + plan.rest_bytes)
    with FolderReader(folder) as reader:
        for layer in plan.layers:
            meter.say(f"layer {layer.layer}")
            _check_same_source(layer, manifest.layer(layer.layer), reader, out)
            meter.advance(layer.bytes_in)
        hashes = {item.file: item.sha256 for item in record.rest}
        for rest in plan.rest:
            meter.say(rest.name)
            if rest_sha256(rest, reader, folder) != hashes.get(rest.name):
                raise _other_checkpoint(out, rest.name)
            meter.advance(sum(info.nbytes for info in rest.tensors))
    (out / LOG).unlink(missing_ok=True)
    return Summary(out, (), manifest.layers, 0, 0)


def _source_facts(source: SourceRecord) -> dict[str, str]:
    """What tells checkpoints apart without their weights. A copy elsewhere is the same checkpoint."""
    return {"config": source.config_sha256, "tensor headers": digest_of(to_json(source.files))}


def _other_checkpoint(out: Path, name: str) -> UsageError:
    return UsageError(
        f"{out} was begun with another checkpoint: {name} has other bytes there.",
        hint="Resume with the same checkpoint, or convert into an empty folder.",
    )


def _check_same_source(layer: LayerPlan, record: LayerRecord, reader: FolderReader, out: Path) -> None:
    """Raises UsageError when the source's tensors are not those that `record`'s layer was made of.

    Names, shapes and headers are equal in every revision of a model, so only the bytes can tell.
    """
    for mapped in layer.map.parts:
        extents, hashes = mapped.extents(layer.map.experts), record.source[mapped.part.stored].sha256
        for (info, start, stop), before in zip(extents, hashes, strict=True):
            if range_sha256(reader.fd(info.file), info.start + start, info.start + stop, info.file) != before:
                raise _other_checkpoint(out, info.name)


@dataclass
class _Counts:
    converted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)


def _convert(
    plan: Plan, folder: Path, out: Path, log: ProgressLog, progress: Progress, *, overlap: bool
) -> Summary:
    for path in out.glob(f"*{PARTIAL}"):
        path.unlink()
    meter = Meter(progress, plan.bytes_in + plan.rest_bytes)
    layers: list[LayerRecord] = []
    counts = _Counts()
    arena = Arena(plan.arena_bytes)
    with FolderReader(folder) as reader:
        _check_lengths(plan, reader)
        for layer in plan.layers:
            meter.say(f"layer {layer.layer}")
            record = log.layers.get(layer.layer)
            if record and _is_finished(out, layer, record):
                _check_same_source(layer, record, reader, out)
                meter.advance(layer.bytes_in)
                counts.resumed.append(layer.layer)
            else:
                record = _convert_layer(layer, reader, out, meter, arena, overlap)
                log.add(record)
                counts.converted.append(layer.layer)
            layers.append(record)
        rest: list[RestRecord] = []
        for item in plan.rest:
            meter.say(item.name)
            rest.append(write_rest(item, reader, folder, out, log, meter))
    meter.say("manifest")
    skipped = _finish(plan, folder, out, layers, rest)
    return Summary(
        out, tuple(counts.converted), tuple(counts.resumed), plan.bytes_in, plan.bytes_out, skipped
    )


def _check_lengths(plan: Plan, reader: FolderReader) -> None:
    """Every source file must still be as long as its header said when the conversion was planned."""
    ends: dict[str, int] = {}
    for info in plan.checkpoint.tensors.values():
        ends[info.file] = max(ends.get(info.file, 0), info.end)
    for name, end in ends.items():
        size = os.fstat(reader.fd(name)).st_size
        if size < end:
            raise CheckpointError(
                f"{name} is truncated: its header asks for {end} bytes, the file has {size}.",
                hint="Fetch the file again.",
            )


def _is_finished(out: Path, layer: LayerPlan, record: LayerRecord) -> bool:
    """True when the logged layer's file is there and every tensor has the logged hash."""
    if record.file != layer.file.name or set(record.sha256) != set(layer.file.tensors):
        return False
    hashes = {info: record.sha256[name] for name, info in layer.file.tensors.items()}
    return file_matches(out / layer.file.name, layer.file, hashes)


class _LayerStages:
    """Reads, converts and writes the expert batches of one layer."""

    def __init__(self, layer: LayerPlan, reader: FolderReader, fd: int, meter: Meter) -> None:
        self._layer, self._reader, self._fd, self._meter = layer, reader, fd, meter
        self._shapes = layer.map.batch_shapes
        self._facts: Facts = {}
        self._ends = {info.name: stop for info, _, stop in layer.map.extents}
        self.read_hashes, self.write_hashes, self.slices = Digests(), Digests(), SliceHashes()

    def look(self, jobs: list[tuple[int, int]], source: torch.Tensor) -> None:
        """Takes the facts that the writer needs, in a pass over the roles that they are about."""
        roles = frozenset(fact.role for fact in self._layer.writer.facts)
        shapes = {role: form for role, form in self._shapes.items() if role in roles}
        for job in jobs if roles else []:
            batch = carve(source, shapes, job[1] - job[0])
            read_batch(self._layer.map, *job, self._read_only, batch, roles)
            self._facts = self._layer.writer.look(self._layer.share.cut(batch), self._facts)

    def read(self, job: tuple[int, int], source: torch.Tensor) -> None:
        read_batch(self._layer.map, *job, self._read, carve(source, self._shapes, job[1] - job[0]))

    def _read_only(self, info: TensorInfo, at: int, view: memoryview) -> None:
        self._reader.read(info.file, view, info.start + at)

    def _read(self, info: TensorInfo, at: int, view: memoryview) -> None:
        self._read_only(info, at, view)
        if info.name not in self.read_hashes:
            self.read_hashes.update(info.name, view, last=at + len(view) == self._ends[info.name])

    def work(self, job: tuple[int, int], source: torch.Tensor, target: torch.Tensor) -> list[Piece]:
        batch = carve(source, self._shapes, job[1] - job[0])
        check_batch(self._layer, batch, job[0])
        share, roles = self._layer.share, self._layer.map.shapes
        held = share.cut(batch)
        if share.sliced:
            self.slices.take({role: t for role, t in held.items() if role in roles}, job[0])
        pieces = list(self._layer.writer.store(held, job[0], self._facts, target))
        self._meter.advance(sum(size for p in self._layer.map.parts for _, _, size, _ in p.run(*job)))
        return pieces

    def write(self, job: tuple[int, int], pieces: list[Piece]) -> None:
        for piece in pieces:
            place, view = self._layer.file.tensors[piece.name], as_bytes(piece.data)
            self.write_hashes.update(piece.name, view, last=piece.at + len(view) == place.nbytes)
            write_exactly(self._fd, view, place.start + piece.at)


def check_batch(layer: LayerPlan, batch: Tensors, first: int) -> None:
    """Refuses a NaN or infinite scale, and tensors without weights that contradict the weights."""
    for role, t in batch.items():
        if role.endswith("_scale") and role in layer.map.shapes:
            step = max(1, SCALES_AT_ONCE * len(t) // max(1, t.numel() * t.element_size()))
            for at in range(0, len(t), step):
                _check_scales(layer, role, t[at : at + step], first + at)
    for mapped in layer.map.parts:
        if mapped.part.role:
            continue
        for i, values in enumerate(batch[mapped.part.side]):
            reason = layer.map.check(mapped.part, layer.share.whole, values)
            if reason:
                name = mapped.tensors[first + i if mapped.per_expert else 0].name
                raise CheckpointError(f"{name} {reason}.", hint="Check the checkpoint.")


def _check_scales(layer: LayerPlan, role: str, scales: torch.Tensor, first: int) -> None:
    try:
        check_scales(scales, byte_scales(layer.problem))
    except CheckpointError as error:
        mapped = next(p for p in layer.map.parts if p.part.role == role)
        name = mapped.tensors[first if mapped.per_expert else 0].name
        raise CheckpointError(
            f"layer {layer.layer}, {role} of experts from {first} ({name}): {error.what}",
            reason=error.reason,
            hint=error.hint,
        ) from error


def _convert_layer(
    layer: LayerPlan, reader: FolderReader, out: Path, meter: Meter, arena: Arena, overlap: bool
) -> LayerRecord:
    """Writes one layer's file and returns its record."""
    path = out / layer.file.name
    with replacing(path, layer.file.size) as fd:
        write_exactly(fd, memoryview(layer.file.header), 0)
        stages = _LayerStages(layer, reader, fd, meter)
        jobs = spans(layer.map.experts, layer.batch)
        buffers = arena.cut(*layer.buffers)
        stages.look(jobs, buffers[0][0])
        run_stages(jobs, stages, buffers, overlap=overlap)
    written = {name: stages.write_hashes[name] for name in layer.file.tensors}
    source = {
        mapped.part.stored: PartHashes(
            tuple(stages.read_hashes[info.name] for info in mapped.tensors),
            tuple(info.file for info in mapped.tensors),
        )
        for mapped in layer.map.parts
    }
    slices = stages.slices.result()
    return LayerRecord(layer.layer, layer.file.name, layer.file.size, written, source, slices)


def producer() -> dict[str, str]:
    """Versions of what writes the folder; an absent package is ``""``."""
    versions = {"moectl": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name, package in (("triton", "triton"), ("flashinfer", "flashinfer-python")):
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _finish(
    plan: Plan, folder: Path, out: Path, layers: list[LayerRecord], rest: list[RestRecord]
) -> tuple[str, ...]:
    """Copies the small files, then writes index, configs, manifest, and READY last."""
    files, skipped = copy_small_files(folder, out, {info.file for info in plan.checkpoint.tensors.values()})
    weight_map = {name: layer.file.name for layer in plan.layers for name in layer.file.tensors}
    weight_map.update({info.name: item.name for item in plan.rest for info in item.tensors})
    total = (
        sum(info.nbytes for layer in plan.layers for info in layer.file.tensors.values()) + plan.rest_bytes
    )
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    config = converted_config(plan.checkpoint.config, plan.layout)
    source = source_record(plan.checkpoint, folder)
    documents = {
        INDEX: _document(index),
        CONFIG: _document(config),
        SOURCE_CONFIG: (folder / CONFIG).read_bytes(),
    }
    for name, data in documents.items():
        write_file(out / name, data)
    record = ManifestRecord(
        format_version=FORMAT_VERSION,
        producer=producer(),
        source=source,
        layout=plan.layout,
        shard=plan.shard,
        experts_only=plan.experts_only,
        groups=plan.groups,
        layers=tuple(layers),
        rest=tuple(rest),
        files=files,
        documents=tuple(
            FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in documents.items()
        ),
    )
    data = manifest_bytes(record)
    write_file(out / MANIFEST, data)
    write_file(out / READY, ready_bytes(data))
    return skipped


def _document(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()

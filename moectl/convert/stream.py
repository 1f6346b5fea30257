"""A planned conversion carried out: layer by layer, bounded in memory, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import CheckpointError, Unavailable, UsageError
from .batches import FolderReader
from .device import device_named
from .disk import (
    PARTIAL,
    create_folder,
    range_sha256,
    refuse_inside,
    refuse_small_disk,
    write_file,
)
from .layer_work import LayerStages, LayerWork
from .manifest import load_manifest
from .manifest_record import (
    CONFIG,
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    READY,
    REPORT,
    SOURCE_CONFIG,
    FileRecord,
    LayerRecord,
    ManifestRecord,
    RestRecord,
    SourceRecord,
    converted_config,
    manifest_bytes,
    ready_bytes,
)
from .pipeline import Crew, run_pipeline, usable_cores
from .plan import LayerPlan, Plan, conversion_facts, digest_of
from .progress import LOG, Meter, Progress, ProgressLog, open_log, refuse_another, silent
from .records import to_json
from .rest import copy_small_files, file_matches, rest_sha256, source_record, write_rest


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
    device: str = "cpu",
) -> Summary:
    """Carries out `plan` into `out`, and the `Summary` of it.

    The source is only read. Files appear under their names when they are whole and synced; READY
    appears last, after everything else. What an interrupted run finished is kept, checked by its
    hashes, and completed with `resume`; the result is the same, byte for byte.

    Args:
        out: a folder that is empty, does not exist yet, or (`resume`) holds the same conversion.
        threads: 1 does one thing after another; more overlap reading, hashing, converting and writing.
            By default as many as there are cores.
        device: where batches are converted: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` for a GPU if
            there is one.

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
    if resume and plan.ending is not None and (out / plan.ending.mark).exists():
        plan.ending.check_finished(plan, folder, out)
        return Summary(out, (), tuple(layer.layer for layer in plan.layers), 0, 0)
    if resume and (out / READY).exists():
        return _already_done(plan, folder, out, progress)
    refuse_small_disk(out, plan.disk_needed, "Make room, choose another folder, or give --experts-only.")
    create_folder(out)
    log = open_log(out, plan.fingerprint())
    try:
        meter = Meter(progress, plan.bytes_in + plan.rest_bytes)
        summary = _convert(plan, folder, out, log, meter, device, threads or usable_cores())
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
    if found and not {LOG, READY, REPORT} & set(found):
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


def _convert(
    plan: Plan, folder: Path, out: Path, log: ProgressLog, meter: Meter, device: str, threads: int
) -> Summary:
    for path in out.glob(f"*{PARTIAL}"):
        path.unlink()
    with FolderReader(folder) as reader:
        _check_lengths(plan, reader)
        records: dict[int, LayerRecord] = {}
        for layer in plan.layers:
            record = log.layers.get(layer.layer)
            if record and _is_finished(out, layer, record):
                meter.say(f"layer {layer.layer}")
                _check_same_source(layer, record, reader, out)
                meter.advance(layer.bytes_in)
                records[layer.layer] = record
        todo = [layer for layer in plan.layers if layer.layer not in records]
        resumed = tuple(records)
        if todo:
            records |= _convert_layers(plan, todo, out, reader, log, meter, device, threads)
        rest: list[RestRecord] = []
        for item in plan.rest:
            meter.say(item.name)
            rest.append(write_rest(item, reader, folder, out, log, meter))
    meter.say("manifest")
    skipped = _finish(plan, folder, out, [records[layer.layer] for layer in plan.layers], rest)
    converted = tuple(layer.layer for layer in todo)
    return Summary(out, converted, resumed, plan.bytes_in, plan.bytes_out, skipped)


def _convert_layers(
    plan: Plan,
    layers: list[LayerPlan],
    out: Path,
    reader: FolderReader,
    log: ProgressLog,
    meter: Meter,
    device: str,
    threads: int,
) -> dict[int, LayerRecord]:
    """The records of `layers`, written through one pipeline; no file is left half written."""
    works = [LayerWork(layer, out) for layer in layers]
    crew = Crew(threads)
    try:
        with device_named(device) as place:
            stages = LayerStages(reader, place, crew, meter, log)
            slots = [place.slot(*plan.buffers) for _ in range(1 if crew.alone else plan.slots)]
            run_pipeline(stages.batches(works), stages, slots)
            stages.finish()
            return stages.finished
    finally:
        crew.dismiss()
        for work in works:
            work.discard()


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
    if plan.ending is not None:
        return plan.ending.finish(plan, folder, out, layers, rest, producer())
    files, skipped = copy_small_files(folder, out, {info.file for info in plan.checkpoint.tensors.values()})
    config = converted_config(plan.checkpoint.config, plan.layout)
    source = source_record(plan.checkpoint, folder)
    documents = {
        INDEX: _document(plan.index),
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

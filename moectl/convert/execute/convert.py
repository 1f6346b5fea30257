"""A planned conversion carried out: layer by layer, bounded in memory, resumable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, Unavailable, UsageError
from ...files.atomic import PARTIAL
from ...files.output_folder import create_folder, refuse_inside, refuse_small_disk
from ...files.records import to_json
from ...files.safe_reading import range_sha256
from ...problem.layer_ranges import ranges
from ..manifest.manifest import load_manifest
from ..manifest.manifest_records import READY, REPORT, LayerRecord, PassthroughRecord, SourceRecord
from ..manifest.progress_log import (
    LOG,
    Meter,
    Progress,
    ProgressLog,
    conversion_of,
    open_log,
    refuse_another,
    silent,
)
from ..plan.conversion_plan import ConversionPlan, LayerPlan, conversion_facts, digest_of
from ..stream.devices import ConversionDevice, device_named
from ..stream.pipeline import WorkerThreads, run_pipeline, usable_cores
from ..stream.source_reader import FolderReader
from ..worker_partition import WorkerPartition, all_portions, portions_in
from .finish import finish_folder
from .layer_stages import LayerInProgress, LayerStages
from .passthrough import file_matches, rest_sha256, source_record, write_rest


@dataclass(frozen=True)
class ConversionSummary:
    """What a conversion did: layers converted now and found finished, bytes read and written."""

    folder: Path
    converted: tuple[int, ...]
    resumed: tuple[int, ...]
    bytes_in: int
    bytes_out: int
    skipped_files: tuple[str, ...] = ()


def convert(
    plan: ConversionPlan,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress = silent,
    threads: int | None = None,
    device: str = "cpu",
    portion: WorkerPartition | None = None,
) -> ConversionSummary:
    """Carries out `plan` into `out`, and the `ConversionSummary` of it.

    The source is only read. Files appear under their names when they are whole and synced; READY
    appears last, after everything else. What an interrupted run finished is kept, checked by its
    hashes, and completed with `resume`; the result is the same, byte for byte.

    Args:
        out: a folder that is empty, does not exist yet, or (`resume`) holds the same conversion.
        threads: 1 does one thing after another; more overlap reading, hashing, converting and writing.
            By default as many as there are cores.
        device: where batches are converted: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` for a GPU if
            there is one.
        portion: the part of the layers that is converted, by one of several processes that fill `out`
            together; `complete` completes it when all parts are there.

    Raises:
        UsageError: `out` cannot be used.
        Unavailable: no data on this machine, or no room on the disk; resumable.
        CheckpointError: the source's bytes are not what its headers say, or hold a NaN scale.
    """
    folder = _folder_of(plan)
    check_output(folder, out, resume, portion)
    if resume and (before := _finished(plan, folder, out, progress)):
        return before
    own = plan if portion is None else plan.of_portion(portion)
    place = device_named(device)  # A missing GPU is met before anything is created.
    refuse_small_disk(out, own.disk_needed, "Make room, choose another folder, or give --experts-only.")
    create_folder(out)
    if portion is not None:
        _refuse_other_parts(plan, out)
    log = open_log(out, plan.fingerprint(), LOG if portion is None else portion.log)
    try:
        meter = Meter(progress, own.bytes_in + own.rest_bytes)
        converted, resumed, rest = _convert(own, folder, out, log, meter, place, threads or usable_cores())
        skipped: tuple[str, ...] = ()
        if portion is None:
            meter.say("manifest")
            skipped = finish_folder(
                plan, folder, out, [log.layers[layer.layer] for layer in plan.layers], rest
            )
    except BaseException:
        log.close()
        raise
    log.close(remove=portion is None)
    return ConversionSummary(out, converted, resumed, own.bytes_in, own.bytes_out, skipped)


def complete(plan: ConversionPlan, out: Path) -> ConversionSummary:
    """Completes a folder that several processes have filled part by part: index, manifest, READY.

    Files are held to their planned headers and sizes, not to their hashes; `verify` does that.

    Raises:
        UsageError: parts or layers are missing, or `out` holds another conversion.
        Unavailable: a part is still being written.
        CheckpointError: a file that its part has finished is gone or not what was planned.
    """
    folder = _folder_of(plan)
    if before := _finished(plan, folder, out, silent):
        return before
    logs: list[ProgressLog] = []
    try:
        missing = []
        for portion in all_portions(out):
            if not (out / portion.log).exists():
                missing.append(f"part {portion} was not begun")
                continue
            logs.append(log := open_log(out, plan.fingerprint(), portion.log))
            own = plan.of_portion(portion)
            logged = log.layers
            layers = [i.layer for i in own.layers if i.layer not in logged or not _is_of(i, logged[i.layer])]
            files = [item.name for item in own.rest if item.name not in log.rest]
            missing += [f"part {portion} lacks layers {ranges(layers)}"] if layers else []
            missing += [f"part {portion} lacks {', '.join(files)}"] if files else []
        if missing:
            raise UsageError(
                f"{out} is not complete: {'; '.join(missing)}.",
                hint="Convert what is missing with --part, and --resume where it was begun.",
            )
        records = {number: record for log in logs for number, record in log.layers.items()}
        rest = {name: record for log in logs for name, record in log.rest.items()}
        _check_there(plan, out, rest)
        ordered = [records[layer.layer] for layer in plan.layers]
        skipped = finish_folder(plan, folder, out, ordered, [rest[item.name] for item in plan.rest])
    except BaseException:
        for log in logs:
            log.close()
        raise
    for log in logs:
        log.close(remove=True)
    return ConversionSummary(out, (), tuple(sorted(records)), 0, 0, skipped)


def _check_there(plan: ConversionPlan, out: Path, rest: Mapping[str, PassthroughRecord]) -> None:
    """CheckpointError when a finished file is gone, or has another size or header."""
    files = [layer.file for layer in plan.layers]
    wrong = [file.name for file in files if not file_matches(out / file.name, file, {})]
    for name, record in rest.items():
        if not (out / name).is_file() or (out / name).stat().st_size != record.size:
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"{', '.join(wrong[:3])} was finished, and is gone or changed.",
            hint="Convert its part again with --part and --resume.",
        )


def _finished(plan: ConversionPlan, folder: Path, out: Path, progress: Progress) -> ConversionSummary | None:
    """The summary of a conversion that is finished in `out`, after it was held to the plan; else None."""
    if plan.ending is not None and (out / plan.ending.mark).exists():
        plan.ending.check_finished(plan, folder, out)
        return ConversionSummary(out, (), tuple(layer.layer for layer in plan.layers), 0, 0)
    return _already_done(plan, folder, out, progress) if (out / READY).exists() else None


def _folder_of(plan: ConversionPlan) -> Path:
    if plan.checkpoint.folder is None:
        raise Unavailable(
            f"{plan.checkpoint.origin.name} has headers but no weights on this machine.",
            hint="Download the checkpoint, then convert its folder.",
        )
    return plan.checkpoint.folder


def _refuse_other_parts(plan: ConversionPlan, out: Path) -> None:
    """UsageError when parts of another conversion have been begun in `out`."""
    for portion in portions_in(out):
        begun = conversion_of(out / portion.log)
        if begun is not None:
            refuse_another(out, begun, plan.fingerprint())


def check_output(
    folder: Path | None, out: Path, resume: bool, portion: WorkerPartition | None = None
) -> None:
    """Raises UsageError when a conversion of the checkpoint in `folder` cannot be written to `out`."""
    if folder is not None:
        refuse_inside(folder, out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file, not a folder.", hint="Choose another name.")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    parts = portions_in(out)
    if portion is not None and parts and not {READY, REPORT} & set(found):
        if any(other.of != portion.of for other in parts):
            raise UsageError(
                f"{out} holds parts of {parts[0].of}, part {portion} was asked for.",
                hint="Use the same number of parts, or an empty folder.",
            )
        if portion in parts and not resume:
            raise UsageError(f"part {portion} was begun in {out}.", hint="Finish it with --resume.")
        return
    own = LOG if portion is None else portion.log
    if found and not resume:
        hint = "Choose an empty folder."
        if own in found:
            hint = "Finish the conversion with --resume."
        elif parts:
            hint = f"Convert its parts with --part N/{parts[0].of}, then complete it with --finish."
        raise UsageError(f"the output folder {out} is not empty: it holds {', '.join(found[:3])}.", hint=hint)
    if found and not {own, READY, REPORT} & set(found):
        raise UsageError(
            f"{out} holds no conversion to resume: it has no {own}.",
            hint="Choose an empty folder, and remove this one if it is not needed.",
        )


def _already_done(plan: ConversionPlan, folder: Path, out: Path, progress: Progress) -> ConversionSummary:
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
    return ConversionSummary(out, (), manifest.layers, 0, 0)


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
    for mapped in layer.map.mapped:
        extents, hashes = mapped.extents(layer.map.experts), record.source[mapped.mapping.stored].sha256
        for (info, start, stop), before in zip(extents, hashes, strict=True):
            if range_sha256(reader.fd(info.file), info.start + start, info.start + stop, info.file) != before:
                raise _other_checkpoint(out, info.name)


def _convert(
    plan: ConversionPlan,
    folder: Path,
    out: Path,
    log: ProgressLog,
    meter: Meter,
    device: ConversionDevice,
    threads: int,
) -> tuple[tuple[int, ...], tuple[int, ...], list[PassthroughRecord]]:
    """Layers converted now and found finished, and the records of all other files; all are logged."""
    for name in (*(layer.file.name for layer in plan.layers), *(item.name for item in plan.rest)):
        (out / f"{name}{PARTIAL}").unlink(missing_ok=True)
    with FolderReader(folder) as reader:
        _check_lengths(plan, reader)
        todo: list[LayerPlan] = []
        for layer in plan.layers:
            record = log.layers.get(layer.layer)
            if record is None or not _is_finished(out, layer, record):
                todo.append(layer)
                continue
            meter.say(f"layer {layer.layer}")
            _check_same_source(layer, record, reader, out)
            meter.advance(layer.bytes_in)
        if todo:
            _convert_layers(plan, todo, out, reader, log, meter, device, threads)
        rest: list[PassthroughRecord] = []
        for item in plan.rest:
            meter.say(item.name)
            rest.append(write_rest(item, reader, folder, out, log, meter))
    converted = tuple(layer.layer for layer in todo)
    resumed = tuple(layer.layer for layer in plan.layers if layer not in todo)
    return converted, resumed, rest


def _convert_layers(
    plan: ConversionPlan,
    layers: list[LayerPlan],
    out: Path,
    reader: FolderReader,
    log: ProgressLog,
    meter: Meter,
    device: ConversionDevice,
    threads: int,
) -> None:
    """Writes and logs `layers`, all through one pipeline; no file is left half written."""
    works = [LayerInProgress(layer, out) for layer in layers]
    crew = WorkerThreads(threads)
    try:
        with device as place:
            stages = LayerStages(reader, place, crew, meter, log)
            count = 1 if crew.alone else plan.slots
            with ThreadPoolExecutor(count) as pool:
                slots = list(pool.map(lambda _: place.slot(*plan.buffers), range(count)))
            run_pipeline(stages.batches(works), stages, slots)
            stages.finish()
    finally:
        crew.dismiss()
        for work in works:
            work.discard()


def _check_lengths(plan: ConversionPlan, reader: FolderReader) -> None:
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
    if not _is_of(layer, record):
        return False
    hashes = {info: record.sha256[name] for name, info in layer.file.tensors.items()}
    return file_matches(out / layer.file.name, layer.file, hashes)


def _is_of(layer: LayerPlan, record: LayerRecord) -> bool:
    """True when `record` is about the files, tensors and slices that are planned for `layer`."""
    files = {it.mapping.stored: tuple(info.file for info in it.tensors) for it in layer.map.mapped}
    return (
        (record.file, record.size) == (layer.file.name, layer.file.size)
        and set(record.sha256) == set(layer.file.tensors)
        and {key: hashes.files for key, hashes in record.source.items()} == files
        and all(len(hashes.sha256) == len(files[key]) for key, hashes in record.source.items())
        and set(record.slices) == (set(layer.map.shapes) if layer.share.sliced else set())
    )

"""Executes a conversion plan: layer by layer, with bounded memory, resumable."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.source.catalogue import weights_missing
from ...errors import CheckpointError, UsageError
from ...files.atomic import PARTIAL, remove_file
from ...files.lock import Busy
from ...files.output_folder import create_folder, refuse_small_disk
from ...files.records import to_json
from ...files.safe_reading import range_sha256
from ...files.sizes import size
from ...problem.layer_ranges import layers_of
from ..manifest.manifest import load_manifest, load_rank_record
from ..manifest.manifest_records import (
    LayerRecord,
    ManifestRecord,
    PassthroughRecord,
    SourceRecord,
)
from ..manifest.progress_log import (
    LOG,
    Meter,
    Progress,
    ProgressLog,
    open_log,
    refuse_other_conversion,
    remove_logs,
    silent,
)
from ..plan.conversion_plan import SMALL_FILES, ConversionPlan, LayerPlan, conversion_facts, digest_of
from ..plan.source_pin import PinnedSource, pin_source, source_record
from ..stream.devices import ConversionDevice, device_named
from ..stream.pipeline import WorkerThreads, run_pipeline, usable_cores
from ..stream.source_reader import FolderReader
from ..worker_partition import WorkerPartition, all_partitions
from .finish import finish_folder
from .layer_stages import LayerInProgress, LayerStages
from .output_checks import check_output, refuse_other_writers
from .passthrough import file_matches, passthrough_sha256, write_passthrough


@dataclass(frozen=True)
class ConversionSummary:
    """The result of a conversion: layers converted now, those finished before, bytes read and written."""

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
    partition: WorkerPartition | None = None,
) -> ConversionSummary:
    """Executes `plan` into `out` and returns its `ConversionSummary`.

    The source is only read. Files get their final names once they are complete and synced; READY is written
    last. With `resume`, the layers that an interrupted run finished are checked against their hashes and
    kept; the result is the same, byte for byte.

    Args:
        out: a directory that is empty, does not exist yet, or (`resume`) holds the same conversion.
        threads: 1 runs one stage at a time; with more, reading, hashing, converting and writing overlap. By
            default the number of cores.
        device: where batches are converted: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` for a GPU if
            there is one.
        partition: this worker's part of the layers, if several processes fill `out` together; `complete`
            finishes the directory once all of them are done.

    Raises:
        UsageError: `out` cannot be used.
        Unavailable: no data on this machine, or no room on the disk; resumable.
        CheckpointError: the source's files do not match their headers, contain a NaN scale, or changed since
            `plan` was made.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from moectl.checkpoint import open_checkpoint
        >>> from moectl.convert.layouts.registry import layout_for
        >>> from moectl.convert.plan.kernel_layout_plan import plan_conversion
        >>> from moectl.synth import synthesize
        >>> with tempfile.TemporaryDirectory() as temporary:
        ...     directory = Path(temporary)
        ...     small = {"layers": 1, "experts": 4, "hidden": 128, "intermediate": 128}
        ...     source = open_checkpoint(str(synthesize("openai/gpt-oss-20b", directory / "source", **small)))
        ...     layout = layout_for("marlin", source.groups[0].problem.scheme.weight)
        ...     summary = convert(plan_conversion(source, layout), directory / "marlin")
        >>> summary.converted
        (0,)
    """
    folder = folder_of(plan)
    if plan.shard.ranks > 1 and out.is_symlink():
        raise UsageError(
            f"{out} is a link, expected a directory of this rank.",
            hint="Remove the link; the directory may be moved, and linked, once it is finished.",
        )
    check_output(folder, out, resume, partition, plan.mark)
    if resume and (finished := _finished(plan, folder, out, progress)):
        return finished
    worker_plan = plan if partition is None else plan.for_partition(partition)
    converter = device_named(device)  # A missing GPU is an error before anything is created.
    refuse_small_disk(
        out,
        worker_plan.disk_needed,
        "Make room, choose another directory, or give --experts-only.",
        f"{size(SMALL_FILES)} of it are set aside for the log, the manifest and small files.",
    )
    source = pin_source(plan.checkpoint, folder)
    create_folder(out, source.access)
    log = open_log(out, plan.fingerprint(), LOG if partition is None else partition.log, source.access)
    try:
        refuse_other_writers(plan, out, log, partition)
    except BaseException:
        log.close(remove=log.new)
        with suppress(OSError):
            out.rmdir()  # if it is empty
        raise
    try:
        meter = Meter(progress, worker_plan.bytes_in + worker_plan.passthrough_bytes)
        converted, resumed, passthrough = _convert(
            worker_plan, source, out, log, meter, converter, threads or usable_cores()
        )
        skipped: tuple[str, ...] = ()
        if partition is None:
            meter.start("manifest")
            skipped = finish_folder(
                plan, source, out, [log.layers[layer.layer] for layer in plan.layers], passthrough
            )
        else:
            source.check()
    except BaseException:
        log.close()
        raise
    log.close(remove=partition is None)
    return ConversionSummary(out, converted, resumed, worker_plan.bytes_in, worker_plan.bytes_out, skipped)


def complete(plan: ConversionPlan, out: Path) -> ConversionSummary:
    """Finishes a directory that several processes have filled: writes index, manifest and READY.

    Files are checked against their planned headers and sizes, but not against their hashes, as `verify` does.
    The source is hashed again for parts that were made from other files than it has now, such as a copy's.

    Raises:
        UsageError: parts or layers are missing, `out` holds another conversion, or a part was made from other
            bytes than the source has.
        Unavailable: a part is still being written.
        CheckpointError: a file that was logged as finished is missing or not as planned.
    """
    folder = folder_of(plan)
    if finished := _finished(plan, folder, out, silent):
        return finished
    source = pin_source(plan.checkpoint, folder)
    logs: list[ProgressLog] = []
    try:
        missing = []
        for partition in all_partitions(out):
            if not (out / partition.log).exists():
                missing.append(f"part {partition} was not started")
                continue
            logs.append(log := open_log(out, plan.fingerprint(), partition.log, source.access))
            worker_plan = plan.for_partition(partition)
            layers = [
                layer.layer
                for layer in worker_plan.layers
                if layer.layer not in log.layers or not matches_plan(layer, log.layers[layer.layer])
            ]
            files = [item.name for item in worker_plan.passthrough if item.name not in log.passthrough]
            missing += [f"part {partition} lacks {layers_of(layers)}"] if layers else []
            missing += [f"part {partition} lacks {', '.join(files)}"] if files else []
        if missing:
            raise UsageError(
                f"{out} is not complete: {'; '.join(missing)}.",
                hint="Convert what is missing with --part, and with --resume if it was started.",
            )
        records = {number: record for log in logs for number, record in log.layers.items()}
        passthrough = {name: record for log in logs for name, record in log.passthrough.items()}
        _check_files(plan, out, passthrough)
        if (out / plan.mark).exists():
            raise Busy(f"another process has just finished {out}.", hint="Run the same command again.")
        _check_sources(plan, source, out, logs)
        ordered = [records[layer.layer] for layer in plan.layers]
        skipped = finish_folder(
            plan, source, out, ordered, [passthrough[item.name] for item in plan.passthrough]
        )
    except BaseException:
        for log in logs:
            log.close()
        raise
    for log in logs:
        log.close(remove=True)
    return ConversionSummary(out, (), tuple(sorted(records)), 0, 0, skipped)


def _check_sources(plan: ConversionPlan, source: PinnedSource, out: Path, logs: list[ProgressLog]) -> None:
    """Raises UsageError unless what the parts of `logs` wrote is of `source` as it is now."""
    others = [log for log in logs if log.source != source.digest]
    if not others:
        return
    layers = {number: record for log in others for number, record in log.layers.items()}
    files = {name: record for log in others for name, record in log.passthrough.items()}
    with FolderReader(source.folder) as reader:
        source.check_open(reader)
        for layer in plan.layers:
            if layer.layer in layers:
                _check_same_source(layer, layers[layer.layer], reader, out)
        for item in plan.passthrough:
            record = files.get(item.name)
            if record and passthrough_sha256(item, reader, source.folder) != record.sha256:
                raise other_checkpoint(out, item.name)


def _check_files(plan: ConversionPlan, out: Path, passthrough: Mapping[str, PassthroughRecord]) -> None:
    """Raises CheckpointError if a finished file is missing, or has another size or header."""
    files = [layer.file for layer in plan.layers]
    damaged = [file.name for file in files if not file_matches(out / file.name, file, {})]
    for name, record in passthrough.items():
        if not (out / name).is_file() or (out / name).stat().st_size != record.size:
            damaged.append(name)
    if damaged:
        raise CheckpointError(
            f"{', '.join(damaged[:3])} was finished but is now missing or changed.",
            hint="Convert its part again with --part and --resume.",
        )


def _finished(plan: ConversionPlan, folder: Path, out: Path, progress: Progress) -> ConversionSummary | None:
    """The summary if `out` holds the finished conversion, which is checked against the plan; else None."""
    if not (out / plan.mark).exists():
        return None
    if plan.finalizer is None:
        summary = _already_done(plan, folder, out, progress)
        remove_logs(out, plan.mark)
        return summary
    plan.finalizer.check_finished(plan, folder, out)
    remove_logs(out, plan.mark)
    return ConversionSummary(out, (), tuple(layer.layer for layer in plan.layers), 0, 0)


def folder_of(plan: ConversionPlan) -> Path:
    if plan.checkpoint.folder is None:
        raise weights_missing(plan.checkpoint.origin.name)
    return plan.checkpoint.folder


def _already_done(plan: ConversionPlan, folder: Path, out: Path, progress: Progress) -> ConversionSummary:
    """The summary of a finished conversion, checked against the plan and the source's bytes."""
    record = load_manifest(out).record if plan.shard.ranks == 1 else load_rank_record(out)
    existing = {**conversion_facts(record), **source_facts(record.source)}
    requested = {**conversion_facts(plan), **source_facts(source_record(plan.checkpoint, folder))}
    refuse_other_conversion(out, existing, requested)
    finished = {layer.layer: layer for layer in record.layers}
    meter = Meter(progress, plan.bytes_in + plan.passthrough_bytes)
    with FolderReader(folder) as reader:
        for layer in plan.layers:
            meter.start(f"layer {layer.layer}")
            _check_same_source(layer, finished[layer.layer], reader, out)
            meter.advance(layer.bytes_in)
        rest = record.rest if isinstance(record, ManifestRecord) else ()
        hashes = {item.file: item.sha256 for item in rest}
        for file in plan.passthrough:
            meter.start(file.name)
            if passthrough_sha256(file, reader, folder) != hashes.get(file.name):
                raise other_checkpoint(out, file.name)
            meter.advance(sum(info.nbytes for info in file.tensors))
    return ConversionSummary(out, (), tuple(sorted(finished)), 0, 0)


def source_facts(source: SourceRecord) -> dict[str, str]:
    """What identifies a checkpoint without reading its weights, independent of its location."""
    return {"config": source.config_sha256, "tensor headers": digest_of(to_json(source.headers))}


def other_checkpoint(out: Path, name: str) -> UsageError:
    return UsageError(
        f"{out} was started with another checkpoint: the bytes of {name} differ.",
        hint="Resume with the same checkpoint, or convert into an empty directory.",
    )


def _check_same_source(layer: LayerPlan, record: LayerRecord, reader: FolderReader, out: Path) -> None:
    """Raises UsageError unless the source's tensors are those from which `record`'s layer was converted.

    Names, shapes and headers are the same in every revision of a model, so the bytes are compared.
    """
    for mapped in layer.map.mapped:
        extents, hashes = mapped.extents(layer.map.experts), record.source[mapped.mapping.stored].sha256
        for (info, start, stop), expected in zip(extents, hashes, strict=True):
            sha256 = range_sha256(reader.fd(info.file), info.start + start, info.start + stop, info.file)
            if sha256 != expected:
                raise other_checkpoint(out, info.name)


def _convert(
    plan: ConversionPlan,
    source: PinnedSource,
    out: Path,
    log: ProgressLog,
    meter: Meter,
    device: ConversionDevice,
    threads: int,
) -> tuple[tuple[int, ...], tuple[int, ...], list[PassthroughRecord]]:
    """Layers converted now, layers finished before, and the records of passthrough files; all are logged."""
    for name in (*(layer.file.name for layer in plan.layers), *(item.name for item in plan.passthrough)):
        remove_file(out / f"{name}{PARTIAL}")
    with FolderReader(source.folder) as reader:
        source.check_open(reader)
        unfinished: list[LayerPlan] = []
        for layer in plan.layers:
            record = log.layers.get(layer.layer)
            if record is None or not _is_finished(out, layer, record):
                unfinished.append(layer)
                continue
            meter.start(f"layer {layer.layer}")
            _check_same_source(layer, record, reader, out)
            meter.advance(layer.bytes_in)
        log.pin(source.digest)
        if unfinished:
            _convert_layers(plan, unfinished, source, out, reader, log, meter, device, threads)
        passthrough: list[PassthroughRecord] = []
        for item in plan.passthrough:
            meter.start(item.name)
            passthrough.append(write_passthrough(item, reader, source, out, log, meter))
    converted = tuple(layer.layer for layer in unfinished)
    resumed = tuple(layer.layer for layer in plan.layers if layer not in unfinished)
    return converted, resumed, passthrough


def _convert_layers(
    plan: ConversionPlan,
    layers: list[LayerPlan],
    source: PinnedSource,
    out: Path,
    reader: FolderReader,
    log: ProgressLog,
    meter: Meter,
    device: ConversionDevice,
    threads: int,
) -> None:
    """Writes and logs `layers` through one pipeline; on errors, unfinished files are removed."""
    in_progress = [LayerInProgress(layer, out, source.access) for layer in layers]
    workers = WorkerThreads(threads)
    try:
        with device as converter:
            stages = LayerStages(reader, converter, workers, meter, log)
            count = 1 if workers.alone else plan.slots
            with ThreadPoolExecutor(count) as pool:
                slots = list(pool.map(lambda _: converter.slot(*plan.buffers), range(count)))
            run_pipeline(stages.batches(in_progress), stages, slots)
            stages.finish()
    finally:
        workers.shutdown()
        for layer in in_progress:
            layer.discard()


def _is_finished(out: Path, layer: LayerPlan, record: LayerRecord) -> bool:
    """True if the logged layer's file exists and every tensor has the logged hash."""
    if not matches_plan(layer, record):
        return False
    hashes = {info: record.sha256[name] for name, info in layer.file.tensors.items()}
    return file_matches(out / layer.file.name, layer.file, hashes)


def matches_plan(layer: LayerPlan, record: LayerRecord) -> bool:
    """True if `record` has the files, tensors and slices that are planned for `layer`."""
    files = {mapped.mapping.stored: tuple(i.file for i in mapped.tensors) for mapped in layer.map.mapped}
    return (
        (record.file, record.size) == (layer.file.name, layer.file.size)
        and set(record.sha256) == set(layer.file.tensors)
        and {key: hashes.files for key, hashes in record.source.items()} == files
        and all(len(hashes.sha256) == len(files[key]) for key, hashes in record.source.items())
        and set(record.slices) == (set(layer.map.shapes) if layer.rank_slice.sliced else set())
    )

"""Brings a converted directory up to date with a newer version of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.source.catalogue import weights_missing
from ...checkpoint.source.open_checkpoint import rank_folder
from ...errors import CheckpointError, UsageError
from ...files.atomic import disk_errors, replace_file, sync_folder
from ...files.lock import Lock
from ...files.records import from_json, to_json
from ...files.safe_reading import file_sha256, open_regular, range_sha256
from ...files.strict_json import parse_json_object
from ..layouts.registry import layout_named
from ..manifest.manifest import load_manifest
from ..manifest.manifest_check import check_manifest
from ..manifest.manifest_records import CONFIG, INDEX, LOG, MANIFEST, READY, LayerRecord, ManifestRecord
from ..manifest.progress_log import Meter, Progress, silent
from ..manifest.rank_directories import rank_numbers
from ..plan.conversion_plan import ConversionPlan, LayerPlan, conversion_facts
from ..plan.kernel_layout_plan import plan_conversion
from ..stream.source_reader import FolderReader
from .convert import convert, matches_plan
from .passthrough import passthrough_sha256, source_record


@dataclass(frozen=True)
class FolderUpdate:
    """What of one converted directory differs from its checkpoint as it is now.

    Attributes:
        folder: the directory.
        plan: the conversion of the checkpoint as it is now.
        layers: layers whose experts changed; their files are written anew.
        files: files of other tensors that changed.
        old: the directory's manifest.
        kept: records of the layers that stay.
        interrupted: whether an update of it was interrupted.
        other_source: whether the record of its checkpoint (config, headers, small files) has to change.
    """

    folder: Path
    plan: ConversionPlan
    layers: tuple[int, ...]
    files: tuple[str, ...]
    old: ManifestRecord
    kept: tuple[LayerRecord, ...]
    interrupted: bool
    other_source: bool

    @property
    def needed(self) -> bool:
        """Whether anything has to be written."""
        return self.interrupted or bool(self.layers or self.files) or self.other_source

    @property
    def bytes_out(self) -> int:
        """Bytes of the layers' files to write."""
        return sum(layer.file.size for layer in self.plan.layers if layer.layer in self.layers)


def plan_updates(
    folder: Path, checkpoint: Checkpoint, *, max_memory: int | None = None, progress: Progress = silent
) -> tuple[FolderUpdate, ...]:
    """What differs in the converted directory `folder`, or in every rank's; hashes the whole checkpoint.

    A directory whose update was interrupted is planned from what it has.

    Raises:
        CheckpointError: not a converted directory, or damaged.
        UsageError: `checkpoint` has other sizes or tensors than the one that was converted.
        Unavailable: its weights are not on this machine.
    """
    folders = [rank_folder(folder, rank) for rank in rank_numbers(folder)] or [folder]
    if checkpoint.folder is None:
        raise weights_missing(checkpoint.origin.name)
    return tuple(_planned(each, checkpoint, checkpoint.folder, max_memory, progress) for each in folders)


def _planned(
    folder: Path, checkpoint: Checkpoint, source: Path, max_memory: int | None, progress: Progress
) -> FolderUpdate:
    old = _old_manifest(folder)
    plan = _same_conversion(folder, old, checkpoint, max_memory)
    logged = _logged_layers(folder) if not (folder / READY).exists() else {}
    recorded = {record.layer: record for record in old.layers}
    meter = Meter(progress, plan.bytes_in + plan.passthrough_bytes)
    kept: list[LayerRecord] = []
    with FolderReader(source) as reader:
        for layer in plan.layers:
            meter.start(f"layer {layer.layer}")
            known = (logged.get(layer.layer), recorded.get(layer.layer))
            if same := next((r for r in known if r is not None and _is_source(layer, r, reader)), None):
                kept.append(same)
            meter.advance(layer.bytes_in)
        files = {item.file: item.sha256 for item in old.rest}
        changed = []
        for item in plan.passthrough:
            meter.start(item.name)
            if files.get(item.name) != passthrough_sha256(item, reader, source):
                changed.append(item.name)
            meter.advance(sum(info.nbytes for info in item.tensors))
    unchanged = {record.layer for record in kept}
    layers = tuple(layer.layer for layer in plan.layers if layer.layer not in unchanged)
    small = {item.file: item.sha256 for item in (*old.files, *old.documents)}
    now = replace(source_record(checkpoint, source), name=old.source.name, kind=old.source.kind)
    other_source = replace(now, revision=old.source.revision) != old.source or any(
        file_sha256(path) != small[path.name]
        for path in source.iterdir()
        if path.name in small and path.is_file() and path.name not in (CONFIG, INDEX)
    )
    interrupted = not (folder / READY).exists()
    return FolderUpdate(folder, plan, layers, tuple(changed), old, tuple(kept), interrupted, other_source)


def _old_manifest(folder: Path) -> ManifestRecord:
    """The manifest, of an interrupted update too, which has a log instead of READY."""
    if (folder / READY).exists() or not (folder / LOG).exists() or not (folder / MANIFEST).exists():
        return load_manifest(folder).record
    with open_regular(folder / MANIFEST, str(folder / MANIFEST)) as file:
        record = from_json(ManifestRecord, parse_json_object(file.read(), MANIFEST), MANIFEST)
    if problems := check_manifest(record):
        raise CheckpointError(f"{MANIFEST} does not agree with itself: {problems[0]}.")
    return record


def _same_conversion(
    folder: Path, old: ManifestRecord, checkpoint: Checkpoint, max_memory: int | None
) -> ConversionPlan:
    layout = layout_named(old.layout.name)
    differing: list[str] = []
    for variant in (layout, layout.requantizing()):
        plan = plan_conversion(
            checkpoint, variant, max_memory=max_memory, experts_only=old.experts_only, shard=old.shard
        )
        facts, known = conversion_facts(plan), conversion_facts(old)
        differing = [name for name in facts if facts[name] != known[name]]
        if not differing:
            return plan
    raise UsageError(
        f"{checkpoint.origin.name} is no newer version of what {folder} was converted from: they differ in "
        f"{', '.join(differing)}.",
        hint="Convert it into an empty directory.",
    )


def _logged_layers(folder: Path) -> dict[int, LayerRecord]:
    """The layers that an interrupted update finished; none if its log cannot be read."""
    found: dict[int, LayerRecord] = {}
    path = folder / LOG
    if not path.exists():
        return found
    with open_regular(path, str(path)) as file:
        for number, line in enumerate(file.read().splitlines(keepends=True), 1):
            entry = parse_json_object(line, f"line {number} of {LOG}") if line.endswith(b"\n") else {}
            if "layer" in entry:
                record = from_json(LayerRecord, entry["layer"], LOG)
                found[record.layer] = record
    return found


def _is_source(layer: LayerPlan, record: LayerRecord, reader: FolderReader) -> bool:
    """Whether the layer's file was made from the source's bytes as they are."""
    if layer.rank_slice.shard.ep_size > 1 and any(s.of_layer for s in layer.writer.statistics):
        return False  # It depends on experts of other ranks, whose hashes are in their directories.
    if not matches_plan(layer, record):
        return False
    for mapped in layer.map.mapped:
        hashes = record.source[mapped.mapping.stored].sha256
        for (info, start, stop), expected in zip(mapped.extents(layer.map.experts), hashes, strict=True):
            begin = info.start
            if range_sha256(reader.fd(info.file), begin + start, begin + stop, info.file) != expected:
                return False
    return True


def update_folder(update: FolderUpdate, *, progress: Progress = silent, device: str = "cpu") -> None:
    """Writes what changed, so that the directory is what converting the checkpoint anew gives.

    READY is removed first, and written again last: an interrupted update leaves a directory that no reader
    accepts, and that this function completes. New files replace old ones under their names once they are
    complete; processes that have the old ones open keep them.

    Raises what `convert` raises.
    """
    folder, old = update.folder, update.old
    entries = [{"conversion": update.plan.fingerprint()}]
    entries += [{"layer": to_json(layer)} for layer in update.kept]
    entries += [{"rest": to_json(item)} for item in old.rest]
    data = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
    with _only_writer(folder), disk_errors(folder / LOG, len(data)):
        replace_file(folder / LOG, data)
        (folder / READY).unlink(missing_ok=True)
        sync_folder(folder)
    convert(update.plan, folder, resume=True, progress=progress, device=device)
    new = load_manifest(folder).record
    for name in _files(old) - _files(new):
        (folder / name).unlink(missing_ok=True)


def _files(record: ManifestRecord) -> set[str]:
    others = (*record.rest, *record.files, *record.documents)
    return {layer.file for layer in record.layers} | {item.file for item in others}


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds the lock of an update that was interrupted; Unavailable while another process works on it."""
    if not (folder / LOG).exists():
        yield
        return
    with open_regular(folder / LOG, str(folder / LOG)) as file:
        lock = Lock(folder / LOG, file.fileno(), work="update")
        lock.take()
        try:
            yield
        finally:
            lock.release()

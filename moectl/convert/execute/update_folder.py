"""Brings a converted directory up to date with a newer version of its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.source.catalogue import weights_missing
from ...checkpoint.source.open_checkpoint import rank_folder, rank_number
from ...errors import CheckpointError, NoBackend, UsageError
from ...files.access import access_of
from ...files.atomic import disk_errors, remove_file, replace_file, sync_folder
from ...files.folder_handle import read_inside, sha256_inside
from ...files.lock import Busy, Lock, is_at
from ...files.records import to_json
from ...files.safe_reading import range_sha256
from ..layouts.registry import layout_named
from ..manifest.manifest import load_directory, load_rank_record, recorded
from ..manifest.manifest_records import (
    CONFIG,
    FORMAT_VERSION,
    INDEX,
    LOG,
    MANIFEST,
    READY,
    DeploymentRecord,
    LayerRecord,
    ManifestRecord,
    PassthroughRecord,
    RankRecord,
    SourceRecord,
)
from ..manifest.progress_log import (
    Meter,
    Progress,
    log_entry,
    log_line,
    logged_conversion,
    open_log,
    silent,
)
from ..manifest.rank_directories import load_rank_manifests, rank_numbers
from ..manifest.signed_document import LONGEST_MANIFEST, read_small, versioned_document
from ..plan.conversion_plan import ConversionPlan, LayerPlan, PassthroughPlan, conversion_facts
from ..plan.kernel_layout_plan import plan_conversion, shared_passthrough
from ..plan.source_pin import source_record
from ..rank_slice import RankShard
from ..stream.source_reader import FolderReader
from ..worker_partition import partitions_in
from .convert import convert, matches_plan
from .finish import producer
from .passthrough import passthrough_sha256
from .shared_files import finish_ranks, ranks_fingerprint


@dataclass(frozen=True)
class LayersUpdate:
    """What differs in a directory of layers' files: a whole converted directory, or that of one rank.

    Attributes:
        folder: the directory.
        plan: the conversion of the checkpoint as it is now.
        layers: layers whose experts changed; their files are written anew.
        kept: records of the layers that stay.
        current: whether nothing in it has to be written, its manifest included.
    """

    folder: Path
    plan: ConversionPlan
    layers: tuple[int, ...]
    kept: tuple[LayerRecord, ...]
    current: bool

    @property
    def bytes_out(self) -> int:
        """Bytes of the layers' files to write."""
        return sum(layer.file.size for layer in self.plan.layers if layer.layer in self.layers)


@dataclass(frozen=True)
class FolderUpdate:
    """What of a converted directory, or of one of several ranks, differs from its checkpoint as it is now.

    Attributes:
        folder: the directory.
        parts: its layers, or each rank's.
        files: files of other tensors that changed.
        old: the directory's manifest.
        interrupted: whether an update of it was interrupted.
        other_source: whether the record of its checkpoint (config, headers, small files) has to change.
    """

    folder: Path
    parts: tuple[LayersUpdate, ...]
    files: tuple[str, ...]
    old: ManifestRecord | DeploymentRecord
    interrupted: bool
    other_source: bool

    @property
    def needed(self) -> bool:
        """Whether anything has to be written."""
        layers = any(part.layers for part in self.parts)
        return self.interrupted or layers or bool(self.files) or self.other_source


def plan_update(
    folder: Path, checkpoint: Checkpoint, *, max_memory: int | None = None, progress: Progress = silent
) -> FolderUpdate:
    """What differs in the converted directory `folder`; hashes the whole checkpoint.

    A directory whose update was interrupted is planned from what it has.

    Raises:
        CheckpointError: not a converted directory, or damaged.
        UsageError: `checkpoint` is another model than the one that was converted (other sizes, tensors or
            formats), or `folder` is of format version 1, or of one of several ranks.
        Unavailable: its weights are not on this machine.
    """
    old = _old_record(folder)
    if checkpoint.folder is None:
        raise weights_missing(checkpoint.origin.name)
    source = checkpoint.folder
    plans = _plans(folder, old, checkpoint, max_memory)
    passthrough = _passthrough(plans)
    total = sum(plan.bytes_in for _, plan, _ in plans)
    meter = Meter(progress, total + sum(info.nbytes for item in passthrough for info in item.tensors))
    now = source_record(checkpoint, source)
    interrupted = _interrupted(folder)
    with FolderReader(source) as reader:
        kept = [_kept(planned, reader, meter) for planned in plans]
        # Ranks of an interrupted update may have been made with other ranks' experts before they changed.
        of_all = set() if interrupted and len(plans) > 1 else set.intersection(*map(set, kept))
        files = {item.file: item.sha256 for item in old.rest}
        changed = []
        for item in passthrough:
            meter.start(item.name)
            if files.get(item.name) != passthrough_sha256(item, reader, source):
                changed.append(item.name)
            meter.advance(sum(info.nbytes for info in item.tensors))
    small = {item.file: item.sha256 for item in (*old.files, *old.documents)}
    same = replace(now, name=old.source.name, kind=old.source.kind, revision=old.source.revision)
    other_source = same != old.source or any(
        _small_sha256(source, path.name) != small[path.name]
        for path in source.iterdir()
        if path.name in small and path.is_file() and path.name not in (CONFIG, INDEX)
    )
    parts = tuple(
        _part(planned, now, {n: r for n, r in found.items() if n in of_all | _alone(planned[1])})
        for planned, found in zip(plans, kept, strict=True)
    )
    return FolderUpdate(folder, parts, tuple(changed), old, interrupted, other_source)


def _small_sha256(folder: Path, name: str) -> str:
    """SHA-256 of a file that is copied if it can be read without leaving the checkpoint, else empty."""
    try:
        return sha256_inside(folder, name)
    except CheckpointError:
        return ""


def _old_record(folder: Path) -> ManifestRecord | DeploymentRecord:
    """The manifest, of an interrupted update too, which has a log instead of READY."""
    if rank_number(folder.absolute()) is not None and (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder} is the directory of one of several ranks, which are updated together.",
            hint=f"Give {folder.absolute().parent}.",
        )
    old: ManifestRecord | DeploymentRecord
    if (folder / LOG).exists() and (data := read_small(folder, MANIFEST, LONGEST_MANIFEST)) is not None:
        old = recorded(versioned_document(data, MANIFEST), MANIFEST)
    elif not (folder / MANIFEST).exists() and rank_numbers(folder):
        old = load_rank_manifests(folder)[0].record
    else:
        old = load_directory(folder).record
    if old.format_version != FORMAT_VERSION:
        raise UsageError(
            f"{folder} is of format version {old.format_version}; only version {FORMAT_VERSION} is updated.",
            hint="Convert the checkpoint into an empty directory.",
        )
    return old


def _interrupted(folder: Path) -> bool:
    return (folder / LOG).exists() or not (folder / READY).exists()


Planned = tuple[Path, ConversionPlan, RankRecord | None]
"""A directory of layers, its conversion as it would be now, and its manifest if it has one."""


def _plans(
    folder: Path, old: ManifestRecord | DeploymentRecord, checkpoint: Checkpoint, max_memory: int | None
) -> list[Planned]:
    if isinstance(old, ManifestRecord):
        plan = _same_conversion(folder, conversion_facts(old), old, old.shard, checkpoint, max_memory)
        return [(folder, plan, old)]
    if not _interrupted(folder):
        load_rank_manifests(folder)  # refuses ranks that are missing or not of this conversion
    found: list[Planned] = []
    for rank in range(len(old.ranks)):
        below, shard = rank_folder(folder, rank), old.shard(rank)
        has = (below / MANIFEST).exists() or not (below / LOG).exists()
        record = load_rank_record(below) if has else None
        known = (logged_conversion(below / LOG) or {}) if record is None else conversion_facts(record)
        found.append((below, _same_conversion(below, known, old, shard, checkpoint, max_memory), record))
    return found


def _same_conversion(
    folder: Path,
    known: Mapping[str, object],
    old: ManifestRecord | DeploymentRecord,
    shard: RankShard,
    checkpoint: Checkpoint,
    max_memory: int | None,
) -> ConversionPlan:
    """The plan of `checkpoint` whose facts are those `known` of `folder`."""
    layout = layout_named(old.layout.name)
    differing: list[str] = []
    for variant in (layout, layout.requantizing()):
        try:
            plan = plan_conversion(
                checkpoint, variant, max_memory=max_memory, experts_only=old.experts_only, shard=shard
            )
        except NoBackend as error:
            raise _other_model(checkpoint, folder, error.what) from error
        facts = conversion_facts(plan)
        differing = [name for name in facts if facts[name] != known.get(name)]
        if not differing:
            return plan
    raise _other_model(checkpoint, folder, f"they differ in {', '.join(differing)}")


def _other_model(checkpoint: Checkpoint, folder: Path, why: str) -> UsageError:
    return UsageError(
        f"{checkpoint.origin.name} is not the same model as {folder} was converted from: {why}.",
        hint="Convert it into an empty directory.",
    )


def _passthrough(plans: Iterable[Planned]) -> tuple[PassthroughPlan, ...]:
    plan = next(plan for _, plan, _ in plans)
    return plan.passthrough if plan.shard.ranks == 1 else shared_passthrough(plan)


def _kept(planned: Planned, reader: FolderReader, meter: Meter) -> dict[int, LayerRecord]:
    """Records of the layers whose files were made of the source's bytes as they are."""
    folder, plan, record = planned
    logged = _logged_layers(folder, plan)
    known = {layer.layer: layer for layer in record.layers} if record is not None else {}
    kept: dict[int, LayerRecord] = {}
    for layer in plan.layers:
        meter.start(f"layer {layer.layer}")
        candidates = (logged.get(layer.layer), known.get(layer.layer))
        if same := next((r for r in candidates if r is not None and _is_source(layer, r, reader)), None):
            kept[layer.layer] = same
        meter.advance(layer.bytes_in)
    return kept


def _alone(plan: ConversionPlan) -> set[int]:
    """Layers whose files do not depend on experts of other ranks."""
    return {x.layer for x in plan.layers if not any(s.of_layer for s in x.writer.statistics)}


def _part(planned: Planned, source: SourceRecord, kept: Mapping[int, LayerRecord]) -> LayersUpdate:
    folder, plan, record = planned
    layers = tuple(layer.layer for layer in plan.layers if layer.layer not in kept)
    written = (source, producer(), tuple(kept.values()))
    current = (
        record is not None
        and not layers
        and (record.source, record.producer, record.layers) == written
        and not (folder / LOG).exists()
    )
    return LayersUpdate(folder, plan, layers, tuple(kept.values()), current)


def _logged_layers(folder: Path, plan: ConversionPlan) -> dict[int, LayerRecord]:
    """The layers that an interrupted update finished; none if its log is of another conversion."""
    found: dict[int, LayerRecord] = {}
    path = folder / LOG
    if not path.exists():
        return found
    logged, facts = logged_conversion(path) or {}, conversion_facts(plan)
    if any(logged.get(name) != fact for name, fact in facts.items()):
        return found
    data = read_inside(folder, LOG, LONGEST_MANIFEST, str(path))
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            record = log_entry(line, f"line {number} of {LOG}").layer
            if record is not None:
                found[record.layer] = record
    return found


def _is_source(layer: LayerPlan, record: LayerRecord, reader: FolderReader) -> bool:
    """Whether the layer's file was made from the source's bytes as they are."""
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
    accepts, and that planning it again and this function complete. New files replace old ones under their
    names once they are complete; processes that have the old ones open keep them.

    Raises what `convert` raises, and `finish_ranks`.
    """
    folder, old, first = update.folder, update.old, update.parts[0]
    whole = isinstance(old, ManifestRecord)
    fingerprint = first.plan.fingerprint() if whole else ranks_fingerprint(first.plan)
    with _only_writer(folder):
        if _old_record(folder) != old:
            raise Busy(f"another update of {folder} has just finished.", hint="Run the same command again.")
        _begin(folder, fingerprint, first.kept if whole else (), old.rest, READY)
        files = {item.name for item in _passthrough([(folder, first.plan, None)])}
        for item in (*old.files, *old.documents, *(item for item in old.rest if item.file not in files)):
            remove_file(folder / item.file)
    if whole:
        convert(first.plan, folder, resume=True, progress=progress, device=device)
        return
    log = open_log(folder, fingerprint)
    if log.new:
        log.close(remove=True)
        raise Busy(f"another process has just finished {folder}.", hint="Run the same command again.")
    try:
        for part in update.parts:
            if not part.current:
                with _only_writer(part.folder):
                    _begin(part.folder, part.plan.fingerprint(), part.kept, (), MANIFEST)
                convert(part.plan, part.folder, resume=True, progress=progress, device=device)
        finish_ranks(first.plan, folder, progress=progress, log=log)
    finally:
        log.close()


def _begin(
    folder: Path,
    fingerprint: Mapping[str, str],
    layers: Iterable[LayerRecord],
    rest: Iterable[PassthroughRecord],
    mark: str,
) -> None:
    """Makes of a finished directory one that `convert` resumes; removes `mark`, by which it is finished.

    Logs of parts, which their writer left when it was killed after that, go too.
    """
    entries: list[Mapping[str, object]] = [{"conversion": dict(fingerprint)}]
    entries += [{"layer": to_json(layer)} for layer in layers]
    entries += [{"rest": to_json(item)} for item in rest]
    data = b"".join(map(log_line, entries))
    with disk_errors(folder / LOG, len(data)):
        # As private as what is there; an update that was interrupted has removed `mark`.
        there = [file.name for file in folder.iterdir() if file.is_file() and not file.is_symlink()]
        replace_file(folder / LOG, data, access_of(folder, there))
        for partition in partitions_in(folder):
            (folder / partition.log).unlink(missing_ok=True)
        sync_folder(folder)
        (folder / mark).unlink(missing_ok=True)
        sync_folder(folder)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`; Busy while another process writes to it.

    The block replaces the log, whose lock the one that resumes takes again.
    """
    path = folder / LOG
    created = not path.exists()
    with disk_errors(path, 0):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    lock = Lock(path, fd, work="update")
    try:
        lock.take()
        if not is_at(path, fd):
            created = False
            raise Busy(f"another update of {folder} has just begun.", hint="Wait for it.")
        yield
    except BaseException:
        if created and is_at(path, fd):
            with suppress(OSError):
                path.unlink()
        raise
    finally:
        lock.release()
        os.close(fd)

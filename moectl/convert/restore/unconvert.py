"""Restores the source checkpoint of a converted directory, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from ...checkpoint.source.open_checkpoint import LOG, interrupted_command
from ...errors import CheckpointError, UsageError
from ...files.access import Access, access_of
from ...files.atomic import PARTIAL, copy_bytes, copy_file, link_or_copy, replacing, write_exactly, write_file
from ...files.folder_handle import FolderHandle, file_findings
from ...files.output_folder import refuse_inside, refuse_small_disk
from ...files.safetensors_writer import FilePlan, TensorSpec, plan_file
from ...files.strict_json import json_bytes
from ...files.tensor_table import TensorInfo
from ..manifest.checked_files import read_file_header
from ..manifest.manifest import Manifest
from ..manifest.manifest_records import CONFIG, INDEX, SOURCE_CONFIG, SOURCE_INDEX, FileRecord
from ..manifest.progress_log import Meter, Progress, only_writer, silent
from ..manifest.rank_directories import load_rank_manifests, refuse_one_rank
from ..stream.source_reader import FolderReader
from .restore_layer import RestoredRun, Sink, layer_restorers, restore_layer, source_tensors


@dataclass(frozen=True)
class UnconvertSummary:
    """The result of `unconvert`: the directory, and the numbers of files, tensors and tensor bytes in it.

    `experts_only`: it holds only experts, as the converted directory did.
    """

    folder: Path
    files: int
    tensors: int
    nbytes: int
    experts_only: bool


def unconvert(
    converted: Path, out: Path, *, progress: Progress = silent, max_memory: int | None = None
) -> UnconvertSummary:
    """Writes the source checkpoint of the directory `converted` to `out`.

    Tensors have the source's names, dtypes, shapes and bytes, in files with the source's names; every
    expert tensor is checked against the hash of the source's bytes before its file gets its name. What a
    killed `unconvert` has left in `out` is replaced. A directory converted with experts only yields only the
    experts' tensors. If `converted` holds the directories of all ranks, their slices are joined.

    Raises:
        UsageError: `out` is not empty or lies inside `converted`, or `converted` is one of several ranks.
        CheckpointError: `converted` is not a finished converted directory, one of its files is damaged, or
            a restored tensor does not have its hash.
        Unavailable: not enough room on the disk, or another process writes to `out`.
    """
    manifests = load_rank_manifests(converted)
    manifest = manifests[0]
    if len(manifests) == 1:
        refuse_one_rank(manifest)
    refuse_inside(converted, out)
    unfinished = out.is_dir() and interrupted_command(out) == "unconvert"
    if out.exists() and not unfinished and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"the output directory {out} is not empty.", hint="Choose an empty directory.")
    _refuse_requantized(manifest)
    for item in (*manifest.record.files, *manifest.record.documents):
        _check(manifest.top, item)
    plans = _plan_files(manifests)
    targets = {name: (file, info) for file in plans for name, info in file.tensors.items()}
    total = sum(layer.size for rank_manifest in manifests for layer in rank_manifest.record.layers)
    meter = Meter(progress, total + sum(item.size for item in manifest.record.rest))
    refuse_small_disk(out, sum(file.size for file in plans), "Make room, or choose another directory.")
    access = _access(manifests)
    kept = [item for item in manifest.record.rest if item.whole]
    documents = [INDEX, CONFIG, *(item.file for item in manifest.record.files)]
    names = [*(file.name for file in plans), *(item.source for item in kept), *documents]
    if unfinished:
        _refuse_others(out, names)
    with only_writer(out, "restored", names, access):
        with ExitStack() as stack:
            readers = [stack.enter_context(FolderReader(rank.folder)) for rank in manifests]
            top = stack.enter_context(FolderReader(manifest.top))
            fds: dict[str, int] = {}
            for file in plans:
                fds[file.name] = stack.enter_context(replacing(out / file.name, file.size, access))
                write_exactly(fds[file.name], memoryview(file.header), 0)

            def store(run: RestoredRun) -> None:
                file, info = targets[run.name]
                write_exactly(fds[file.name], run.data, info.start + run.at)

            _restore_layers(manifests, readers, meter, store, max_memory)
            for item in manifest.record.rest:
                meter.start(item.file)
                _check(manifest.top, item)
                if item.whole:
                    link_or_copy(top.fd(item.file), item.file, out / item.source, access)
                else:
                    for info in read_file_header(manifest.top, item.file, item.size).values():
                        file, target = targets[info.name]
                        fd = fds[file.name]
                        copy_bytes(top.fd(item.file), fd, info.start, target.start, info.nbytes, item.file)
                meter.advance(item.size)
        _write_documents(manifest, out, targets, access)
    size = sum(info.nbytes for _, info in targets.values())
    return UnconvertSummary(out, len(plans) + len(kept), len(targets), size, manifest.record.experts_only)


def _refuse_others(out: Path, names: Sequence[str]) -> None:
    """Raises UsageError for a file in `out`, where an `unconvert` was killed, that is not one of `names`."""
    own = {LOG, *names, *(name + PARTIAL for name in names)}
    if others := sorted(path.name for path in out.iterdir() if path.name not in own):
        raise UsageError(
            f"{out} is the unfinished output of `moectl unconvert` of another directory: it has {others[0]}.",
            hint="Remove it, or choose an empty directory.",
        )


def _access(manifests: Sequence[Manifest]) -> Access:
    """Who may use all files of the directories from which a source is restored."""
    shared = manifests[0].record
    files = [item.file for item in (*shared.rest, *shared.files, *shared.documents)]
    below = [access_of(m.folder, [layer.file for layer in m.record.layers]) for m in manifests]
    return reduce(Access.__and__, below, access_of(manifests[0].top, files))


def _plan_files(manifests: Sequence[Manifest]) -> list[FilePlan]:
    """The source's files that contained experts, with all of their tensors that the directories hold."""
    manifest = manifests[0]
    source_files: dict[TensorSpec, str] = {}
    for rank_manifest in manifests:
        for layer in rank_manifest.layers:
            for part, name, file, _ in source_tensors(rank_manifest, layer):
                source_files[TensorSpec(name, part.dtype, part.shape)] = file
    specs: dict[str, list[TensorSpec]] = {}
    for spec, file in source_files.items():
        specs.setdefault(file, []).append(spec)
    for item in manifest.record.rest:
        if not item.whole:
            header = read_file_header(manifest.top, item.file, item.size)
            extracted = [TensorSpec(i.name, i.dtype, i.shape) for i in header.values()]
            specs.setdefault(item.source, []).extend(extracted)
    metadata = {file.name: file.metadata for file in manifest.record.source.files}
    return [plan_file(name, specs[name], metadata.get(name, {})) for name in sorted(specs)]


def _refuse_requantized(manifest: Manifest) -> None:
    """Raises UsageError if the directory holds requantized weights."""
    replaced = {role for group in manifest.record.groups for role in group.recipe.lossy}
    if replaced:
        raise UsageError(
            f"{manifest.folder} holds {', '.join(sorted(replaced))} quantized again (--requantize); the "
            "source cannot be restored from it.",
            hint="Keep the source checkpoint.",
        )


def _restore_layers(
    manifests: Sequence[Manifest],
    readers: Sequence[FolderReader],
    meter: Meter,
    store: Sink,
    max_memory: int | None,
) -> None:
    for layer in manifests[0].layers:
        meter.start(f"layer {layer}")
        for members in layer_restorers(manifests, layer, readers, meter, max_memory):
            findings = restore_layer(members, store)
            if findings:
                raise CheckpointError(f"{findings[0]}.", hint="Run verify to see everything that is damaged.")


def _check(folder: Path, item: FileRecord) -> None:
    """Raises CheckpointError if a file of the converted directory is not the one that was written."""
    findings = file_findings(folder, item.file, item.size, item.sha256)
    if findings:
        raise CheckpointError(f"{findings[0]}.", hint="Convert again.")


def _write_documents(
    manifest: Manifest, out: Path, targets: Mapping[str, tuple[FilePlan, TensorInfo]], access: Access
) -> None:
    """Writes the source's small files, config.json and index; for experts only, a new index."""
    converted = manifest.top
    names = {item.file: item.file for item in manifest.record.files if item.file != SOURCE_INDEX}
    if not manifest.record.experts_only and any(item.file == SOURCE_INDEX for item in manifest.record.files):
        names[SOURCE_INDEX] = INDEX
    with FolderHandle(converted) as folder:

        def copy(name: str, restored: str) -> None:
            with folder.file(name) as file:
                copy_file(file.fileno(), name, out / restored, access)

        for name, restored in names.items():
            copy(name, restored)
        if not (out / INDEX).exists():
            _write_index(manifest, out, targets, access)
        # Last, so that an unfinished directory has no config.json and is not taken for a checkpoint.
        copy(SOURCE_CONFIG, CONFIG)


def _write_index(
    manifest: Manifest, out: Path, targets: Mapping[str, tuple[FilePlan, TensorInfo]], access: Access
) -> None:
    """Writes an index if there are several files."""
    weight_map = {name: file.name for name, (file, _) in targets.items()}
    total = sum(info.nbytes for _, info in targets.values())
    for rest in manifest.record.rest:
        if rest.whole:
            header = read_file_header(manifest.top, rest.file, rest.size)
            weight_map.update(dict.fromkeys(header, rest.source))
            total += sum(info.nbytes for info in header.values())
    if len(set(weight_map.values())) > 1 or "model.safetensors" not in weight_map.values():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(out / INDEX, json_bytes(index), access)

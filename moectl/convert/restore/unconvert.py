"""A converted folder back to the checkpoint it came from, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import CheckpointError, UsageError
from ...files.atomic import copy_bytes, copy_file, link_or_copy, replacing, write_exactly, write_file
from ...files.output_folder import create_folder, refuse_inside, refuse_small_disk
from ...files.safe_reading import file_findings
from ...files.safetensors_writer import FilePlan, TensorSpec, plan_file
from ...files.tensor_table import TensorInfo
from ..manifest.manifest import Manifest, read_file_header
from ..manifest.manifest_records import CONFIG, INDEX, SOURCE_CONFIG, SOURCE_INDEX, FileRecord, group_recipe
from ..manifest.progress_log import Meter, Progress, silent
from ..manifest.rank_directories import load_folders, refuse_one_rank
from ..stream.source_reader import FolderReader
from .restore_layer import RestoredRun, Sink, layer_restorers, part_tensors, restore_layer


@dataclass(frozen=True)
class UnconvertSummary:
    """What `unconvert` wrote: the folder, how many files, tensors and bytes of tensors.

    `experts_only` says that it holds the experts alone, as the converted folder did.
    """

    folder: Path
    files: int
    tensors: int
    nbytes: int
    experts_only: bool


def unconvert(
    out: Path, back: Path, *, progress: Progress = silent, max_memory: int | None = None
) -> UnconvertSummary:
    """Writes the source checkpoint of a converted folder to `back`.

    Tensors have the source's names, dtypes, shapes and bytes, in files with the source's names; every
    expert tensor is compared with the hash of the source's bytes before its file gets its name. A
    folder converted with experts only gives the experts' tensors back. `out` may hold the folders of
    every rank: their slices are joined.

    Raises:
        UsageError: `back` is not empty, or lies in `out`; `out` is one rank's folder of several.
        CheckpointError: `out` is no finished converted folder, a file of it is damaged, or a tensor does not
            come back with its hash.
        Unavailable: no room on the disk.
    """
    manifests = load_folders(out)
    manifest = manifests[0]
    if len(manifests) == 1:
        refuse_one_rank(manifest)
    refuse_inside(out, back)
    if back.exists() and (not back.is_dir() or any(back.iterdir())):
        raise UsageError(f"the output folder {back} is not empty.", hint="Choose an empty folder.")
    _refuse_replaced(manifest)
    for item in (*manifest.record.files, *manifest.record.documents):
        _check(manifest.folder, item)
    plans = _plan_files(manifests)
    places = {name: (file, info) for file in plans for name, info in file.tensors.items()}
    total = sum(layer.size for each in manifests for layer in each.record.layers)
    meter = Meter(progress, total + sum(item.size for item in manifest.record.rest))
    refuse_small_disk(back, sum(file.size for file in plans), "Make room, or choose another folder.")
    create_folder(back)
    with ExitStack() as stack:
        readers = [stack.enter_context(FolderReader(each.folder)) for each in manifests]
        fds = {file.name: stack.enter_context(replacing(back / file.name, file.size)) for file in plans}
        for file in plans:
            write_exactly(fds[file.name], memoryview(file.header), 0)

        def store(run: RestoredRun) -> None:
            file, info = places[run.name]
            write_exactly(fds[file.name], run.data, info.start + run.at)

        _restore_layers(manifests, readers, meter, store, max_memory)
        for item in manifest.record.rest:
            meter.say(item.file)
            _check(manifest.folder, item)
            if item.whole:
                stack.push(partial(_take_back, back / item.source))
                link_or_copy(manifest.folder / item.file, back / item.source)
            else:
                for info in read_file_header(manifest.folder, item.file, item.size).values():
                    file, place = places[info.name]
                    target = fds[file.name]
                    copy_bytes(
                        readers[0].fd(item.file), target, info.start, place.start, info.nbytes, item.file
                    )
            meter.advance(item.size)
    _write_documents(manifest, back, places)
    kept = [item for item in manifest.record.rest if item.whole]
    size = sum(info.nbytes for _, info in places.values())
    return UnconvertSummary(back, len(plans) + len(kept), len(places), size, manifest.record.experts_only)


def _plan_files(manifests: Sequence[Manifest]) -> list[FilePlan]:
    """The source's files that held experts, with every tensor of theirs that the folders have."""
    manifest = manifests[0]
    found_in: dict[TensorSpec, str] = {}
    for each in manifests:
        for layer in each.layers:
            for part, name, file, _ in part_tensors(each, layer):
                found_in[TensorSpec(name, part.dtype, part.shape)] = file
    specs: dict[str, list[TensorSpec]] = {}
    for spec, file in found_in.items():
        specs.setdefault(file, []).append(spec)
    for item in manifest.record.rest:
        if not item.whole:
            found = read_file_header(manifest.folder, item.file, item.size)
            own = [TensorSpec(i.name, i.dtype, i.shape) for i in found.values()]
            specs.setdefault(item.source, []).extend(own)
    metadata = {file.name: file.metadata for file in manifest.record.source.files}
    return [plan_file(name, specs[name], metadata.get(name, {})) for name in sorted(specs)]


def _refuse_replaced(manifest: Manifest) -> None:
    """Raises UsageError when the folder holds weights that were quantized again."""
    replaced = {role for group in manifest.record.groups for role in group_recipe(group).lossy}
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
        meter.say(f"layer {layer}")
        for members in layer_restorers(manifests, layer, readers, meter, max_memory):
            wrong = restore_layer(members, store)
            if wrong:
                raise CheckpointError(f"{wrong[0]}.", hint="Run verify to see everything that is damaged.")


def _take_back(file: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Removes a file that was made, at the end of a block that ends with an error."""
    if kind is not None:
        file.unlink(missing_ok=True)


def _check(out: Path, item: FileRecord) -> None:
    """CheckpointError when a file that is given back is not the one that was kept."""
    wrong = file_findings(out / item.file, item.size, item.sha256)
    if wrong:
        raise CheckpointError(f"{wrong[0]}.", hint="Convert again.")


def _write_documents(
    manifest: Manifest, back: Path, places: Mapping[str, tuple[FilePlan, TensorInfo]]
) -> None:
    """The source's small files, config.json and index; of experts alone, an index of those."""
    out = manifest.folder
    for item in manifest.record.files:
        if item.file != SOURCE_INDEX:
            copy_file(out / item.file, back / item.file)
        elif not manifest.record.experts_only:
            copy_file(out / item.file, back / INDEX)
    copy_file(out / SOURCE_CONFIG, back / CONFIG)
    if (back / INDEX).exists():
        return
    weight_map = {name: file.name for name, (file, _) in places.items()}
    total = sum(info.nbytes for _, info in places.values())
    for rest in manifest.record.rest:
        if rest.whole:
            found = read_file_header(out, rest.file, rest.size)
            weight_map.update(dict.fromkeys(found, rest.source))
            total += sum(info.nbytes for info in found.values())
    if len(set(weight_map.values())) > 1 or "model.safetensors" not in weight_map.values():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(back / INDEX, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())

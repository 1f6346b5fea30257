"""Checks that a converted directory is what was written, and that its source can be restored from it."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_number
from ...errors import CheckpointError
from ...files.folder_handle import file_findings, sha256_inside
from ...files.safe_reading import range_sha256
from ..manifest.checked_files import read_file_header
from ..manifest.manifest import Manifest
from ..manifest.manifest_records import CONFIG, MANIFEST, SOURCE_INDEX, FileRecord
from ..manifest.progress_log import Meter, Progress, silent
from ..manifest.rank_directories import load_rank_manifests, refuse_one_rank
from ..plan.source_pin import source_files
from ..stream.source_reader import FolderReader
from .restore_layer import RestoredRun, is_complete, layer_restorers, restore_layer, source_tensors


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        layers, files: numbers of converted layers and of other files that were checked.
        tensors: number of source tensors restored and checked against their hashes.
        slices: number of canonical slices checked against the hashes of the source's slices.
        bytes_read: bytes of the directory that were read.
        compared: whether tensors were also compared with the bytes of a source.
        findings: a phrase for each defect; empty if there is none.
    """

    layers: int
    files: int
    tensors: int
    slices: int
    bytes_read: int
    compared: bool
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(
    out: Path, source: Path | None = None, *, progress: Progress = silent, max_memory: int | None = None
) -> VerifyReport:
    """Checks a converted directory: lengths, headers, hashes, and the round trip of every expert tensor.

    Every file is covered, and one that a loader might read but the conversion did not write is a finding.

    The round trip inverts the steps recorded in the manifest and checks the result against the SHA-256 of
    the source's bytes taken during conversion; with `source`, also against that directory's bytes. Damage
    is a finding, so that one report names all of it. `out` may hold the directories of all ranks, whose
    slices are joined. For a single rank that slices experts, the restored slices are checked against the
    hashes of the source's slices.

    Raises:
        CheckpointError: not a finished converted directory, or the manifest or a file of `source` cannot be
            read.
        UsageError: `source` was given for one rank's slices.
    """
    manifests = load_rank_manifests(out)
    manifest = manifests[0]
    if source and len(manifests) == 1 and manifest.record.shard.tp_size > 1:
        refuse_one_rank(manifest)
    # What ranks share is listed for each of them, and checked once.
    labelled = {rank.folder for rank in manifests} if len(manifests) > 1 else set()
    other_files = list(dict.fromkeys((rank.top, item) for rank in manifests for item in _other_files(rank)))
    sizes = [layer.size for rank in manifests for layer in rank.record.layers]
    sizes += [item.size for _, item in other_files]
    meter = Meter(progress, sum(sizes))
    findings: list[str] = []
    tensors = slices = 0
    original = _Source(source, manifest) if source else None
    try:
        with ExitStack() as stack:
            readers = [stack.enter_context(FolderReader(rank.folder)) for rank in manifests]
            for layer in manifest.layers:
                meter.start(f"layer {layer}")
                sink = original.compare if original else lambda run: None
                for members in layer_restorers(manifests, layer, readers, meter, max_memory):
                    try:
                        findings += restore_layer(members, sink)
                    except CheckpointError as error:
                        findings.append(str(error))
                    if original and is_complete(members):
                        original.compare_types(members[0].manifest, layer)
                    if is_complete(members):
                        tensors += sum(1 for _ in source_tensors(members[0].manifest, layer))
                    slices += sum(len(member.manifest.layer(layer).slices) for member in members)
        for folder, item in other_files:
            meter.start(item.file)
            label = f"{folder.name}/" if folder in labelled else ""
            findings += [label + text for text in file_findings(folder, item.file, item.size, item.sha256)]
            meter.advance(item.size)
        for folder in dict.fromkeys(
            (*(rank.top for rank in manifests), *(rank.folder for rank in manifests))
        ):
            label = f"{folder.name}/" if folder in labelled else ""
            written = {item.file for top, item in other_files if top == folder} | {MANIFEST}
            written |= {layer.file for r in manifests if r.folder == folder for layer in r.record.layers}
            findings += [label + text for text in unlisted_files(folder, written)]
        if original:
            findings += original.findings + original.compare_passthrough(manifest.top)
            findings += original.compare_files()
    finally:
        if original:
            original.close()
    layers = sum(len(rank.layers) for rank in manifests)
    return VerifyReport(
        layers, len(other_files), tensors, slices, sum(sizes), source is not None, tuple(findings)
    )


LOADED = frozenset(
    (
        *(".bin", ".experts", ".gguf", ".jinja", ".json", ".model", ".pt", ".pth", ".py", ".safetensors"),
        *(".spm", ".tiktoken", ".txt", ".vocab"),
    )
)
"""Suffixes of the files that engines and tokenizers may read because they are there."""


def unlisted_files(folder: Path, written: Collection[str]) -> list[str]:
    """A phrase for each file of a directory that a loader may read and that is not among the `written`.

    Folders in it count, too (``additional_chat_templates`` is read by its name), but for those of ranks and
    other conversions, and hidden ones.
    """
    found = []
    for where, folders, files in os.walk(folder):
        below = Path(where)
        folders[:] = [one for one in folders if not one.startswith(".") and not _is_apart(below / one)]
        names = [str((below / name).relative_to(folder)) for name in files if Path(name).suffix in LOADED]
        found += [name for name in names if name not in written]
    return [f"{name} is not of this conversion" for name in sorted(found)]


def _is_apart(folder: Path) -> bool:
    """Whether a folder in a converted directory is one of its ranks, or another converted directory."""
    return rank_number(folder) is not None or (folder / MANIFEST).exists()


def _other_files(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Every file of a directory other than those of converted layers."""
    record = manifest.record
    return (*record.rest, *record.files, *record.documents)


class _Source:
    """The source checkpoint, whose bytes are compared with the restored ones."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest, self._folder = manifest, folder
        self._reader = FolderReader(folder)
        self.findings: list[str] = []
        self._infos = {
            (item.name, name): info
            for item in manifest.record.source.files
            for name, info in read_file_header(folder, item.name).items()
        }
        expected = manifest.record.source.config_sha256
        if not (folder / CONFIG).is_file() or sha256_inside(folder, CONFIG) != expected:
            self.findings.append(f"the source's {CONFIG} is not the one that was converted")

    def compare(self, run: RestoredRun) -> None:
        """Compares a restored run with the source's bytes; a difference is a finding, once per tensor."""
        info = self._infos.get((run.file, run.name))
        text = f"{run.name} differs from the source's bytes"
        if info is None or info.start + run.at + len(run.data) > info.end:
            text = f"{run.name} is not in the source's {run.file}, or has another size there"
        else:
            buffer = memoryview(bytearray(len(run.data)))
            self._reader.read(run.file, buffer, info.start + run.at)
            if buffer == run.data:
                return
        if text not in self.findings:
            self.findings.append(text)

    def compare_types(self, manifest: Manifest, layer: int) -> None:
        """Compares dtypes and shapes of a layer's tensors with the source's; a difference is a finding."""
        for part, name, file, _ in source_tensors(manifest, layer):
            info = self._infos.get((file, name))
            if info is not None and (info.dtype, info.shape) != (part.dtype, part.shape):
                self.findings.append(
                    f"{name} is restored as {part.dtype} {list(part.shape)}, "
                    f"and is {info.dtype} {list(info.shape)} in the source"
                )

    def compare_passthrough(self, out: Path) -> list[str]:
        """Findings from comparing the passthrough tensors with the source's bytes."""
        findings: list[str] = []
        with FolderReader(out) as reader:
            for rest in self._manifest.record.rest:
                try:
                    header = read_file_header(out, rest.file, rest.size)
                except CheckpointError:
                    continue  # A finding already, of the check of all files.
                for name, info in header.items():
                    source = self._infos.get((rest.source, name))
                    if source is None or range_sha256(
                        self._reader.fd(rest.source), source.start, source.end, rest.source
                    ) != range_sha256(reader.fd(rest.file), info.start, info.end, rest.file):
                        findings.append(f"{name} differs from the source's bytes")
        return findings

    def compare_files(self) -> list[str]:
        """Findings from comparing metadata in headers, and small files that are there, with the records."""
        record = self._manifest.record
        now = source_files(self._folder, [item.name for item in record.source.files])
        findings = [
            f"the metadata in the header of the source's {item.name} is not what was converted"
            for item, found in zip(record.source.files, now, strict=True)
            if found.metadata != item.metadata
        ]
        # The index is restored from the tensors' places, which are compared, and may be spelled otherwise.
        for item in record.files:
            there = item.file != SOURCE_INDEX and (self._folder / item.file).is_file()
            if there and file_findings(self._folder, item.file, item.size, item.sha256):
                findings.append(f"the source's {item.file} is not the one that was converted")
        return findings

    def close(self) -> None:
        self._reader.__exit__(None, None, None)

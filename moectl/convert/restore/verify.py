"""Whether a converted folder is what was written, and gives its source back bit for bit."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...files.safe_reading import file_findings, file_sha256, range_sha256
from ..manifest.manifest import Manifest, read_file_header
from ..manifest.manifest_records import CONFIG, FileRecord
from ..manifest.progress_log import Meter, Progress, silent
from ..manifest.rank_directories import load_folders, refuse_one_rank
from ..stream.source_reader import FolderReader
from .restore_layer import RestoredRun, is_complete, layer_restorers, part_tensors, restore_layer


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        layers, files: converted layers and other files that were checked.
        tensors: source tensors restored and compared with their hashes.
        slices: canonical tensors of slices that were compared with the hashes of what was cut.
        bytes_read: bytes of the folder that were read.
        compared: whether the source's own bytes were compared too.
        findings: what is wrong, in words; empty when all is well.
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
    """Checks a converted folder: lengths, headers, hashes, and the round trip of every expert tensor.

    The round trip undoes the chains that the manifest holds and compares the source's SHA-256, which
    were taken when its bytes were read; `source` compares with the bytes of that folder as well.
    Damage is a finding, so that one report names all of it. `out` may hold the folders of every rank,
    whose slices then lead back together. A rank that has slices of experts leads back to what was cut
    of the source, by the hashes taken then.

    Raises:
        CheckpointError: no finished converted folder, a manifest that cannot be read, or a `source`
            whose files cannot be read.
        UsageError: a `source` to compare with one rank's slices.
    """
    manifests = load_folders(out)
    manifest = manifests[0]
    if source and len(manifests) == 1 and manifest.record.shard.tp_size > 1:
        refuse_one_rank(manifest)
    kept = [(each.folder, item) for each in manifests for item in _kept(each)]
    sizes = [layer.size for each in manifests for layer in each.record.layers]
    sizes += [item.size for _, item in kept]
    meter = Meter(progress, sum(sizes))
    findings: list[str] = []
    tensors = slices = 0
    original = _Source(source, manifest) if source else None
    try:
        with ExitStack() as stack:
            readers = [stack.enter_context(FolderReader(each.folder)) for each in manifests]
            for layer in manifest.layers:
                meter.say(f"layer {layer}")
                sink = original.compare if original else lambda run: None
                for members in layer_restorers(manifests, layer, readers, meter, max_memory):
                    try:
                        findings += restore_layer(members, sink)
                    except CheckpointError as error:
                        findings.append(str(error))
                    if is_complete(members):
                        tensors += sum(1 for _ in part_tensors(members[0].manifest, layer))
                    slices += sum(len(member.manifest.layer(layer).slices) for member in members)
        for folder, item in kept:
            meter.say(item.file)
            label = f"{folder.name}/" if len(manifests) > 1 else ""
            findings += [label + text for text in file_findings(folder / item.file, item.size, item.sha256)]
            meter.advance(item.size)
        if original:
            findings += original.findings + original.compare_rest(manifest.folder)
    finally:
        if original:
            original.close()
    layers = sum(len(each.layers) for each in manifests)
    return VerifyReport(layers, len(kept), tensors, slices, sum(sizes), source is not None, tuple(findings))


def _kept(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Every file of a folder that is no converted layer's."""
    record = manifest.record
    return (*record.rest, *record.files, *record.documents)


class _Source:
    """The source checkpoint's own bytes, compared with what comes back."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reader = FolderReader(folder)
        self.findings: list[str] = []
        self._infos = {
            (item.name, name): info
            for item in manifest.record.source.files
            for name, info in read_file_header(folder, item.name).items()
        }
        config = folder / CONFIG
        if not config.is_file() or file_sha256(config) != manifest.record.source.config_sha256:
            self.findings.append(f"the source's {CONFIG} is not the one that was converted")

    def compare(self, run: RestoredRun) -> None:
        """Holds a restored run to the source's bytes; a difference is a finding, once per tensor."""
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

    def compare_rest(self, out: Path) -> list[str]:
        """Tensors that are no experts, held to the source's bytes."""
        findings: list[str] = []
        with FolderReader(out) as reader:
            for rest in self._manifest.record.rest:
                try:
                    found = read_file_header(out, rest.file, rest.size)
                except CheckpointError:
                    continue
                for name, info in found.items():
                    own = self._infos.get((rest.source, name))
                    if own is None or range_sha256(
                        self._reader.fd(rest.source), own.start, own.end, rest.source
                    ) != range_sha256(reader.fd(rest.file), info.start, info.end, rest.file):
                        findings.append(f"{name} differs from the source's bytes")
        return findings

    def close(self) -> None:
        self._reader.__exit__(None, None, None)

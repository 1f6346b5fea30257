"""Whether a converted folder is what was written, and gives its source back bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .batches import FolderReader
from .disk import file_findings, file_sha256, range_sha256
from .manifest import Manifest, load_manifest, read_file_header
from .manifest_record import CONFIG, FileRecord
from .progress import Meter, Progress, silent
from .restore import LayerRestorer, Restored


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        layers, files: converted layers and other files that were checked.
        tensors: source tensors restored and compared with their hashes.
        bytes_read: bytes of the folder that were read.
        compared: whether the source's own bytes were compared too.
        findings: what is wrong, in words; empty when all is well.
    """

    layers: int
    files: int
    tensors: int
    bytes_read: int
    compared: bool
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(
    out: Path, source: Path | None = None, *, progress: Progress = silent, max_memory: int | None = None
) -> Report:
    """Checks a converted folder: lengths, headers, hashes, and the round trip of every expert tensor.

    The round trip undoes the chains that the manifest holds and compares the source's SHA-256, which
    were taken when its bytes were read; `source` compares with the bytes of that folder as well.
    Damage is a finding, so that one report names all of it.

    Raises:
        CheckpointError: no finished converted folder, a manifest that cannot be read, or a `source`
            whose files cannot be read.
    """
    manifest = load_manifest(out)
    record = manifest.record
    kept: tuple[FileRecord, ...] = (*record.rest, *record.files, *record.documents)
    sizes = [layer.size for layer in record.layers] + [item.size for item in kept]
    meter = Meter(progress, sum(sizes))
    findings: list[str] = []
    tensors = 0
    original = _Source(source, manifest) if source else None
    try:
        with FolderReader(out) as reader:
            for layer in manifest.layers:
                meter.say(f"layer {layer}")
                sink = original.compare if original else lambda run: None
                try:
                    findings += LayerRestorer(manifest, layer, reader, meter, sink, max_memory).run()
                except CheckpointError as error:
                    findings.append(str(error))
                tensors += sum(len(part.sha256) for part in manifest.layer(layer).source.values())
        for item in kept:
            meter.say(item.file)
            findings += file_findings(out / item.file, item.size, item.sha256)
            meter.advance(item.size)
        if original:
            findings += original.findings + original.compare_rest(out)
    finally:
        if original:
            original.close()
    return Report(len(manifest.layers), len(kept), tensors, sum(sizes), source is not None, tuple(findings))


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

    def compare(self, run: Restored) -> None:
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

"""The pipeline stages of a layer: read, hash, convert, write, and close its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path

from ...errors import CheckpointError
from ...files.access import Access
from ...files.atomic import NewFile
from ...files.tensor_table import TensorInfo
from ...lazy_torch import torch
from ..canonical import byte_scales
from ..codecs import check_scales
from ..manifest.manifest_records import LayerRecord, SourceTensorHashes
from ..manifest.progress_log import Meter, ProgressLog
from ..plan.conversion_plan import LayerPlan
from ..rank_slice import SliceHashes
from ..steps.value_steps import Statistics, Tensors, update_statistics
from ..stream.devices import BufferExtent, ConversionDevice
from ..stream.expert_batches import ExpertBatches
from ..stream.pipeline import PipelineSlot, WorkerThreads
from ..stream.source_reader import Digests, FolderReader, Piece, as_bytes, spans

CHECKED_SCALES = 1 << 20
"""Bytes of scales checked at once: counting NaNs takes several times as much memory, which is not part of the
memory budget."""

MANY_THREADS = 8
"""Number of threads from which two layers are converted at once."""

WRITE_BYTES = 16 << 20
"""Bytes of a piece that one write task covers."""


@dataclass
class LayerInProgress:
    """A layer that is being converted: its new file, and the hashes of what is read and written."""

    plan: LayerPlan
    out: Path
    access: Access
    file: NewFile | None = None
    statistics: Statistics = field(default_factory=dict)
    read_digests: Digests = field(default_factory=Digests)
    written_digests: Digests = field(default_factory=Digests)
    slices: SliceHashes = field(default_factory=SliceHashes)
    pending: list[Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends = {info.name: stop for info, _, stop in self.plan.map.extents}
        self._next: dict[str, int] = {info.name: start for info, start, _ in self.plan.map.extents}

    @cached_property
    def batches(self) -> ExpertBatches:
        """Reads and converts the layer's experts."""
        return ExpertBatches(self.plan.map)

    def open(self, workers: WorkerThreads) -> None:
        """Creates the layer's file under its temporary name and writes its header.

        Space is reserved concurrently with the first reads, since it is slow on in-memory file systems.
        """
        self.file = NewFile(self.out / self.plan.file.name, self.plan.file.size, self.access)
        self.pending.append(workers.write(self.file.reserve))
        self.pending.append(workers.write(partial(self.file.write, memoryview(self.plan.file.header), 0)))

    def advance_hash(self, info: TensorInfo, at: int, size: int) -> bool | None:
        """Whether the next `size` bytes of a tensor are its last; None if they have been hashed before.

        A tensor that all experts share is read again for every batch.
        """
        if self._next[info.name] != at:
            return None
        self._next[info.name] = at + size
        return at + size == self._ends[info.name]

    def record(self) -> LayerRecord:
        """The layer's record for the log and the manifest, once everything is written."""
        file = self.plan.file
        source = {
            mapped.mapping.stored: SourceTensorHashes(
                tuple(self.read_digests[info.name] for info in mapped.tensors),
                tuple(info.file for info in mapped.tensors),
            )
            for mapped in self.plan.map.mapped
        }
        written = {name: self.written_digests[name] for name in file.tensors}
        return LayerRecord(self.plan.layer, file.name, file.size, written, source, self.slices.result())

    def commit(self) -> LayerRecord:
        """Waits for pending writes, syncs the file and renames it. Returns the layer's record."""
        for future in self.pending:
            future.result()
        record = self.record()
        assert self.file is not None
        self.file.commit()
        return record

    def discard(self) -> None:
        """Removes the file if it was not finished."""
        if self.file is not None:
            self.file.discard()


@dataclass(frozen=True)
class ExpertBatch:
    """Experts `first` to `last` (exclusive) of a layer."""

    layer: LayerInProgress
    first: int
    last: int

    @property
    def experts(self) -> int:
        return self.last - self.first

    @property
    def is_last(self) -> bool:
        """True for the last batch of its layer."""
        return self.last == self.layer.plan.map.experts


ConvertedBatch = tuple[list[Piece], Callable[[], None]]
"""Pieces of a batch, and a function that blocks until their bytes are valid."""


@dataclass
class LayerStages:
    """The stages of the batches of many layers; a file is synced while the next layer is converted."""

    reader: FolderReader
    device: ConversionDevice
    workers: WorkerThreads
    meter: Meter
    log: ProgressLog
    _closing: Future[None] | None = None

    def batches(self, layers: list[LayerInProgress]) -> Iterator[ExpertBatch]:
        """Yields every batch of `layers`; a layer's file is created before its first batch.

        With enough threads, batches of two layers are interleaved: a tensor is hashed by a single thread
        from its first byte to its last, so that a layer's largest tensor would be the bottleneck.
        """
        interleaved = 2 if self.workers.size >= MANY_THREADS else 1
        for first in range(0, len(layers), interleaved):
            batches = [self._batches_of(layer) for layer in layers[first : first + interleaved]]
            for jobs in zip_longest(*batches):
                yield from (job for job in jobs if job is not None)

    def _batches_of(self, layer: LayerInProgress) -> Iterator[ExpertBatch]:
        layer.open(self.workers)
        jobs = [ExpertBatch(layer, *span) for span in spans(layer.plan.map.experts, layer.plan.batch)]
        self._collect_statistics(layer)
        yield from jobs

    def _collect_statistics(self, layer: LayerInProgress) -> None:
        """Collects the statistics that the writer needs, in a separate pass over the roles concerned.

        Input scales are those of all the layer's experts: ranks that hold different experts of a layer
        exchange tokens that are quantized by one scale.
        """
        plan, needed = layer.plan, layer.plan.writer.statistics
        for of_layer, mapped in ((False, plan.map), (True, plan.whole)):
            chosen = tuple(statistic for statistic in needed if statistic.of_layer == of_layer)
            batches = ExpertBatches(mapped, frozenset(statistic.role for statistic in chosen))
            for first, last in spans(mapped.experts, plan.batch) if chosen else ():
                batch = plan.rank_slice.slice(batches.load(first, last, self._fill))
                layer.statistics = {**layer.statistics, **update_statistics(chosen, batch, layer.statistics)}

    def _fill(self, info: TensorInfo, at: int, view: memoryview) -> None:
        self.reader.read(info.file, view, info.start + at)

    def read(self, job: ExpertBatch, slot: PipelineSlot) -> None:
        layer = job.layer

        def fill(info: TensorInfo, at: int, view: memoryview) -> None:
            self._fill(info, at, view)
            last = layer.advance_hash(info, at, len(view))
            if last is not None:
                update = partial(layer.read_digests.update, info.name, view, last=last)
                slot.pending.append(self.workers.hash(f"in {info.name}", len(view), update, last=last))

        before = len(slot.pending)
        layer.batches.read(job.first, job.last, fill, layer.batches.stored(slot.read, job.experts))
        layer.pending += slot.pending[before:]

    def work(self, job: ExpertBatch, slot: PipelineSlot) -> ConvertedBatch:
        plan, batches = job.layer.plan, job.layer.batches
        used = BufferExtent(batches.read_bytes(job.experts), plan.writer.buffer_bytes(job.experts))
        if job.first == 0:
            self.meter.start(f"layer {plan.layer}")
        check_auxiliary(plan, batches.stored(slot.read, job.experts), job.first)
        pieces, ready = self.device.run(slot, used, partial(self._convert, job))
        if job.is_last and self._closing is not None:
            # At most one earlier layer may still be waiting for its sync.
            self._closing.result()
        self.meter.advance(sum(size for m in plan.map.mapped for _, _, size, _ in m.run(job.first, job.last)))
        return pieces, ready

    def _convert(
        self, job: ExpertBatch, read: torch.Tensor, canonical: torch.Tensor, written: torch.Tensor
    ) -> list[Piece]:
        layer, plan = job.layer, job.layer.plan
        batch = layer.batches.convert(layer.batches.stored(read, job.experts), canonical)
        check_scale_values(plan, batch, job.first)
        slices = plan.rank_slice.slice(batch)
        if plan.rank_slice.sliced:
            roles = plan.map.shapes
            layer.slices.take({role: t.cpu() for role, t in slices.items() if role in roles}, job.first)
        try:
            return list(plan.writer.store(slices, job.first, layer.statistics, written))
        except CheckpointError as error:
            raise _located(plan, batch, job.first, error) from error

    def write(self, job: ExpertBatch, slot: PipelineSlot, converted: ConvertedBatch) -> None:
        layer, (pieces, ready) = job.layer, converted
        assert layer.file is not None
        before = len(slot.pending)
        for piece in pieces:
            target, view = layer.plan.file.tensors[piece.name], as_bytes(piece.data.contiguous())
            last = piece.at + len(view) == target.nbytes
            update = partial(
                _when_ready, ready, partial(layer.written_digests.update, piece.name, view, last=last)
            )
            slot.pending.append(self.workers.hash(f"out {piece.name}", len(view), update, last=last))
            for at in range(0, len(view), WRITE_BYTES):
                store = partial(layer.file.write, view[at : at + WRITE_BYTES], target.start + piece.at + at)
                slot.pending.append(self.workers.write(partial(_when_ready, ready, store)))
        layer.pending += slot.pending[before:]
        if job.is_last:
            self._closing = self.workers.close_file(partial(self._close, layer))

    def _close(self, layer: LayerInProgress) -> None:
        record = layer.commit()
        layer.plan.writer.done(layer.out, layer.access)
        self.log.add(record)

    def finish(self) -> None:
        """Waits until the last layer's file is synced and logged."""
        if self._closing is not None:
            self._closing.result()


def _when_ready(ready: Callable[[], None], task: Callable[[], None]) -> None:
    ready()
    task()


def check_auxiliary(layer: LayerPlan, stored: Tensors, first: int) -> None:
    """Raises CheckpointError for auxiliary tensors (shapes, act order) that contradict the weights."""
    for mapped in layer.map.mapped:
        if mapped.mapping.role:
            continue
        for i, values in enumerate(stored[mapped.mapping.side]):
            reason = layer.map.check(mapped.mapping, layer.rank_slice.whole, values)
            if reason:
                name = mapped.tensors[first + i if mapped.per_expert else 0].name
                raise CheckpointError(f"{name} {reason}.", hint="Check the checkpoint.")


def _located(layer: LayerPlan, batch: Tensors, first: int, error: CheckpointError) -> CheckpointError:
    """`error`; if a weight in `batch`, of experts from `first`, is not finite, one that names its tensor."""
    for role, t in batch.items():
        if role not in layer.map.shapes or not t.is_floating_point():
            continue
        bad = ~torch.isfinite(t.float()).flatten(1).all(1)
        if bool(bad.any()):
            expert = first + int(bad.nonzero()[0])
            sources = [m for m in layer.map.mapped if m.mapping.role == role]
            names = [m.tensors[expert if m.per_expert else 0].name for m in sources]
            return CheckpointError(
                f"layer {layer.layer}, expert {expert}: {' or '.join(names)} has weights that are NaN or "
                "infinite.",
                hint=error.hint,
            )
    return error


def check_scale_values(layer: LayerPlan, batch: Tensors, first: int) -> None:
    """Raises CheckpointError for a NaN or infinite scale."""
    for role, t in batch.items():
        if role.endswith("_scale") and role in layer.map.shapes:
            step = max(1, CHECKED_SCALES * len(t) // max(1, t.numel() * t.element_size()))
            for at in range(0, len(t), step):
                _check_block(layer, role, t[at : at + step], first + at)


def _check_block(layer: LayerPlan, role: str, scales: torch.Tensor, first: int) -> None:
    try:
        check_scales(scales, byte_scales(layer.problem))
    except CheckpointError as error:
        mapped = next(m for m in layer.map.mapped if m.mapping.role == role)
        name = mapped.tensors[first if mapped.per_expert else 0].name
        raise CheckpointError(
            f"layer {layer.layer}, {role} of experts from {first} ({name}): {error.what}",
            reason=error.reason,
            hint=error.hint,
        ) from error

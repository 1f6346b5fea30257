"""Prepares a layer for several backends, in as many copies as cold caches need, and measures the costs."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import Unavailable
from ..kernels.modular.fused_moe_kernel import FusedMoEKernel, kernel_of
from ..kernels.prepared_layer import CANONICAL, PreparedMoE
from ..layer.experts import ExpertLayer, Ids
from .bench_rows import PreparationCosts
from .bench_targets import BenchTarget

LOAD_SAMPLE_BYTES = 256 << 20
"""Most bytes of prepared weights that are copied to estimate the time of a warm load."""

PREPARATION_PEAK = 2.0
"""Peak memory of preparing a layer, relative to the layer's size."""

CALL_BUFFERS = 4
"""Memory of a call, CUDA graph included, relative to the activations of all its (token, expert) pairs."""


@dataclass(frozen=True)
class ReadyKernels:
    """One backend's kernels of a layer, each with its own copy of the weights, and their costs."""

    name: str
    kernels: tuple[FusedMoEKernel, ...]
    costs: PreparationCosts

    @property
    def prepared(self) -> PreparedMoE:
        """The first copy of the weights."""
        return self.kernels[0].prepared


@dataclass
class _ReadTimer:
    """Adds up the seconds in which a layer was read; batches read at once count once."""

    device: torch.device
    seconds: float = 0.0
    _reading: int = 0
    _since: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, layer: ExpertLayer) -> ExpertLayer:
        """`layer` with its reads timed."""

        def canonical(ids: Ids, device: torch.device | None = None) -> Mapping[str, Tensor]:
            return self._measure(lambda: layer.canonical(ids, device))

        def stored(device: torch.device) -> Mapping[str, Tensor]:
            return self._measure(lambda: layer.stored(device))

        return replace(layer, canonical=canonical, stored=stored)

    def _measure(self, read: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        synchronize(self.device)
        with self._lock:
            self._since = self._since if self._reading else time.perf_counter()
            self._reading += 1
        try:
            tensors = read()
            synchronize(self.device)
        finally:
            with self._lock:
                self._reading -= 1
                if not self._reading:
                    self.seconds += time.perf_counter() - self._since
        return tensors


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepare_kernels(
    target: BenchTarget, backend: str, device: torch.device, copies: int, costs: bool = True
) -> ReadyKernels:
    """Prepares `target` for `backend`, in `copies` copies; raises what `ExpertLayer.prepared` raises.

    With `costs`, the costs are measured: times of reading and repacking are the fastest of at least two
    preparations, since the first one includes one-time compilation and loading.
    """
    layers: list[PreparedMoE] = []
    measurements: list[_Preparation] = []
    for i in range(max(copies, 2) if costs else copies):
        if i == 1 and copies == 1:
            layers.clear()  # only its costs were needed, and there may be no room for two
            gc.collect()
        prepared, preparation = _prepare(target, backend, device)
        layers.append(prepared)
        measurements.append(preparation)
        del prepared
    kernels = tuple(kernel_of(prepared) for prepared in layers)
    if not costs:
        return ReadyKernels(backend, kernels, PreparationCosts())
    best, first = min(measurements, key=lambda m: m.repack), layers[0]
    as_stored = first.layout == target.experts.layout != CANONICAL and not first.relaid
    read = min(m.read for m in measurements)
    on_gpu = device.type == "cuda"
    measured = PreparationCosts(
        read_s=read,
        repack_s=best.repack,
        first_s=measurements[0].read + measurements[0].repack,
        load_s=read if as_stored else _load_seconds(first, device),
        weight_bytes=first.nbytes,
        held_bytes=measurements[-1].held if on_gpu else None,
        peak_bytes=measurements[-1].peak if on_gpu else None,
    )
    return ReadyKernels(backend, kernels, measured)


@dataclass(frozen=True)
class _Preparation:
    """One preparation: seconds of reading and of repacking, bytes of resident and peak device memory."""

    read: float
    repack: float
    held: int
    peak: int


def _prepare(target: BenchTarget, backend: str, device: torch.device) -> tuple[PreparedMoE, _Preparation]:
    reading, before = _ReadTimer(device), 0
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begin = time.perf_counter()
    prepared = reading.timed(target.experts).prepared(backend, device)
    synchronize(device)
    repack = time.perf_counter() - begin - reading.seconds
    held = peak = 0
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device) - before
        peak = torch.cuda.max_memory_allocated(device) - before
    return prepared, _Preparation(reading.seconds, repack, held, peak)


def _load_seconds(prepared: PreparedMoE, device: torch.device) -> float | None:
    """Seconds to copy the weights from pageable host memory to `device`, as from a file in the page cache.

    Beyond `LOAD_SAMPLE_BYTES` the time of a part is scaled up. None without weights.
    """
    parts, left = [], LOAD_SAMPLE_BYTES
    for tensor in prepared.weights.values():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)[:left]
        parts.append(flat.cpu().clone())
        left -= len(flat)
        if left <= 0:
            break
    nbytes = sum(map(len, parts))
    if not nbytes:
        return None
    targets = [torch.empty(len(part), dtype=torch.uint8, device=device) for part in parts]
    best = math.inf
    for _ in range(2):
        synchronize(device)
        begin = time.perf_counter()
        for part, destination in zip(parts, targets, strict=True):
            destination.copy_(part)
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best * prepared.nbytes / nbytes


@dataclass
class MemoryLeft:
    """Free device memory; on a CPU it is assumed to be sufficient.

    Attributes:
        call_bytes: bytes that the largest call of one backend may need.
    """

    device: torch.device
    call_bytes: int

    def free(self) -> float:
        """Bytes that can still be allocated."""
        if self.device.type != "cuda":
            return math.inf
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached

    def fits(self, nbytes: int, copies: int, others: int) -> bool:
        """Whether `copies` of a layer of `nbytes` fit in addition to the calls of `others` backends."""
        return self.free() >= nbytes * (copies - 1 + PREPARATION_PEAK) + (others + 1) * self.call_bytes


def call_bytes(target: BenchTarget, tokens: int) -> int:
    """Estimated bytes that a call of `tokens` needs in addition to the weights."""
    problem = target.problem
    width = problem.dims.hidden + 3 * problem.dims.intermediate
    return CALL_BUFFERS * 2 * tokens * problem.top_k * width


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of its text."""
    lines = str(error).strip().splitlines()
    kind = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
    return f"{kind}{lines[0] if lines else ''}"[:300]

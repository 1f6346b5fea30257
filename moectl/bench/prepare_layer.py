"""A layer prepared for several backends at once, as often as cold weights need it, and what that costs."""

from __future__ import annotations

import gc
import math
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

LOADED = 256 << 20
"""Most bytes of prepared weights that are copied to see how fast all of them would come."""

SPARE = 2.0
"""Times its own bytes that preparing a layer may need for a moment."""

CALL_BUFFERS = 4
"""Times the bytes of all assignments' inner and outer values that a call may need, graphs included."""


@dataclass(frozen=True)
class ReadyKernels:
    """One backend's kernels of the same layer, each on weights of its own, and their cost."""

    name: str
    kernels: tuple[FusedMoEKernel, ...]
    costs: PreparationCosts

    @property
    def prepared(self) -> PreparedMoE:
        """The first of the copies."""
        return self.kernels[0].prepared


@dataclass
class _Reading:
    """Seconds that are spent on reading a layer, apart from what is done with it."""

    device: torch.device
    seconds: float = 0.0

    def of(self, layer: ExpertLayer) -> ExpertLayer:
        """`layer`, whose readings are counted."""

        def canonical(ids: Ids) -> Mapping[str, Tensor]:
            return self._counted(lambda: layer.canonical(ids))

        def stored(device: torch.device) -> Mapping[str, Tensor]:
            return self._counted(lambda: layer.stored(device))

        return replace(layer, canonical=canonical, stored=stored)

    def _counted(self, read: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        synchronize(self.device)
        begin = time.perf_counter()
        found = read()
        synchronize(self.device)
        self.seconds += time.perf_counter() - begin
        return found


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_ready(
    target: BenchTarget, backend: str, device: torch.device, copies: int, costs: bool = True
) -> ReadyKernels:
    """`target` prepared `copies` times for `backend`; what `ExpertLayer.prepared` raises.

    With `costs`, they are measured: reading and repacking are the fastest of at least two preparations, as
    the first one compiles and loads what a process needs once.
    """
    made: list[PreparedMoE] = []
    found: list[_Spent] = []
    for i in range(max(copies, 2) if costs else copies):
        if i == 1 and copies == 1:
            made.clear()  # it was made to be measured: there need not be room for two
            gc.collect()
        prepared, spent = _prepare(target, backend, device)
        made.append(prepared)
        found.append(spent)
        del prepared
    kernels = tuple(kernel_of(prepared) for prepared in made)
    if not costs:
        return ReadyKernels(backend, kernels, PreparationCosts())
    best, first = min(found, key=lambda one: one.repack), made[0]
    as_stored = first.layout == target.experts.layout != CANONICAL and not first.relaid
    read = min(one.read for one in found)
    on_gpu = device.type == "cuda"
    measured = PreparationCosts(
        read_s=read,
        repack_s=best.repack,
        first_s=found[0].read + found[0].repack,
        load_s=read if as_stored else _load_seconds(first, device),
        weight_bytes=first.nbytes,
        held_bytes=found[-1].held if on_gpu else None,
        peak_bytes=found[-1].peak if on_gpu else None,
    )
    return ReadyKernels(backend, kernels, measured)


@dataclass(frozen=True)
class _Spent:
    """What one preparation took: seconds of reading and of the rest, and bytes of device memory."""

    read: float
    repack: float
    held: int
    peak: int


def _prepare(target: BenchTarget, backend: str, device: torch.device) -> tuple[PreparedMoE, _Spent]:
    reading, before = _Reading(device), 0
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begin = time.perf_counter()
    made = reading.of(target.experts).prepared(backend, device)
    synchronize(device)
    repack = time.perf_counter() - begin - reading.seconds
    held = peak = 0
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device) - before
        peak = torch.cuda.max_memory_allocated(device) - before
    return made, _Spent(reading.seconds, repack, held, peak)


def _load_seconds(prepared: PreparedMoE, device: torch.device) -> float | None:
    """Seconds to copy the weights from pageable host memory to `device`, as from a file that is cached.

    Of larger layers a part is copied, and the time is taken in proportion. None without weights.
    """
    parts, left = [], LOADED
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
        for part, place in zip(parts, targets, strict=True):
            place.copy_(part)
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best * prepared.nbytes / nbytes


@dataclass
class MemoryLeft:
    """How much of a device's memory is left for layers; a CPU's is taken to be enough.

    Attributes:
        call_bytes: what the largest call of one backend may need.
    """

    device: torch.device
    call_bytes: int
    _held: int = field(default=0)

    def free(self) -> float:
        """Bytes that can still be allocated."""
        if self.device.type != "cuda":
            return math.inf
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached

    def fits(self, nbytes: int, copies: int, others: int) -> bool:
        """Whether `copies` of a layer of `nbytes` can be prepared beside `others` backends' calls."""
        return self.free() >= nbytes * (copies - 1 + SPARE) + (others + 1) * self.call_bytes


def call_bytes(target: BenchTarget, tokens: int) -> int:
    """Roughly the bytes that a call of `tokens` may need beside the weights."""
    problem = target.problem
    width = problem.dims.hidden + 3 * problem.dims.intermediate
    return CALL_BUFFERS * 2 * tokens * problem.top_k * width


def first_lines(error: BaseException) -> str:
    """What an exception says, on one line: its kind and the first line of its text."""
    text = str(error).strip().splitlines()
    kind = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
    return f"{kind}{text[0] if text else ''}"[:300]

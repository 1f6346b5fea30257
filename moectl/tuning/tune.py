"""Tuning on this machine's GPU: searches layers at numbers of tokens, and stores rows in the user's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache.launches_file import ENGINE, KIND, LaunchesStore, LaunchFileKind, LaunchRow
from ..environment import Device
from ..errors import NoBackend, Unavailable
from ..kernels.choice.launch_table import GpuModel
from ..kernels.triton.triton_runner import RUNNER, gpu_of
from .engine_bench import EngineBench
from .engine_tuned_files import TunedFileTarget
from .gpu_bench import GpuBench
from .launch_search import LaunchBench, SearchPlan, SearchResult, search
from .tuned_layers import TunedLayer
from .tuning_cases import TuningCase, by_expected_gain


@dataclass(frozen=True)
class Tuning:
    """Results of tuning, the cache file, and layers that moectl's kernels cannot run, with the reason."""

    found: SearchResult
    device: Device
    path: Path
    refused: Mapping[str, str]


def tune_layers(
    layers: Sequence[TunedLayer],
    tokens: Sequence[int],
    families: Sequence[str],
    plan: SearchPlan,
    again: bool = False,
) -> Tuning:
    """The fastest launches of `families` for `layers` at each number of tokens, as far as `plan` goes.

    With `again`, their cached rows are dropped first.

    Raises Unavailable without a CUDA GPU, and for a cache that is not moectl's; NoBackend when moectl's
    kernels can run none of the layers; and what `search` raises.
    """
    device = this_gpu()
    reasons = {layer.name: RUNNER.refusal(layer.problem, device) for layer in layers}
    refused = {name: reason for name, reason in reasons.items() if reason}
    usable = [layer for layer in layers if layer.name not in refused]
    if not usable:
        raise NoBackend(
            f"moectl's kernels cannot run these layers: {next(iter(refused.values()))}",
            hint="`moectl explain CKPT --policy moectl` says what runs them",
        )
    cells = by_expected_gain(
        [TuningCase(layer.name, layer.problem, count) for layer in usable for count in tokens],
        GpuModel(torch.cuda.get_device_capability(device), gpu_of(device).sms),
    )
    return _tuned(cells, GpuBench(device, families), KIND, plan, again, refused)


def tune_for_engine(
    targets: Mapping[str, TunedFileTarget], tokens: Sequence[int], plan: SearchPlan, again: bool = False
) -> Tuning:
    """The fastest choices for an engine's tuned files, by layer name, as far as `plan` goes.

    Times `grouped_gemm.plain_gemm`, moectl's equivalent of the kernel that reads such files.

    Raises Unavailable without a CUDA GPU, and for a cache that is not moectl's; and what `search` raises.
    """
    cells = [TuningCase(name, it.decision.problem, count) for name, it in targets.items() for count in tokens]
    bench = EngineBench(this_gpu(), lambda cell: targets[cell.name].form)
    return _tuned(cells, bench, ENGINE, plan, again, {})


def cached_choices(targets: Mapping[str, TunedFileTarget]) -> dict[str, tuple[LaunchRow, ...]]:
    """Cached rows of the layers of `targets` on this GPU, by name."""
    gpu = gpu_of(this_gpu())
    return {
        name: LaunchesStore.of(it.decision.problem, gpu, ENGINE).entry().rows for name, it in targets.items()
    }


def this_gpu() -> torch.device:
    """The GPU that is tuned; Unavailable where torch sees none."""
    if not torch.cuda.is_available():
        raise Unavailable(
            "tuning needs a CUDA GPU, and torch sees none",
            hint="run moectl tune on the GPU you will serve from",
        )
    return torch.device("cuda")


def _tuned(
    cells: Sequence[TuningCase],
    bench: LaunchBench,
    kind: LaunchFileKind,
    plan: SearchPlan,
    again: bool,
    refused: Mapping[str, str],
) -> Tuning:
    gpu = gpu_of(torch.device("cuda"))
    stores = {cell.name: LaunchesStore.of(cell.problem, gpu, kind) for cell in cells}
    for cell in cells if again else ():
        stores[cell.name].forget(cell.tokens)
    found = search(cells, bench, lambda cell: stores[cell.name], plan)
    return Tuning(found, gpu, kind.path(gpu), refused)

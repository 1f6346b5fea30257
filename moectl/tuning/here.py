"""Tuning on this machine's GPU: layers and numbers of tokens in, rows in the user's cache out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache.folder import Kind
from ..cache.launches import ENGINE, KIND, Row, Store
from ..environment import Device
from ..errors import NoBackend, Unavailable
from ..kernels.triton.runner import RUNNER, gpu_of
from ..kernels.triton.table import Gpu
from .cells import Cell, by_worth
from .engine_bench import EngineBench
from .engine_files import Target
from .layers import Layer
from .measure import GpuBench
from .search import Bench, Found, Plan, search


@dataclass(frozen=True)
class Tuning:
    """What came of tuning, where it is kept, and layers that moectl's kernels do not run, with the reason."""

    found: Found
    device: Device
    path: Path
    refused: Mapping[str, str]


def tune_layers(
    layers: Sequence[Layer],
    tokens: Sequence[int],
    families: Sequence[str],
    plan: Plan,
    again: bool = False,
) -> Tuning:
    """The fastest launches of `families` for `layers` at each number of tokens, as far as `plan` goes.

    With `again`, what is kept of them is dropped first.

    Raises Unavailable without a CUDA GPU, and for a cache that is not moectl's; NoBackend where moectl's
    kernels run none of the layers; what `search` raises.
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
    cells = by_worth(
        [Cell(layer.name, layer.problem, count) for layer in usable for count in tokens],
        Gpu(torch.cuda.get_device_capability(device), gpu_of(device).sms),
    )
    return _tuned(cells, GpuBench(device, families), KIND, plan, again, refused)


def tune_for_engine(
    targets: Mapping[str, Target], tokens: Sequence[int], plan: Plan, again: bool = False
) -> Tuning:
    """The fastest choices for an engine's tuned files, by layer's name, as far as `plan` goes.

    What is timed is `kernels.triton.plain_gemm`, moectl's kernel of the form that such files are for.

    Raises Unavailable without a CUDA GPU, and for a cache that is not moectl's; what `search` raises.
    """
    cells = [Cell(name, it.decision.problem, count) for name, it in targets.items() for count in tokens]
    bench = EngineBench(this_gpu(), lambda cell: targets[cell.name].form)
    return _tuned(cells, bench, ENGINE, plan, again, {})


def known_choices(targets: Mapping[str, Target]) -> dict[str, tuple[Row, ...]]:
    """What is kept of the layers of `targets` on this GPU, by name."""
    gpu = gpu_of(this_gpu())
    return {name: Store.of(it.decision.problem, gpu, ENGINE).entry().rows for name, it in targets.items()}


def this_gpu() -> torch.device:
    """The GPU that is tuned; Unavailable where torch sees none."""
    if not torch.cuda.is_available():
        raise Unavailable("tuning needs a CUDA GPU, and torch sees none", hint="tune where it will run")
    return torch.device("cuda")


def _tuned(
    cells: Sequence[Cell], bench: Bench, kind: Kind, plan: Plan, again: bool, refused: Mapping[str, str]
) -> Tuning:
    gpu = gpu_of(torch.device("cuda"))
    stores = {cell.name: Store.of(cell.problem, gpu, kind) for cell in cells}
    for cell in cells if again else ():
        stores[cell.name].forget(cell.tokens)
    found = search(cells, bench, lambda cell: stores[cell.name], plan)
    return Tuning(found, gpu, kind.path(gpu), refused)

"""Tuning on this machine's GPU: layers and numbers of tokens in, rows in the user's cache out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache.launches import Store
from ..environment import Device
from ..errors import NoBackend, Unavailable
from ..kernels.triton.runner import RUNNER, gpu_of
from ..kernels.triton.table import Gpu
from .cells import Cell, by_worth
from .layers import Layer
from .measure import GpuBench
from .search import Found, Plan, search


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
    if not torch.cuda.is_available():
        raise Unavailable(
            "tuning needs a CUDA GPU, and torch sees none", hint="tune where the layer will run"
        )
    device = torch.device("cuda")
    reasons = {layer.name: RUNNER.refusal(layer.problem, device) for layer in layers}
    refused = {name: reason for name, reason in reasons.items() if reason}
    usable = [layer for layer in layers if layer.name not in refused]
    if not usable:
        raise NoBackend(
            f"moectl's kernels cannot run these layers: {next(iter(refused.values()))}",
            hint="moectl explain CKPT --policy moectl says what runs them",
        )
    gpu = gpu_of(device)
    stores = {layer.name: Store.of(layer.problem, gpu) for layer in usable}
    cells = by_worth(
        [Cell(layer.name, layer.problem, count) for layer in usable for count in tokens],
        Gpu(torch.cuda.get_device_capability(device), gpu.sms),
    )
    for cell in cells if again else ():
        stores[cell.name].forget(cell.tokens)
    found = search(cells, GpuBench(device, families), lambda cell: stores[cell.name], plan)
    return Tuning(found, gpu, stores[usable[0].name].path, refused)

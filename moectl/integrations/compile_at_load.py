"""A layer's kernels in other libraries: compiled while weights are loaded, at hand before the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..kernels.prepared_layer import PreparedMoE
from ..problem.moe_problem import MoEProblem
from ..run.layer_variants import problem_in_dtype

if TYPE_CHECKING:
    from ..layer.background_compile import KernelLoad


def begin(
    problem: MoEProblem, dtype: str, backend: str, device: torch.device, tokens: int
) -> KernelLoad | None:
    """Starts to compile what a layer with activations of `dtype` needs for 1 to `tokens` tokens.

    None where there is nothing to compile ahead: on a CPU, and for backends of other libraries.
    """
    if device.type != "cuda":
        return None
    from ..layer.background_compile import start  # needs triton

    return start(problem_in_dtype(problem, dtype), backend, device, tokens)


def take(load: KernelLoad, layer: PreparedMoE, log: Callable[[str], object]) -> None:
    """Waits for the kernels of `layer`, takes them into this process, and logs what was compiled."""
    if said := load.ready(layer):
        log(f"moectl: {said}")

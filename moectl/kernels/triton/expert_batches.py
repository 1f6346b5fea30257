"""Batched activations (expert-major, with counts) as calls of the kernels with a top-k of 1.

Nothing is copied or sorted. Each row of the batch is a token of one expert or padding; its id and weight, and
the order of assignments, are generated on the device, and the second GEMM writes the output rows directly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ...problem.moe_problem import MoEProblem
from ..prepared_layer import PreparedMoE
from .kernel_family import KernelCall
from .sort_and_combine import order_of_counts

BATCH_LAYER = "layer for batches"
"""Key in `PreparedMoE.derived`."""

CHOSEN_FOR = "device of the launches"
"""Key in `PreparedMoE.derived` of a layer without weights: the device whose launches it compiles."""


def one_each(problem: MoEProblem) -> MoEProblem:
    """`problem` with a top-k of 1, only the local experts, and no router's weights on the input."""
    routing = replace(problem.routing, weight_on_input=False)
    return replace(problem, experts=problem.local_experts, top_k=1, routing=routing)


def layer_one_each(prepared: PreparedMoE) -> PreparedMoE:
    """The layer with the problem of `one_each`, created once; it shares the weights."""
    kept = {key: value for key, value in prepared.derived.items() if key == CHOSEN_FOR}
    return prepared.derive(
        BATCH_LAYER, lambda layer: replace(layer, problem=one_each(layer.problem), derived=kept)
    )


def compute_batch(x: Tensor, counts: Tensor, compute: Callable[[KernelCall], None]) -> Tensor:
    """``[experts, most, hidden]``; `compute` fills the first ``counts[e]`` rows of expert e.

    Args:
        x: ``[experts, most, hidden]``, contiguous and aligned to 16 bytes.
        counts: ``[experts]`` integers, at most `most` each.
    """
    experts, most, hidden = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        ids, weights, order = order_of_counts(counts, most)
        compute(
            KernelCall(x.view(experts * most, hidden), ids, weights, y.view(experts * most, hidden), order)
        )
    return y

"""Batches, expert-major with counts, as calls of the kernels: every row a token of one expert, or of none.

Nothing is copied: rows of a batch are tokens in an order that is known, ids and weights of a top-k of 1
are made on the device, and the second GEMM writes to the rows that it is for.
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

KEPT = "one expert a token"


def one_each(problem: MoEProblem) -> MoEProblem:
    """`problem` with one expert a token, each of those here, and no router's weight on its input."""
    routing = replace(problem.routing, weight_on_input=False)
    return replace(problem, experts=problem.local_experts, top_k=1, routing=routing)


def layer_one_each(prepared: PreparedMoE) -> PreparedMoE:
    """The layer with the problem of `one_each`; created once and kept with it. Weights are shared."""
    layer: PreparedMoE | None = prepared.derived.get(KEPT)
    if layer is None:
        layer = replace(prepared, problem=one_each(prepared.problem), derived={})
        prepared.derived[KEPT] = layer
    return layer


def compute_batch(x: Tensor, counts: Tensor, compute: Callable[[KernelCall], None]) -> Tensor:
    """``[experts, most, hidden]``, of which `compute` fills the first ``counts[e]`` rows of expert e.

    Args:
        x: ``[experts, most, hidden]``, from an address that 16 bytes divide.
        counts: ``[experts]`` integers; no expert has more than `most`.
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

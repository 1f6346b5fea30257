"""Most bytes that a call of moectl's own kernels takes beside its arguments and its result."""

from __future__ import annotations

from ...problem.moe_problem import MoEProblem
from ..prepared_layer import PreparedMoE
from ..runner import ActivationFormat
from .kernel_family import layer_of
from .launches import Launch, token_tiles
from .sort_and_combine import BLOCK

SMALLEST = 8 << 10
"""Bytes that small tensors may take."""

PARTS_IN_FP32 = frozenset({"decode", "stream"})
"""Families whose second GEMM leaves a part of each split, in fp32; others one, in the model's dtype."""

ORDERING = frozenset({"warpwise"})
"""Families that with a plan copy the tokens into an order of their own."""

RECORD = 8
"""32-bit words of a record of tokens of one expert, beside the tokens themselves."""


def workspace(prepared: PreparedMoE, tokens: int, form: ActivationFormat, launch: Launch) -> int:
    """Bytes of a call of `tokens` under `launch`: products of both GEMMs, and lists of assignments.

    Tokens that are not contiguous are copied besides, which is not counted.
    """
    layer = layer_of(prepared)
    rows = tokens * prepared.problem.local_experts if form is ActivationFormat.BATCHED else tokens
    orders = launch.family in ORDERING and launch.tile.planned
    ordered = 2 * rows * layer.w13.k if orders else 0
    return ordered + products_and_lists(prepared.problem, tokens, form, launch, layer.w2.k)


def products_and_lists(
    problem: MoEProblem, tokens: int, form: ActivationFormat, launch: Launch, intermediate: int
) -> int:
    """Bytes of what the GEMMs of `launch` leave, `intermediate` columns of the first, and of lists."""
    experts, batched = problem.local_experts, form is ActivationFormat.BATCHED
    assignments = tokens * (experts if batched else problem.top_k)
    split = getattr(launch.tile, "split", 1)
    # Of a batch there is one part a row, and where it is in the model's dtype it is the result.
    part = 4 * split if launch.family in PARTS_IN_FP32 else 0 if batched else 2
    products = assignments * (2 * intermediate + part * problem.dims.hidden)
    block = getattr(launch.tile, "tokens", 16)
    records = 4 * (RECORD + block) * token_tiles(assignments, experts, block)
    sorting = (12 if batched else 4) * assignments + 4 * experts * (assignments // BLOCK + 4)
    return products + records + sorting + SMALLEST

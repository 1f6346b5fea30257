"""Upper bound on the bytes that a call of moectl's own kernels allocates, besides arguments and result."""

from __future__ import annotations

from ...capabilities.own_kernels import in_rows, token_format
from ...problem.moe_problem import MoEProblem
from ..choice.launch import Launch, token_tiles
from ..prepared_layer import PreparedMoE
from ..runner import ActivationFormat
from .kernel_family import layer_of
from .row_matrix import BLOCK as TOKEN_BLOCK
from .sort_and_combine import BLOCK

SMALLEST = 8 << 10
"""Allowance in bytes for small tensors."""

PARTS_IN_FP32 = frozenset({"decode", "stream"})
"""Families whose second GEMM always writes an fp32 part per K split; others write one in the model's dtype,
unless they split."""

REORDERING = frozenset({"warpwise"})
"""Families that, with a plan, copy the tokens in another order of columns."""

BY_ROWS = frozenset({"decode", "stream", "warpwise"})
"""Families with programs for all rows of a batch, most of which have nothing to do where few are tokens."""

SMALLEST_BLOCK = 8
"""Tokens of the smallest tiles of the other families, which run batches of which few rows are tokens."""

RECORD_WORDS = 8
"""Header of an expert's record in 32-bit words; one word per token follows."""


def workspace(prepared: PreparedMoE, tokens: int, form: ActivationFormat, launch: Launch) -> int:
    """Bytes of a call of `tokens` with `launch`: outputs of both GEMMs, and lists of assignments.

    The contiguous copy of tokens that are not contiguous is not included.
    """
    layer = layer_of(prepared)
    rows = tokens * prepared.problem.local_experts if form is ActivationFormat.BATCHED else tokens
    quantized = quantized_tokens(prepared.problem, tokens, form)
    reorders = launch.family in REORDERING and launch.tile.planned
    reordered = 2 * rows * layer.w13.k if reorders else 0
    return quantized + reordered + products_and_lists(prepared.problem, tokens, form, launch, layer.w2.k)


def quantized_tokens(problem: MoEProblem, tokens: int, form: ActivationFormat) -> int:
    """Bytes of codes and scales of what enters both GEMMs; 0 where kernels take 16-bit tokens."""
    if not in_rows(problem) or token_format(problem) is None:
        return 0
    batched = form is ActivationFormat.BATCHED
    rows = tokens * problem.local_experts if batched else tokens
    assignments = rows if batched else tokens * problem.top_k
    sizes = ((rows, problem.dims.hidden), (assignments, problem.dims.intermediate))
    return sum(n * (columns + 4 * -(-columns // TOKEN_BLOCK)) for n, columns in sizes)


def products_and_lists(
    problem: MoEProblem, tokens: int, form: ActivationFormat, launch: Launch, intermediate: int
) -> int:
    """Bytes of the outputs of both GEMMs, the first with `intermediate` columns, and of the lists.

    With batched activations these are enough for the launches that are taken where fewer rows are expected to
    be tokens, too.
    """
    experts, batched = problem.local_experts, form is ActivationFormat.BATCHED
    assignments = tokens * (experts if batched else problem.top_k)
    split = getattr(launch.tile, "split", 1)
    # With batched activations, a part in the model's dtype is a row of the result.
    in_fp32 = split > 1 or launch.family in PARTS_IN_FP32
    part_bytes = 4 * split if in_fp32 else 0 if batched else 2
    # Activations in 16 bits, unless the first GEMM stores codes.
    activations = 0 if getattr(launch.tile, "quantizes", False) and not batched else 2 * intermediate
    products = assignments * (activations + part_bytes * problem.dims.hidden)
    blocks = {getattr(launch.tile, "tokens", 16), *([SMALLEST_BLOCK] if batched else [])}
    records = max(4 * (RECORD_WORDS + block) * token_tiles(assignments, experts, block) for block in blocks)
    sorting = (12 if batched else 4) * assignments + 4 * experts * (assignments // BLOCK + 4)
    return products + records + sorting + SMALLEST

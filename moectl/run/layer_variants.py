"""Variants of a layer: in another dtype, a rank's shard, and with values other than zero in its padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..convert.canonical import padded, scale_dtype
from ..convert.rank_slice import RankSlice, shard_of
from ..convert.recipe.chain import Chain
from ..dtypes import MODEL_DTYPES
from ..errors import UsageError
from ..files.tensor_table import TensorType
from ..kernels.prepared_layer import DenseExpert, PreparedMoE
from ..kernels.registry import runner_for
from ..layer.experts import ExpertLayer, Ids, decode
from ..layer.rank_share import canonical_layer, rank_share, subset
from ..problem.moe_problem import Dims, MoEProblem
from ..problem.padding import pad
from ..torch_dtypes import TORCH_DTYPES

FILL = 0x7A
"""Byte that padding is filled with; as a code, a scale or a number it is finite and not zero."""


def experts_on(layer: ExpertLayer, device: torch.device) -> Callable[[int], DenseExpert]:
    """A function from an expert's number to its weights, decoded on `device`, as the reference takes them."""

    def expert(number: int) -> DenseExpert:
        return decode(layer.canonical([number], device), layer.problem)[0]

    return expert


def in_dtype(layer: ExpertLayer, dtype: str) -> ExpertLayer:
    """`layer` with activations of `dtype`, ``bf16`` or ``fp16``.

    Biases and 16-bit weights are rounded to it; quantized weights and their scales are unchanged. Reading
    values that `dtype` cannot hold raises UsageError.
    """
    old = layer.problem
    if dtype == old.dtype:
        return layer

    def changes(role: str) -> bool:
        return role.endswith("_bias") or (old.scheme.weight.bits == 16 and role in ("w13", "w2"))

    def canonical(ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        batch = layer.canonical(ids, device)
        return {role: _rounded(t, role, layer, dtype) if changes(role) else t for role, t in batch.items()}

    shapes = {
        role: TensorType(MODEL_DTYPES[dtype] if changes(role) else stored_dtype, shape)
        for role, (stored_dtype, shape) in layer.recipe.shapes.items()
    }
    part, new = layer.rank_slice, problem_in_dtype(old, dtype)
    rank_slice = part and replace(part, whole=problem_in_dtype(part.whole, dtype))
    return canonical_layer(replace(layer, problem=new, rank_slice=rank_slice), shapes, canonical)


def problem_in_dtype(problem: MoEProblem, dtype: str) -> MoEProblem:
    """`problem` with activations of `dtype`, ``bf16`` or ``fp16``; the scales keep their dtype."""
    scheme = problem.scheme
    if dtype != problem.dtype and scheme.weight.bits < 16 and _implied_scale_dtype(problem):
        scheme = replace(scheme, weight=replace(scheme.weight, scale_dtype=scale_dtype(problem)))
    return replace(problem, dtype=dtype, scheme=scheme)


def _implied_scale_dtype(problem: MoEProblem) -> bool:
    """True if the scales have the model's dtype by default."""
    weight = problem.scheme.weight
    return weight.block != (0, 0) and not weight.scale_dtype and scale_dtype(problem) != "U8"


def _rounded(t: Tensor, role: str, layer: ExpertLayer, dtype: str) -> Tensor:
    rounded = t.to(TORCH_DTYPES[MODEL_DTYPES[dtype]])
    if not bool(torch.isfinite(rounded).all()):
        raise UsageError(
            f"{role} of layer {layer.layer} has values up to {float(t.abs().max()):.3g}, which {dtype} "
            "cannot hold",
            hint=f"run it in {layer.problem.dtype}",
        )
    return rounded


def expert_shard(layer: ExpertLayer, ranks: int, rank: int) -> ExpertLayer:
    """The experts of the unsharded `layer` on expert-parallel rank `rank` of `ranks`, numbered from 0.

    Raises UsageError if there are more ranks than experts.
    """
    return rank_share(layer, shard_of(rank, tp_size=1, ep_size=ranks))


def every_second(layer: ExpertLayer) -> tuple[ExpertLayer, Tensor]:
    """Experts 1, 3, 5 and so on of the unsharded `layer`, and the map to them.

    The map is ``[experts]`` int32 from the layer's ids to those of the subset, in reverse order, with -1 for
    experts that are not in it. Raises UsageError for a single expert.
    """
    count = layer.problem.experts
    numbers = range(1, count, 2)[::-1]
    table = torch.full((count,), -1, dtype=torch.int32)
    table[list(numbers)] = torch.arange(len(numbers), dtype=torch.int32)
    # The last of two ranks has as many experts; the map selects which ones they are.
    rank_slice = RankSlice(layer.problem, shard_of(1, tp_size=1, ep_size=2))
    return subset(layer, rank_slice, numbers), table


def poisoned_padding(layer: ExpertLayer, backend: str, device: torch.device) -> PreparedMoE | None:
    """`layer` prepared for `backend` with `FILL` in its padding; None if it has no padding.

    Raises what `ExpertLayer.prepared` raises.
    """
    runner, old = runner_for(backend), layer.problem
    layout = runner.layout_of(old)
    padded_problem = None if layout is None else pad(layout, old)
    if padded_problem is None or (
        padded_problem.dims.padded_hidden,
        padded_problem.dims.padded_intermediate,
    ) == (
        old.dims.hidden,
        old.dims.intermediate,
    ):
        return None
    chains = {role: Chain(padded(padded_problem, role, FILL)) for role in layer.recipe.shapes}
    sizes = Dims(padded_problem.dims.padded_hidden, padded_problem.dims.padded_intermediate)

    def canonical(ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        return {role: chains[role].apply(t) for role, t in layer.canonical(ids, device).items()}

    shapes = {
        role: chains[role].stored_type(*tensor_type) for role, tensor_type in layer.recipe.shapes.items()
    }
    # A rank's experts as a whole layer: layouts do not depend on how experts are sharded.
    whole = replace(old, dims=sizes, experts=old.local_experts)
    larger = canonical_layer(replace(layer, problem=whole, rank_slice=None), shapes, canonical)
    prepared = larger.prepared(backend, device)
    poisoned = replace(prepared, problem=old, first_expert=layer.first_expert, derived={})
    runner.ready(poisoned)
    return poisoned

"""One rank's share of a layer: some of the experts, or slices of each, as a layer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..convert.rank_slice import RankShard, RankSlice
from ..convert.recipe.recipe import Recipe, StoredOutput
from ..convert.steps.value_steps import Shapes
from ..kernels.prepared_layer import CANONICAL
from .experts import ExpertLayer, Ids, LoadExperts


def rank_share(layer: ExpertLayer, shard: RankShard) -> ExpertLayer:
    """What the rank `shard` holds of the unsharded `layer`: some experts, or slices of each.

    Raises UsageError if the layer cannot be sharded so.
    """
    if shard.ranks == 1:
        return layer
    rank_slice = RankSlice(layer.problem, shard)
    first, last = rank_slice.experts
    if not rank_slice.sliced:
        return subset(layer, rank_slice, range(first, last))

    def canonical(ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        return dict(rank_slice.slice(layer.canonical([first + int(i) for i in ids], device)))

    whole = {role: form.with_first_axis(last - first) for role, form in layer.recipe.shapes.items()}
    share = replace(layer, problem=rank_slice.problem, rank_slice=rank_slice, whole=layer)
    return canonical_layer(share, rank_slice.shapes(whole), canonical)


def subset(layer: ExpertLayer, rank_slice: RankSlice, numbers: Sequence[int]) -> ExpertLayer:
    """The experts `numbers` of `layer`, described by `rank_slice`."""

    def canonical(ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        return dict(layer.canonical([numbers[int(i)] for i in ids], device))

    count = rank_slice.problem.local_experts
    shapes = {role: tensor_type.with_first_axis(count) for role, tensor_type in layer.recipe.shapes.items()}
    subset = replace(layer, problem=rank_slice.problem, rank_slice=rank_slice, whole=layer)
    return canonical_layer(subset, shapes, canonical)


def canonical_layer(layer: ExpertLayer, shapes: Shapes, canonical: LoadExperts) -> ExpertLayer:
    """`layer` stored as canonical tensors of `shapes`, which `canonical` returns."""

    def stored(device: torch.device) -> Mapping[str, Tensor]:
        return canonical(range(layer.problem.local_experts), device)

    recipe = Recipe(shapes, {role: StoredOutput(role) for role in shapes})
    return replace(layer, layout=CANONICAL, recipe=recipe, canonical=canonical, stored=stored)

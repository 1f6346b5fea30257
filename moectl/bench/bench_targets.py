"""The layers of a bench: groups of a checkpoint, layers of a converted directory, or named layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint.source.named_layers import named_layer
from ..convert.rank_slice import RankShard, RankSlice
from ..convert.recipe.recipe import Recipe, StoredOutput
from ..errors import UsageError
from ..kernels.prepared_layer import CANONICAL
from ..layer.experts import ExpertLayer, Ids
from ..layer.layer_source import LayerSource
from ..layer.random_layer import RandomLayer
from ..problem.layer_ranges import ranges
from ..problem.moe_problem import MoEProblem
from .settings import BenchSettings

RANDOM = "-"
"""In place of the layer numbers, for layers with random weights."""


@dataclass(frozen=True)
class BenchTarget:
    """A layer to time, on behalf of a group of identical layers of the model.

    Attributes:
        model, layers, parallel: as in `BenchRow`.
        experts: the layer, or the first rank's shard of it.
    """

    model: str
    layers: str
    parallel: str
    experts: ExpertLayer

    @property
    def problem(self) -> MoEProblem:
        """The layer's problem, or that of its shard."""
        return self.experts.problem

    @property
    def nbytes(self) -> int:
        """Size of the weights and scales in bytes."""
        return self.problem.expert_bytes() * self.problem.local_experts


def targets_of(
    settings: BenchSettings, source: LayerSource | None, device: torch.device
) -> tuple[BenchTarget, ...]:
    """The layers of `settings`; `source` is its opened checkpoint, or None for named layers.

    Raises UsageError for unknown names, layers without experts and impossible shardings, and what
    `LayerSource.layer` raises.
    """
    if source is None:
        return tuple(_random_targets(settings, device))
    shard = RankShard(tp_size=settings.tp, ep_size=settings.ep)
    return tuple(_first_rank(target, shard) for target in _stored_targets(settings, source))


DISPATCHED = "dispatched"
"""What `BenchTarget.parallel` says of `BenchSettings.dispatched`."""


def named_shares(settings: BenchSettings) -> Iterator[tuple[str, str, RankSlice]]:
    """The named layers of `settings`: model and sharding as in `BenchRow`, and the first rank's share.

    Raises UsageError for unknown names and impossible shardings.
    """
    shard = RankShard(tp_size=settings.tp, ep_size=settings.ep)
    for name, problem in map(named_layer, settings.models):
        share = RankSlice(problem, shard)
        if not settings.dispatched:
            yield name, shard_label(shard), share
            continue
        # The rank's experts are all that such a token can have, and it has one of them.
        dims, experts = share.problem.dims, share.problem.local_experts
        whole = replace(problem, dims=dims, experts=experts, local_experts=experts, top_k=1)
        yield name, f"{shard_label(shard)} {DISPATCHED}", RankSlice(whole)


def _random_targets(settings: BenchSettings, device: torch.device) -> Iterator[BenchTarget]:
    """The first rank's share of each named layer; only its weights are drawn."""
    for name, parallel, share in named_shares(settings):
        layer = RandomLayer(share.problem, device).experts
        cut = share.shard.ranks > 1
        yield BenchTarget(name, RANDOM, parallel, replace(layer, rank_slice=share) if cut else layer)


def _stored_targets(settings: BenchSettings, source: LayerSource) -> Iterator[BenchTarget]:
    model = (
        Path(settings.checkpoint).resolve().name
        if Path(settings.checkpoint).exists()
        else settings.checkpoint
    )
    for layers in source.groups:
        if settings.layer is None or settings.layer in layers:
            number = min(layers) if settings.layer is None else settings.layer
            yield BenchTarget(model, ranges(layers), shard_label(source.shard), source.layer(number))


def shard_label(shard: RankShard) -> str:
    """The sharding of a layer as text: ``1``, ``tp2``, ``ep8``, ``tp2 ep4``."""
    sizes = {"tp": shard.tp_size, "ep": shard.ep_size}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1"


def _first_rank(target: BenchTarget, shard: RankShard) -> BenchTarget:
    if shard.ranks == 1:
        return target
    if target.parallel != "1":
        raise UsageError(
            f"the directory holds one rank's shard ({target.parallel}), which cannot be sharded again",
            hint="leave --tp and --ep out, or give the checkpoint that it was converted from",
        )
    return replace(target, parallel=shard_label(shard), experts=sharded(target.experts, shard))


def sharded(layer: ExpertLayer, shard: RankShard) -> ExpertLayer:
    """The part of an unsharded `layer` that `shard` holds; UsageError if it cannot be sharded that way."""
    rank_slice = RankSlice(layer.problem, shard)
    first, last = rank_slice.experts
    shapes = {
        role: tensor_type.with_first_axis(last - first)
        for role, tensor_type in rank_slice.shapes(layer.recipe.shapes).items()
    }

    def canonical(ids: Ids, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        return dict(rank_slice.slice(layer.canonical([first + int(i) for i in ids], device)))

    def stored(device: torch.device) -> dict[str, torch.Tensor]:
        return canonical(range(last - first), device)

    recipe = Recipe(shapes, {role: StoredOutput(role) for role in shapes})
    return replace(
        layer,
        problem=rank_slice.problem,
        layout=CANONICAL,
        recipe=recipe,
        canonical=canonical,
        stored=stored,
        rank_slice=rank_slice,
        whole=layer,
    )

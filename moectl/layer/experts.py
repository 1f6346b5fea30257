"""One layer's experts, wherever they are stored, and the way into a backend's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..convert.canonical import CONCATENATED, INTERLEAVED, canonical_shapes, halves, row_order
from ..convert.codecs import decode_role
from ..convert.layouts.registry import layout_named
from ..convert.rank_slice import RankShare
from ..convert.recipe.recipe import Recipe, StoredOutput
from ..convert.steps.value_steps import Shapes, Statistics
from ..convert.stream.source_reader import spans
from ..errors import Unavailable, UsageError
from ..kernels.prepared_layer import CANONICAL, DenseExpert, DenseExperts, PreparedMoE, Router, local_ids
from ..kernels.registry import runner_for
from ..problem.moe_problem import MoEProblem
from ..torch_dtypes import TORCH_DTYPES

BATCH_BYTES = 256 << 20
"""Canonical bytes that are moved through a chain at a time."""

Ids = Sequence[int] | Tensor


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts where they are now, whatever they are stored as.

    Attributes:
        problem: with logical sizes.
        layer: its number in the model.
        layout: name of the stored layout; `CANONICAL` for a checkpoint.
        recipe: how it is stored; of a checkpoint, every canonical role as it is.
        canonical: canonical roles of a batch of experts, on the CPU or where the layer lies.
        stored: all experts' stored tensors, on a device.
        router: the layer's router; None when it is not stored beside the experts.
        share: what a rank has of the layer, where that is not all; its experts are counted from its first.
    """

    problem: MoEProblem
    layer: int
    layout: str
    recipe: Recipe
    canonical: Callable[[Ids], Mapping[str, Tensor]]
    stored: Callable[[torch.device], Mapping[str, Tensor]]
    router: Router | None
    share: RankShare | None = None

    @property
    def partial(self) -> str:
        """What is computed on a rank that has a share of the layer, in a sentence; empty for all of it."""
        return self.share.partial if self.share else ""

    @property
    def first_expert(self) -> int:
        """The expert of the layer that is expert 0 here, on a rank that has some of them."""
        return self.share.experts[0] if self.share else 0

    def local_ids(self, ids: Tensor) -> Tensor:
        """Ids of the layer's experts counted from the first here, -1 for others."""
        return local_ids(ids, self.first_expert, self.problem.local_experts)

    def reference(self, expert: int) -> DenseExpert:
        """Expert `expert` decoded from what is stored, without any backend's layout in between."""
        return decode(self.canonical([expert]), self.problem)[0]

    def prepared(self, backend: str, device: torch.device | str) -> PreparedMoE:
        """The layer in the layout that `backend` reads, on `device`.

        A layer that is stored so already is loaded as it is; otherwise it goes through its canonical
        form, expert batch by expert batch, and `PreparedMoE.relaid` says so.

        Raises:
            NoBackend: the layout cannot hold the problem.
            UsageError: no runner is called `backend`.
            Unavailable: the device has too little memory.
        """
        device = torch.device(device)
        own = runner_for(backend).layout_of(self.problem)
        wanted = own or self.layout
        try:
            recipe = self.recipe
            if own is not None:
                share = self.share or RankShare(self.problem)
                recipe = layout_recipe(wanted, share, self.recipe.shapes)
            # A folder of an older version has the same name and other steps: those are the way back.
            if wanted == self.layout and recipe == self.recipe:
                weights, relaid = self.stored(device), ""
            else:
                weights = self.laid_out(recipe, device)
                older = " of another version" if wanted == self.layout else ""
                relaid = "" if self.layout == CANONICAL else f"{self.layout}{older} -> {wanted}"
        except torch.OutOfMemoryError as error:
            raise Unavailable(
                f"layer {self.layer} does not fit the memory of {device}", hint="free memory, or use the CPU"
            ) from error
        dense = self._dense(weights, recipe)
        prepared = PreparedMoE(self.problem, backend, wanted, weights, dense, relaid, self.first_expert)
        runner = runner_for(backend)
        if not runner.refusal(self.problem, device):
            runner.ready(prepared)
        return prepared

    def laid_out(self, recipe: Recipe, device: torch.device) -> dict[str, Tensor]:
        """All experts' stored tensors as `recipe` makes them, expert batch by expert batch, on `device`."""
        stored = {name: recipe.stored[name] for name in recipe.outputs}
        out = {
            name: torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device=device)
            for name, (dtype, shape) in stored.items()
        }
        statistics: Statistics = {}
        experts = self.problem.local_experts
        batches = spans(experts, max(1, BATCH_BYTES // max(1, self.problem.expert_bytes())))
        for first, last in batches if recipe.statistics else ():
            statistics = recipe.update_statistics(self.canonical(range(first, last)), statistics)
        for first, last in batches:
            batch = {role: t.to(device) for role, t in self.canonical(range(first, last)).items()}
            for name, output in recipe.outputs.items():
                if not output.per_layer:
                    output.apply(batch, statistics, out[name][first:last])
                elif first == 0:
                    output.apply(batch, statistics, out[name])
        return out

    def _dense(self, weights: Mapping[str, Tensor], recipe: Recipe) -> Callable[[Ids], DenseExperts]:
        """Decoded experts: from `weights` themselves where nothing was lost on the way to them."""

        def dense(ids: Ids) -> DenseExperts:
            device = weights["w13"].device
            if recipe.kept:
                return decode({role: t.to(device) for role, t in self.canonical(ids).items()}, self.problem)
            index = torch.as_tensor(ids, dtype=torch.long, device=device)
            chosen = {
                name: weights[name].index_select(0, index)
                for name, output in recipe.outputs.items()
                if not output.per_layer
            }
            return decode(recipe.restore(chosen, len(index)), self.problem)

        return dense


def unfilled(problem: MoEProblem, backend: str, device: torch.device | str = "meta") -> PreparedMoE:
    """A layer of `problem` as `backend` stores it, with tensors whose values nobody has set.

    On the device ``meta`` they are shapes without memory: enough to compile kernels for. It decodes nothing.
    Raises NoBackend when the layout cannot hold the problem, UsageError when no runner is called `backend`
    or the one that is has no layout of its own.
    """
    name = runner_for(backend).layout_of(problem)
    if name is None:
        raise UsageError(f"the {backend} backend has no layout of its own")
    stored = layout_recipe(name, RankShare(problem), canonical_shapes(problem, problem.local_experts)).stored
    weights = {
        role: torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device=device)
        for role, (dtype, shape) in stored.items()
    }

    def dense(ids: Ids) -> DenseExperts:
        raise UsageError("this layer has no weights to decode")

    return PreparedMoE(problem, backend, name, weights, dense)


def decode(roles: Mapping[str, Tensor], problem: MoEProblem) -> DenseExperts:
    """Canonical roles of a batch of experts as fp32 matrices.

    What counts for several rows (scales of blocks, factors on scales) is of gate and of up by themselves, in
    whatever order rows lie.
    """
    weight = problem.scheme.weight

    def matrix(role: str) -> Tensor:
        stacked, by_row = halves(problem, role), weight.block[0] in (0, 1) and f"{role}_global" not in roles
        if by_row or stacked == 1 or problem.rows == CONCATENATED:
            return decode_role(weight, roles, role, stacked)
        gates_first = {
            name: _swapped(t, t.shape[1] // 2, 2) if row_order(problem, name) == INTERLEAVED else t
            for name, t in roles.items()
            if name.partition("_")[0] == role
        }
        decoded = decode_role(weight, gates_first, role, stacked)
        return _swapped(decoded, 2, decoded.shape[1] // 2)

    def bias(role: str) -> Tensor | None:
        return roles[role].float() if role in roles else None

    return DenseExperts(matrix("w13"), matrix("w2"), bias("w13_bias"), bias("w2_bias"))


def _swapped(t: Tensor, outer: int, inner: int) -> Tensor:
    """`t` ``[e, outer * inner, ...]`` with the two parts of its rows the other way round."""
    return t.reshape(len(t), outer, inner, *t.shape[2:]).transpose(1, 2).reshape(t.shape)


def layout_recipe(layout: str, share: RankShare, shapes: Shapes) -> Recipe:
    """The `Recipe` of `layout` for a share with the canonical roles of `shapes`; NoBackend if it has none.

    `CANONICAL` is a layout too: every role as it is.
    """
    if layout == CANONICAL:
        return Recipe(shapes, {role: StoredOutput(role) for role in shapes})
    found = layout_named(layout)
    return found.recipe(share.padded(found.pad), shapes)

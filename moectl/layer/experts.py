"""One layer's experts from any source, and their repacking into a backend's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..convert.canonical import CONCATENATED, INTERLEAVED, canonical_shapes, halves, row_order
from ..convert.codecs import decode_role
from ..convert.layouts.registry import layout_named
from ..convert.rank_slice import RankSlice
from ..convert.recipe.recipe import Recipe, StoredOutput
from ..convert.sources import TensorMapping
from ..convert.steps.value_steps import ExpertStatistic, Shapes, update_statistics
from ..convert.stream.pipeline import run_ahead
from ..convert.stream.source_reader import spans
from ..errors import Unavailable, UsageError
from ..files.tensor_table import TensorType
from ..kernels.prepared_layer import CANONICAL, DenseExpert, DenseExperts, PreparedMoE, Router, local_ids
from ..kernels.registry import runner_for
from ..problem.moe_problem import MoEProblem
from ..torch_dtypes import TORCH_DTYPES

CPU = torch.device("cpu")

BATCH_BYTES: Mapping[str, int] = {"cpu": 256 << 20, "cuda": 32 << 20}
"""Canonical bytes of a batch of experts that is repacked at once, by type of device.

On a GPU `AHEAD` batches are loaded while another is repacked. Bytes as stored take up to as much again, and
so do intermediate results: 256 MiB beside the weights in all. Experts larger than a batch are loaded one by
one.
"""

AHEAD = 2
"""Batches that are loaded onto a GPU at once: threads read one while the other is checked."""

Ids = Sequence[int] | Tensor


class LoadExperts(Protocol):
    """Loads the canonical roles ``[len(ids), ...]`` of experts."""

    def __call__(self, ids: Ids, device: torch.device | None = None) -> Mapping[str, Tensor]:
        """The experts `ids` on `device`; by default on the CPU, or where the layer's own storage is."""


class LayerForm(NamedTuple):
    """What a layer's stored tensors are, apart from their values.

    Attributes:
        layout: its name; `CANONICAL` for a checkpoint.
        tensors: dtype and shape by role.
    """

    layout: str
    tensors: Mapping[str, TensorType]

    def misfit(self, layout: str, weights: Mapping[str, Tensor]) -> str:
        """Why its values cannot be copied into `weights`, which are in `layout`; empty if they can.

        Dtypes of 16-bit numbers may differ: copies convert them.

        Example:
            >>> form = LayerForm("marlin-mxfp4", {"w2_bias": TensorType("BF16", (8, 256))})
            >>> form.misfit("marlin-mxfp4", {"w2_bias": torch.zeros(8, 256, dtype=torch.float16)})
            ''
            >>> form.misfit("humming-mxfp4", {})
            'in the layout marlin-mxfp4, expected the layout humming-mxfp4'
            >>> form.misfit("marlin-mxfp4", {"w2_bias": torch.zeros(8, 128)})
            'with w2_bias of bfloat16 [8, 256], expected float32 [8, 128]'
        """
        if layout != self.layout:
            return f"in {_named(self.layout)}, expected {_named(layout)}"
        if self.tensors.keys() != weights.keys():
            return f"with {', '.join(sorted(self.tensors))}, expected {', '.join(sorted(weights))}"
        for role, (name, shape) in self.tensors.items():
            dtype, t = TORCH_DTYPES[name], weights[role]
            if tuple(shape) != t.shape or (dtype != t.dtype and not {dtype, t.dtype} <= SIXTEEN):
                return f"with {role} of {_spelt(dtype, shape)}, expected {_spelt(t.dtype, t.shape)}"
        return ""


SIXTEEN = frozenset((torch.bfloat16, torch.float16))
"""Dtypes that a model's own numbers may have."""


def _spelt(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _named(layout: str) -> str:
    return "a published checkpoint's own storage" if layout == CANONICAL else f"the layout {layout}"


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts in whatever format they are stored.

    Attributes:
        problem: with logical sizes.
        layer: its number in the model.
        layout: name of the stored layout; `CANONICAL` for a checkpoint.
        recipe: how stored tensors follow from canonical roles; for a checkpoint, the identity.
        canonical: loads the canonical roles of a batch of experts; several threads may call it at once.
        stored: loads all experts' stored tensors to a device.
        router: the layer's router; None if it is not stored with the experts.
        rank_slice: the rank's slice of the layer, if it does not hold all of it; expert numbers are then
            relative to the rank's first expert.
        whole: the layer with all experts, of which this one is a part; None if it is not at hand.
        parts: how whole experts' canonical roles follow from a checkpoint's tensors, by their names, in which
            ``{expert}`` stands for an expert; empty if there is no checkpoint.
    """

    problem: MoEProblem
    layer: int
    layout: str
    recipe: Recipe
    canonical: LoadExperts
    stored: Callable[[torch.device], Mapping[str, Tensor]]
    router: Router | None
    rank_slice: RankSlice | None = None
    whole: ExpertLayer | None = None
    parts: Mapping[str, TensorMapping] = field(default_factory=dict)

    @property
    def partial(self) -> str:
        """A sentence on the output being a partial sum, for a slice of the layer; empty for all of it."""
        return self.rank_slice.partial if self.rank_slice else ""

    @property
    def first_expert(self) -> int:
        """The number in the whole layer of the rank's first expert."""
        return self.rank_slice.experts[0] if self.rank_slice else 0

    @property
    def whole_experts(self) -> int:
        """The number of experts of the whole layer."""
        return self.problem.experts if self.rank_slice else self.problem.local_experts

    @cached_property
    def whole_types(self) -> Mapping[str, TensorType]:
        """Dtypes and shapes of the canonical roles of all the layer's experts, none of them sliced."""
        shares = self.rank_slice or RankSlice(self.problem)
        return {
            role: TensorType(dtype, (self.whole_experts, *shares.whole_shape(role, shape)[1:]))
            for role, (dtype, shape) in self.recipe.shapes.items()
        }

    def local_ids(self, ids: Tensor) -> Tensor:
        """Ids of the whole layer relative to the rank's first expert, -1 for other ranks' experts."""
        return local_ids(ids, self.first_expert, self.problem.local_experts)

    def reference(self, expert: int) -> DenseExpert:
        """Expert `expert` decoded from the stored tensors, without going through a backend's layout."""
        return decode(self.canonical([expert]), self.problem)[0]

    def prepared(self, backend: str, device: torch.device | str) -> PreparedMoE:
        """The layer in the layout that `backend` reads, on `device`.

        A layer stored in that layout is loaded directly. Otherwise it is repacked through its canonical form,
        batch by batch, which is reported in `PreparedMoE.relaid`. On a GPU either takes the memory of the
        weights and 256 MiB (or that of some experts, if it is more), and what the runner derives from them.

        Raises:
            NoBackend: the layout cannot hold the problem.
            UsageError: no runner is called `backend`.
            Unavailable: the device has too little memory.
        """
        device = torch.device(device)
        layout, recipe = self._read_by(backend)
        try:
            if (layout, recipe) == (self.layout, self.recipe):
                weights, relaid = self.stored(device), ""
            else:
                weights = self.repack(recipe, device)
                older = " of another version" if layout == self.layout else ""
                relaid = "" if self.layout == CANONICAL else f"{self.layout}{older} -> {layout}"
        except torch.OutOfMemoryError as error:
            raise Unavailable(
                f"layer {self.layer} does not fit the memory of {device}", hint="free memory, or use the CPU"
            ) from error
        origin = LayerOrigin(self, recipe)
        dense = self._dense(weights, origin)
        prepared = PreparedMoE(
            self.problem, backend, layout, weights, dense, relaid, self.first_expert, origin=origin
        )
        runner = runner_for(backend)
        if not runner.refusal(self.problem, device):
            runner.ready(prepared)
        return prepared

    def form_for(self, backend: str) -> LayerForm:
        """What `prepared` for `backend` makes of it; reads no weights, and raises as it does."""
        return _form(*self._read_by(backend))

    @property
    def form(self) -> LayerForm:
        """What `stored` returns."""
        return _form(self.layout, self.recipe)

    def is_read_as_stored(self, backend: str) -> bool:
        """Whether `prepared` for `backend` takes the stored tensors as they are; raises as it does."""
        return self._read_by(backend) == (self.layout, self.recipe)

    def _read_by(self, backend: str) -> tuple[str, Recipe]:
        """The layout that `backend` reads, and its recipe.

        A directory written with an older version of the layout has the same name but another recipe.
        """
        layout = runner_for(backend).layout_of(self.problem)
        if layout is None:
            return self.layout, self.recipe
        return layout, layout_recipe(layout, self.rank_slice or RankSlice(self.problem), self.recipe.shapes)

    def repack(self, recipe: Recipe, device: torch.device) -> dict[str, Tensor]:
        """All experts' tensors stored by `recipe`, on `device`, read and converted there batch by batch."""
        stored = {name: recipe.stored[name] for name in recipe.outputs}
        out = {
            name: torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device=device)
            for name, (dtype, shape) in stored.items()
        }
        own, of_layer = (
            tuple(statistic for statistic in recipe.statistics if statistic.of_layer == of_layer)
            for of_layer in (False, True)
        )
        statistics = self._statistics(own, device) | (self.whole or self)._statistics(of_layer, device)
        for first, last, batch in self._batches(device):
            for name, output in recipe.outputs.items():
                if not output.per_layer:
                    output.apply(batch, statistics, out[name][first:last])
                elif first == 0:
                    output.apply(batch, statistics, out[name])
            del batch  # its memory is free for those that are being loaded
        return out

    def _batches(self, device: torch.device) -> Iterator[tuple[int, int, Mapping[str, Tensor]]]:
        """All experts in batches: the first, the last (exclusive), and their canonical roles on `device`."""
        most = BATCH_BYTES.get(device.type, BATCH_BYTES["cuda"])
        # A rank's slices are cut from whole experts after those were loaded.
        each = (self.rank_slice.whole if self.rank_slice else self.problem).expert_bytes()
        ranges = spans(self.problem.local_experts, max(1, most // max(1, each)))
        if device.type != "cuda" or each > most:
            for first, last in ranges:
                yield first, last, self.canonical(range(first, last), device)
            return
        stream, inference = torch.cuda.current_stream(device), torch.is_inference_mode_enabled()

        def load(span: tuple[int, int]) -> tuple[int, int, Mapping[str, Tensor]]:
            # All in the caller's stream: memory that one batch frees is safe for the next.
            with torch.inference_mode(inference), torch.cuda.device(stream.device), torch.cuda.stream(stream):
                return *span, self.canonical(range(*span), device)

        yield from run_ahead(load, ranges, AHEAD)

    def _statistics(
        self, needed: tuple[ExpertStatistic, ...], device: torch.device
    ) -> dict[ExpertStatistic, Tensor]:
        """The numbers `needed` over the experts of this layer; reads nothing when there are none."""
        found: dict[ExpertStatistic, Tensor] = {}
        for _, _, batch in self._batches(device) if needed else ():
            found = update_statistics(needed, batch, found)
        return found

    def _dense(self, weights: Mapping[str, Tensor], origin: LayerOrigin) -> Callable[[Ids], DenseExperts]:
        """A function that decodes experts, from `weights` where these restore them."""
        recipe = origin.recipe

        def dense(ids: Ids) -> DenseExperts:
            device = weights["w13"].device
            if recipe.kept and not origin.kept:
                return decode(self.canonical(ids, device), self.problem)
            index = torch.as_tensor(ids, dtype=torch.long, device=device)
            selected = {
                name: weights[name].index_select(0, index)
                for name, output in recipe.outputs.items()
                if not output.per_layer
            }
            kept = {role: origin.kept[role][index.cpu()].to(device) for role in recipe.kept}
            selected |= {recipe.side(role): t for role, t in kept.items()}
            return decode(recipe.restore(selected, len(index)), self.problem)

        return dense


def _form(layout: str, recipe: Recipe) -> LayerForm:
    return LayerForm(layout, {name: recipe.stored[name] for name in recipe.outputs})


@dataclass(frozen=True)
class LayerOrigin:
    """Where a prepared layer's tensors come from, as `refit` needs it.

    Attributes:
        layer: the layer that was prepared.
        recipe: how the prepared tensors follow from its canonical roles.
        kept: canonical roles of all local experts that the prepared tensors do not restore, on the CPU, once
            the layer has been refitted; empty before.
    """

    layer: ExpertLayer
    recipe: Recipe
    kept: dict[str, Tensor] = field(default_factory=dict)


def empty_layer(problem: MoEProblem, backend: str, device: torch.device | str = "meta") -> PreparedMoE:
    """A layer of `problem` in `backend`'s layout, with uninitialized tensors.

    On the device ``meta`` they take no memory, which is enough to compile kernels. It cannot be decoded.

    Raises NoBackend if the layout cannot hold the problem, UsageError if no runner is called `backend` or
    it has no layout.
    """
    name = runner_for(backend).layout_of(problem)
    if name is None:
        raise UsageError(f"the {backend} backend has no layout of its own")
    stored = layout_recipe(name, RankSlice(problem), canonical_shapes(problem, problem.local_experts)).stored
    weights = {
        role: torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device=device)
        for role, (dtype, shape) in stored.items()
    }

    def dense(ids: Ids) -> DenseExperts:
        raise UsageError("this layer has no weights to decode")

    return PreparedMoE(problem, backend, name, weights, dense)


def decode(roles: Mapping[str, Tensor], problem: MoEProblem) -> DenseExperts:
    """Decodes the canonical roles of a batch of experts to fp32 matrices.

    Values that apply to several rows (block scales, global scales) are stored separately for gate and up,
    regardless of the row order.
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

    def input_scale(role: str) -> Tensor | None:
        # The larger one where gate and up have different ones: kernels quantize tokens once for both.
        return roles[role].float().flatten(1).amax(1) if role in roles else None

    return DenseExperts(
        matrix("w13"),
        matrix("w2"),
        bias("w13_bias"),
        bias("w2_bias"),
        input_scale("w13_input"),
        input_scale("w2_input"),
    )


def _swapped(t: Tensor, outer: int, inner: int) -> Tensor:
    """`t` ``[e, outer * inner, ...]`` with its rows transposed to ``[e, inner * outer, ...]``."""
    return t.reshape(len(t), outer, inner, *t.shape[2:]).transpose(1, 2).reshape(t.shape)


def layout_recipe(layout: str, rank_slice: RankSlice, shapes: Shapes) -> Recipe:
    """The `Recipe` of `layout` for a rank's slice with canonical `shapes`; NoBackend if it cannot hold it.

    `CANONICAL` is a layout as well: every role is stored unchanged.
    """
    if layout == CANONICAL:
        return Recipe(shapes, {role: StoredOutput(role) for role in shapes})
    # Equal formats may differ in the dtype of their scales.
    scales = rank_slice.whole.scheme.weight.scale_dtype
    return _layout_recipe(layout, rank_slice, scales, tuple(shapes.items()))


@lru_cache(maxsize=64)
def _layout_recipe(
    layout: str, rank_slice: RankSlice, scales: str, shapes: tuple[tuple[str, TensorType], ...]
) -> Recipe:
    """`layout_recipe`, made once for equal layers: servers load many while threads of theirs read."""
    weight_layout = layout_named(layout)
    return weight_layout.recipe(rank_slice.padded(weight_layout.pad), dict(shapes))

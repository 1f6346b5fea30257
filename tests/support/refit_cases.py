"""Random slices written into live layers, and the layers that a cold conversion makes of the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moectl.convert.layouts.registry import LAYOUTS, WeightLayout
from moectl.convert.rank_slice import RankShard, RankSlice, shard_of
from moectl.convert.recipe.recipe import Recipe, StoredOutput
from moectl.errors import CheckpointError, MoectlError, NoBackend, UsageError
from moectl.kernels.prepared_layer import CANONICAL, PreparedMoE
from moectl.layer.experts import ExpertLayer, LayerOrigin, layout_recipe
from moectl.layer.rank_share import rank_share
from moectl.layer.refit import LayerRefit, refit
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import WeightFormat
from support.layout_cases import (
    ROWS,
    as_bytes,
    canonical_tensors,
    lacks_lowest,
    problem_for,
    without_lowest,
)

CPU = torch.device("cpu")
EXPERTS = 4
SIZES = ((288, 96), (96, 416), (128, 64), (160, 192))
SHARDS = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))
"""Ranks that slice an expert, and ranks that share the experts, as often as they are drawn."""


@dataclass
class RefitCase:
    """A live layer in one layout on one rank, and the canonical numbers that it should stand for."""

    layout: WeightLayout
    rank: RankShard
    problem: MoEProblem
    whole: dict[str, Tensor]
    other: dict[str, Tensor]
    live: PreparedMoE
    update: LayerRefit
    addresses: dict[str, int]

    def cold(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rank's stored tensors of `whole`, converted anew."""
        return stored_tensors(self.layout, self.problem, self.rank, whole)


def canonical_layer(problem: MoEProblem, whole: dict[str, Tensor]) -> ExpertLayer:
    """The layer of canonical tensors `whole` as they are now."""
    held = {role: t.clone() for role, t in whole.items()}

    def canonical(ids: object, device: torch.device | None = None) -> dict[str, Tensor]:
        index = torch.as_tensor(list(ids))  # type: ignore[call-overload]
        return {role: t[index] for role, t in held.items()}

    types = {role: (t.dtype, tuple(t.shape)) for role, t in held.items()}
    from moectl.convert.canonical import canonical_shapes

    shapes = canonical_shapes(problem, problem.experts)
    assert types.keys() == shapes.keys()
    recipe = Recipe(shapes, {role: StoredOutput(role) for role in shapes})
    return ExpertLayer(problem, 0, CANONICAL, recipe, canonical, lambda device: held, None)


def share_of(problem: MoEProblem, rank: RankShard, whole: dict[str, Tensor]) -> ExpertLayer:
    return rank_share(canonical_layer(problem, whole), rank)


def stored_tensors(
    layout: WeightLayout, problem: MoEProblem, rank: RankShard, whole: dict[str, Tensor]
) -> dict[str, Tensor]:
    share = share_of(problem, rank, whole)
    recipe = layout_recipe(layout.name, share.rank_slice or RankSlice(problem), share.recipe.shapes)
    return share.repack(recipe, torch.device("cpu"))


def live_layer(
    layout: WeightLayout,
    problem: MoEProblem,
    rank: RankShard,
    whole: dict[str, Tensor],
    device: torch.device = CPU,
    backend: str = "torch",
) -> PreparedMoE:
    """The rank's share of `whole` in `layout`, which the torch backend reads, too."""
    share = share_of(problem, rank, whole)
    recipe = layout_recipe(layout.name, share.rank_slice or RankSlice(problem), share.recipe.shapes)
    weights = share.repack(recipe, device)
    origin = LayerOrigin(share, recipe)
    dense = share._dense(weights, origin)
    return PreparedMoE(
        share.problem, backend, layout.name, weights, dense, first_expert=share.first_expert, origin=origin
    )


def make_case(draw: random.Random) -> RefitCase:
    """A random layout, format, order of rows, size and rank that go together."""
    while True:
        layout = draw.choice(LAYOUTS)
        weight = draw.choice(layout.weights)
        rows = draw.choice([r for r in ROWS if r != "single" or layout.ungated])
        case = try_case(draw, layout, weight, rows, *draw.choice(SHARDS))
        if case is not None:
            return case


def try_case(
    draw: random.Random, layout: WeightLayout, weight: WeightFormat, rows: str, tp: int, ep: int
) -> RefitCase | None:
    """None where the layout cannot hold the rank's share, or these random numbers."""
    hidden, inter = draw.choice(SIZES)
    padded = problem_for(layout, weight, rows, hidden, inter * tp, EXPERTS)
    problem = replace(padded, dims=Dims(padded.dims.hidden, padded.dims.intermediate))
    rank = shard_of(draw.randrange(tp * ep), tp, ep)
    seed = draw.randrange(1 << 20)
    whole, other = (numbers(problem, seed + i) for i in (0, 100))
    if lacks_lowest(layout):  # most updates have no lowest code either; the others are refused
        whole = without_lowest(problem, whole)
        other = without_lowest(problem, other) if seed % 4 else other
    try:
        live = live_layer(layout, problem, rank, whole)
    except (NoBackend, UsageError, CheckpointError):
        return None
    addresses = {name: t.data_ptr() for name, t in live.weights.items()}
    return RefitCase(layout, rank, problem, whole, other, live, refit(live), addresses)


def numbers(problem: MoEProblem, seed: int) -> dict[str, Tensor]:
    """Canonical tensors without NaN scales; gate and up mostly have the same scale where there is one."""
    tensors = canonical_tensors(problem, seed, alike=seed % 8 != 0)
    for role, t in tensors.items():
        if role.endswith("_scale") and t.dtype == torch.uint8:
            tensors[role] = t % (127 if problem.scheme.weight.name == "nvfp4" else 250)
        elif role.endswith(("_scale", "_global", "_input")):
            tensors[role] = t.abs() + 0.01
    return tensors


def random_slice(draw: random.Random, size: int) -> tuple[int, int]:
    """All, one, or some of `size` neighbours."""
    kind = draw.randrange(3)
    if kind == 0 or size == 1:
        return 0, size
    first = draw.randrange(size)
    return (first, first + 1) if kind == 1 else (first, draw.randrange(first, size) + 1)


def step(case: RefitCase, draw: random.Random) -> int:
    """Writes one to three random slices at once, and compares; returns their number.

    A refused update must be one that a cold conversion refuses too, and leave everything as it was.
    """
    count = draw.choice((1, 1, 1, 2, 3))
    changed = {role: t.clone() for role, t in case.whole.items()}
    before = {name: t.clone() for name, t in case.live.weights.items()}
    refused = ""
    try:
        with case.update.batch():
            for _ in range(count):
                role = draw.choice(list(changed))
                experts = random_slice(draw, EXPERTS)
                spans = [random_slice(draw, size) for size in changed[role].shape[1:]]
                index = tuple(slice(*span) for span in (experts, *spans))
                changed[role][index] = case.other[role][index]
                keywords = dict(zip(("rows", "columns"), spans, strict=False))
                case.update.update(role, case.other[role][index], experts=experts, **keywords)
    except MoectlError as error:
        refused = str(error)
    try:
        expected = case.cold(changed)
    except MoectlError:
        expected = None
    if refused:
        assert expected is None, f"{case.layout.name} {case.rank}: refused {refused}"
        expected = before
    else:
        assert expected is not None, f"{case.layout.name} {case.rank}: not refused"
        case.whole = changed
    compare(case, expected)
    return count


def compare(case: RefitCase, expected: dict[str, Tensor]) -> None:
    for name, t in case.live.weights.items():
        assert t.data_ptr() == case.addresses[name], name
        assert torch.equal(as_bytes(t), as_bytes(expected[name])), (
            f"{case.layout.name} {case.problem.scheme} {case.problem.rows} {case.rank}: {name}"
        )


def run_cases(count: int, seed: int = 0, steps: int = 8) -> Iterator[int]:
    """Runs random cases until `count` slices were written; yields the number so far."""
    draw, done = random.Random(seed), 0
    while done < count:
        case = make_case(draw)
        for _ in range(steps):
            done += step(case, draw)
            yield done

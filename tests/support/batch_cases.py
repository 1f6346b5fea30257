"""What the batched form must do, wherever it runs: in the interpreter or on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moectl.capabilities.own_kernels import in_rows
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.triton import marlin, triton_runner
from moectl.kernels.triton.expert_batches import one_each
from moectl.kernels.triton.sort_and_combine import order_of_counts
from moectl.layer.experts import ExpertLayer
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import MoEProblem
from support.random_layers import DTYPES, layer_among_others, random_layer

COUNTS = ("uneven", "full", "none", "last alone", "one each")
"""How many tokens the experts of a batch have."""


def counts_of(name: str, experts: int, most: int) -> Tensor:
    generator = torch.Generator().manual_seed(experts * most)
    counts = torch.randint(0, most + 1, (experts,), generator=generator, dtype=torch.int32)
    counts[1::3] = 0
    counts[:1] = most
    fixed = {"full": most, "none": 0, "one each": min(1, most)}
    if name in fixed:
        counts.fill_(fixed[name])
    if name == "last alone":
        counts.zero_()
        counts[-1] = most
    return counts


def batch_of(problem: MoEProblem, counts: Tensor, most: int, device: str) -> Tensor:
    """Random tokens, and NaN in rows that are none."""
    generator = torch.Generator().manual_seed(most)
    x = torch.randn(problem.local_experts, most, problem.dims.hidden, generator=generator)
    x[torch.arange(most)[None, :] >= counts[:, None]] = float("nan")
    return x.to(DTYPES[problem.dtype]).to(device)


def held(layer: object, prepared: PreparedMoE, x: Tensor, counts: Tensor, y: Tensor) -> None:
    """The rows that are tokens are what the reference gives each of them with one expert and no weight."""
    problem = one_each(layer.problem)  # type: ignore[attr-defined]
    assert y.shape == x.shape and y.dtype == x.dtype
    token = torch.arange(x.shape[1])[None, :] < counts[:, None]
    ids = torch.nonzero(token)[:, :1].int()
    rows, found = x.cpu()[token], y.cpu()[token]
    wanted = moe_reference(
        rows, ids, torch.ones(ids.shape), layer.reference, problem, dtype=torch.float64  # type: ignore[attr-defined]
    )  # fmt: skip
    if len(rows):
        accumulation = runner_for(prepared.backend).accumulation_of(prepared.problem)
        result = check(found, wanted, tolerance_for(prepared.problem, accumulation))
        assert result.ok, result


def layer_for(problem: MoEProblem, device: str) -> tuple[ExpertLayer, PreparedMoE]:
    """A random layer, and its weights for the kernels; in tiles, all padded lanes have other numbers."""
    if in_rows(problem):
        layer = RandomLayer(problem, torch.device("cpu")).experts
        return layer, layer.prepared("moectl", device)
    return layer_among_others(problem, device)


def agrees(
    problem: MoEProblem, launch: object, name: str, most: int, device: str, expected: int | None = None
) -> None:
    """`launch` is of the moectl backend's or a tile of moectl_marlin's; None for the runner's own choice, for
    about `expected` tokens of an expert."""
    if isinstance(launch, marlin.MarlinTile):
        layer = random_layer(problem)
        prepared = layer.prepared("moectl_marlin", device)
    else:
        layer, prepared = layer_for(problem, device)
    counts = counts_of(name, problem.local_experts, most)
    x, there = batch_of(problem, counts, most, device), counts.to(device)

    def run() -> Tensor:
        if isinstance(launch, marlin.MarlinTile):
            return marlin.run_batch_with(prepared, x, there, launch)
        if launch is None:
            batched = runner_for("moectl").batched
            assert batched is not None
            return batched(prepared, x, there, expected)
        return triton_runner.run_batch_with(prepared, x, there, launch)  # type: ignore[arg-type]

    y = run()
    held(layer, prepared, x, counts, y)
    if device == "cuda":
        token = torch.arange(most)[None, :] < counts[:, None]
        assert torch.equal(run().cpu()[token], y.cpu()[token]), "not repeatable"


def lists_rows(name: str, experts: int, most: int, device: str) -> None:
    """Ids, weights and order of a batch; counts out of range count as the nearest that is in it."""
    counts = counts_of(name, experts, most)
    odd = counts.clone()
    odd[counts == 0], odd[counts == most] = -3, most + 9
    for dtype in (torch.int32, torch.int64):
        ids, weights, (slots, offsets) = order_of_counts(odd.to(dtype).to(device), most)
        token = torch.arange(most)[None, :] < counts[:, None]
        expected = torch.where(token, torch.arange(experts)[:, None], -1).flatten()
        assert torch.equal(ids.cpu(), expected.int()) and bool((weights == 1).all())
        rows = torch.nonzero(token.flatten()).flatten()
        assert torch.equal(slots.cpu()[: len(rows)], rows.int())
        assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]


def writes_no_other_rows(problem: MoEProblem, launch: object) -> None:
    """Where results go straight to the output, rows that are no tokens stay as they were."""
    _, prepared = layer_among_others(problem, "cpu")
    counts = counts_of("uneven", problem.local_experts, 5)
    x = batch_of(problem, counts, 5, "cpu")
    y = triton_runner.run_batch_with(prepared, x, counts, launch)  # type: ignore[arg-type]
    token = torch.arange(5)[None, :] < counts[:, None]
    assert bool(y[~token].isnan().all()) and not bool(y[token].isnan().any())

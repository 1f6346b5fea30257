"""Sorting by expert and summing on a GPU, at the sizes that layers have."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.triton.sort_and_combine import combine, sort_by_expert
from support import kernel_cases, routing_cases

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cases.poison_new_memory(monkeypatch)


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize(
    ("assignments", "experts"), [(5, 128), (256, 384), (512, 32), (8192, 384), (65536, 384), (100_003, 1024)]
)
def test_sorts(name: str, assignments: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for way in routing_cases.WAYS if assignments <= 8192 else ("many",):
        routing_cases.sorts(way, name, assignments, experts, "cuda", monkeypatch)


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize("way", [*routing_cases.WAYS, "given"])
@pytest.mark.parametrize(
    ("assignments", "experts", "tokens"),
    [
        (16, 128, 8),
        (200, 160, 2),
        (256, 1024, 4),
        (512, 384, 8),
        (300, 5, 16),
        (2048, 128, 4),
        (20_000, 48, 16),
    ],
)
def test_plans_and_tiles(
    assignments: int, experts: int, tokens: int, way: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing_cases.plans(way, name, assignments, experts, tokens, "cuda", monkeypatch)
    routing_cases.tiles(way, name, assignments, experts, 16 * tokens, "cuda", monkeypatch)


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize(
    ("assignments", "experts", "tokens"), [(16, 128, 8), (512, 384, 8), (300, 5, 16), (2048, 1000, 8)]
)
def test_lists_blocks(assignments: int, experts: int, tokens: int, name: str) -> None:
    routing_cases.items(name, assignments, experts, tokens, "cuda")


def test_sorts_the_same_way_every_time() -> None:
    ids = routing_cases.ids_of("skipped", 65536, 384, "cuda")
    slots, offsets = sort_by_expert(ids, 384)
    valid = int(offsets[-1])
    for _ in range(100):
        again, ends = sort_by_expert(ids, 384)
        assert torch.equal(ends, offsets) and torch.equal(again[:valid], slots[:valid])


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "splits"),
    [(1, 4, 2880, 4), (64, 8, 7168, 1), (513, 22, 96, 0), (1000, 1, 704, 2), (9000, 8, 2048, 0)],
)
def test_sums(tokens: int, top_k: int, hidden: int, splits: int) -> None:
    routing_cases.sums(tokens, top_k, hidden, splits, "cuda")


def test_follows_what_comes_before_it_in_the_stream() -> None:
    """Each kernel may start early, and must wait for what the ones before it write."""
    base = routing_cases.ids_of("random", 4096, 64, "cuda")
    parts = torch.ones(4096, 256, dtype=torch.bfloat16, device="cuda")
    y = torch.empty(1024, 256, dtype=torch.bfloat16, device="cuda")
    for turn in range(50):
        ids = (base + turn) % 64
        slots, offsets = sort_by_expert(ids, 64)
        ids.fill_(-1)
        ids[: 4 * turn] = 0
        combine(parts, ids, y, 64)
        order, ends = routing_cases.expected_order((base + turn) % 64, 64)
        assert torch.equal(offsets.cpu(), ends) and torch.equal(slots.cpu(), order)
        assert int(y[:, 0].sum(dtype=torch.float32)) == 4 * turn


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (37, 1500)])
def test_zeroes_what_is_skipped(tokens: int, hidden: int, name: str) -> None:
    routing_cases.zeroes_what_is_skipped(tokens, hidden, name, "cuda")

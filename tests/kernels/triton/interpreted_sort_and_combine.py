"""The routing cases under Triton's interpreter; run by `test_interpreter` in a process of its own."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moectl.kernels.triton.sort_and_combine import INTERPRETED
from support import kernel_cases, routing_cases
from support.sampling import every_nth, in_turn


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cases.poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize("way", routing_cases.WAYS)
def test_sorts(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routing_cases.sorts(way, name, 600, 11, "cpu", monkeypatch)


@pytest.mark.parametrize(
    ("assignments", "experts", "way"), in_turn(routing_cases.ODD_SIZES, routing_cases.WAYS)
)
def test_sorts_any_size(assignments: int, experts: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routing_cases.sorts(way, "skipped", assignments, experts, "cpu", monkeypatch)


def test_sums_counts_of_more_blocks_than_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moectl.kernels.triton.sort_and_combine.BLOCKS_AT_ONCE", 4)
    routing_cases.sorts("many", "skipped", 1300, 5, "cpu", monkeypatch)


@pytest.mark.parametrize("splits", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 1, 96), (5, 4, 600), (3, 22, 64), (2, 8, 256)])
def test_sums(tokens: int, top_k: int, hidden: int, splits: int) -> None:
    routing_cases.sums(tokens, top_k, hidden, splits, "cpu")


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_sums_in_half_precision(splits: int) -> None:
    routing_cases.sums(3, 4, 96, splits, "cpu", torch.float16)


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize(("programs", "top_k"), [(24, 2), (6, 8)])
def test_two_programs_of_a_token_sum_several_columns_each(
    programs: int, top_k: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of them where a token has few parts."""
    monkeypatch.setattr("moectl.kernels.triton.sort_and_combine.PROGRAMS", programs)
    routing_cases.sums(3, top_k, 1300, splits, "cpu")


LISTED = every_nth(
    product(
        (*routing_cases.WAYS, "given"),
        [(16, 128, 8), (200, 32, 8), (256, 7, 4), (300, 5, 16), (513, 127, 2), (2049, 9, 1)],
        routing_cases.ROUTINGS,
    ),
    7,
)


@pytest.mark.parametrize(("way", "sizes", "name"), LISTED)
def test_plans(way: str, sizes: tuple[int, int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assignments, experts, tokens = sizes
    routing_cases.plans(way, name, assignments, experts, tokens, "cpu", monkeypatch)


@pytest.mark.parametrize(("way", "sizes", "name"), LISTED)
def test_splits_into_tiles(
    way: str, sizes: tuple[int, int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignments, experts, tokens = sizes
    routing_cases.tiles(way, name, assignments, experts, 16 * tokens, "cpu", monkeypatch)


@pytest.mark.parametrize(
    ("assignments", "name"), every_nth([(20_000, "skipped"), (9_999, "random"), (20_000, "one expert")], 2)
)
def test_lists_many_assignments(assignments: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routing_cases.tiles("", name, assignments, 48, 144, "cpu", monkeypatch)
    routing_cases.plans("", name, assignments, 48, 16, "cpu", monkeypatch)


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize(("assignments", "experts", "tokens"), [(255, 33, 2), (256, 7, 4)])
def test_lists_as_many_assignments_as_are_few(
    assignments: int, experts: int, tokens: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing_cases.plans("few", name, assignments, experts, tokens, "cpu", monkeypatch)
    routing_cases.tiles("few", name, assignments, experts, 16 * tokens, "cpu", monkeypatch)


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize(("assignments", "experts", "tokens"), [(16, 128, 8), (300, 5, 16)])
def test_lists_blocks(assignments: int, experts: int, tokens: int, name: str) -> None:
    routing_cases.items(name, assignments, experts, tokens, "cpu")


@pytest.mark.parametrize("name", routing_cases.ROUTINGS)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (37, 1500)])
def test_zeroes_what_is_skipped(tokens: int, hidden: int, name: str) -> None:
    routing_cases.zeroes_what_is_skipped(tokens, hidden, name, "cpu")

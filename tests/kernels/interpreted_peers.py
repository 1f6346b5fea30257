"""moectl's own kernels around the GEMMs of other libraries, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.triton.routing import INTERPRETED
from moectl.problem import SILU, SWIGLU_OAI, Activation

from . import peer_cases as cases
from .kernel_cases import poison_new_memory


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize(("slots", "experts", "size"), [(1, 4, 8), (45, 7, 16), (70, 20, 48), (500, 3, 64)])
def test_blocks(kind: str, slots: int, experts: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.makes_blocks(kind, slots, experts, size, "cpu")
    monkeypatch.setattr("moectl.kernels.peers.around.FEW", 0)
    cases.makes_blocks(kind, slots, experts, size, "cpu")


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize(("slots", "experts"), [(1, 4), (45, 7), (300, 20), (9, 300)])
def test_ragged(kind: str, slots: int, experts: int) -> None:
    cases.sorts_ragged(kind, slots, experts, "cpu")


@pytest.mark.parametrize("rows", ["interleaved", "concatenated"])
@pytest.mark.parametrize(
    "activation",
    [
        SILU,
        Activation("silu", limit=0.5),
        SWIGLU_OAI,
        Activation("gelu_tanh"),
        Activation("relu2", gated=False),
    ],
    ids=str,
)
def test_activation(activation: Activation, rows: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        cases.activates(activation, rows, dtype, "cpu")


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_sum(tokens: int, weigh: bool) -> None:
    cases.sums(weigh, tokens, "cpu")

"""Tokens in rows by expert for grouped GEMMs, quantized on the way, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from moectl.kernels.activation import activate
from moectl.kernels.external.grouped_rows import (
    WHOLE_ROWS,
    GroupedRows,
    RowScales,
    activate_rows,
    batch_rows,
    place_rows,
    rows_for,
    scatter_tokens,
)
from moectl.kernels.quantize_tokens import QuantizedTokens, dequantize, quantize
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation
from moectl.problem.schemes import FP8_ACT_GROUP_128, FP8_ACT_TOKEN
from support import peer_cases as cases
from support.kernel_cases import poison_new_memory
from support.sampling import every_nth

SCALES = {
    None: None,
    RowScales(128): FP8_ACT_GROUP_128,
    RowScales(128, powers=True): replace(FP8_ACT_GROUP_128, scale_dtype="E8M0"),
    RowScales(WHOLE_ROWS): FP8_ACT_TOKEN,
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "align", "apart", "slots", "experts"),
    every_nth(
        [
            (kind, *rows, *sizes)
            for kind in cases.KINDS
            for rows in ((1, 0), (16, 0), (1, 2100))
            for sizes in ((1, 4), (45, 20), (300, 3), (2100, 5))
        ],
        5,
    ),
)
def test_rows_are_by_expert(kind: str, slots: int, experts: int, align: int, apart: int) -> None:
    ids = cases.ids_of(kind, slots, experts)
    made = place_rows(ids, experts, align, apart)
    wanted, begin = torch.full((slots,), -1), 0
    for expert in range(experts):
        begin = expert * apart if apart else -(-begin // align) * align
        mine = torch.nonzero(ids == expert).flatten()
        wanted[mine] = torch.arange(begin, begin + len(mine))
        begin += len(mine)
        assert (int(made.ends[expert]), int(made.counts[expert])) == (begin, len(mine))
    assert made.rows.tolist() == wanted.tolist()
    assert begin <= made.size == (experts * apart or rows_for(slots, experts, align))
    assert made.size % made.span == 0


def test_rows_of_a_batch() -> None:
    made = batch_rows(torch.tensor([2, 0, 9, 3]), 3, 64)
    assert made.rows.tolist() == [0, 1, -1, -1, -1, -1, 128, 129, 130, 192, 193, 194]
    assert (made.ends.tolist(), made.counts.tolist()) == ([2, 64, 131, 195], [2, 0, 3, 3])
    assert (made.size, made.span) == (256, 64)


def dense(
    out: torch.Tensor, scales: torch.Tensor, placed: GroupedRows, kind: RowScales | None
) -> torch.Tensor:
    """The rows of valid slots, decoded."""
    rows = placed.rows[placed.rows >= 0].long()
    if kind is None:
        return out[rows].float()
    assert scales.shape == (placed.size // placed.span, scales.shape[1], placed.span)
    flat = scales.transpose(1, 2).reshape(placed.size, -1)
    return dequantize(QuantizedTokens(out[rows], flat[rows], SCALES[kind]))  # type: ignore[arg-type]


def rounded(x: torch.Tensor, kind: RowScales | None) -> torch.Tensor:
    form = SCALES[kind]
    return x.float() if form is None else dequantize(quantize(x, form))


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal, but for subnormal codes, which the interpreter converts otherwise than GPUs."""
    subnormal = (found - wanted).abs() <= 4e-5 * wanted.abs().amax(1, keepdim=True)
    return bool(subnormal.all()) and float((found == wanted).float().mean()) > 0.97


@pytest.mark.parametrize(
    ("columns", "kind", "apart"), every_nth(product([128, 384, 2304], SCALES, [0, 64]), 5)
)
def test_tokens_in_their_rows(columns: int, kind: RowScales | None, apart: int) -> None:
    tokens, top_k, experts = 9, 3, 5
    ids = cases.ids_of("skipped", tokens * top_k, experts)
    x = torch.randn(tokens, columns).half()
    x[2] = 0
    placed = place_rows(ids, experts, 8, apart)
    out, scales = scatter_tokens(x, placed, top_k, kind)
    slots = torch.nonzero(placed.rows >= 0).flatten()
    assert same(dense(out, scales, placed, kind), rounded(x, kind)[slots // top_k])


@pytest.mark.parametrize("kind", SCALES, ids=str)
@pytest.mark.parametrize(
    "activation",
    [SILU, Activation("silu", limit=0.5), SWIGLU_OAI, Activation("relu2", gated=False)],
    ids=str,
)
def test_activations_of_rows(activation: Activation, kind: RowScales | None) -> None:
    ids = cases.ids_of("skipped", 14, 4)
    placed = place_rows(ids, 4, 16)
    x = torch.full((placed.size, (2 if activation.gated else 1) * 384), float("nan")).half()
    rows = placed.rows[placed.rows >= 0].long()
    x[rows] = torch.randn(len(rows), x.shape[1]).half()
    out, scales = activate_rows(x, placed, activation, kind)
    wanted = rounded(activate(x[rows].float(), activation, "concatenated"), kind)
    found = dense(out, scales, placed, kind)
    if kind is None:
        assert torch.allclose(found, wanted, rtol=2.0**-11, atol=1e-6)
    else:
        # An activation that is not rounded as in torch may get the next code.
        assert bool(((found - wanted).abs() <= 2.0**-3 * wanted.abs() + 1e-3).all())
        assert float(torch.isclose(found, wanted, rtol=1e-5).float().mean()) > 0.95


def test_infinity_stays_in_its_row() -> None:
    x = torch.randn(3, 256).half()
    x[1, 7] = float("inf")
    placed = place_rows(torch.tensor([0, 1, 0], dtype=torch.int32), 2, 8)
    for kind in (RowScales(128), RowScales(WHOLE_ROWS)):
        found = dense(*scatter_tokens(x, placed, 1, kind), placed, kind)
        assert [bool(row.isfinite().all()) for row in found] == [True, False, True]

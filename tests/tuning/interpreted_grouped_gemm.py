"""The plain grouped GEMM in Triton's interpreter, which multiplies fp32: every assignment's product."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moectl.errors import UsageError
from moectl.tuning.grouped_gemm import SPAN, GemmConfig, plain_gemm, sort
from support.sampling import every_nth

EXPERTS, TOP_K = 5, 3


def _ids(tokens: int, kind: str) -> torch.Tensor:
    if kind == "one expert":
        return torch.full((tokens, TOP_K), 2, dtype=torch.int32)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    if kind == "of other ranks":
        ids[::2, 1:] = -1
    return ids


def _expected(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = ids.flatten().long()
    rows = x.repeat_interleave(len(flat) // len(x), 0).float()
    return torch.einsum("ak,ank->an", rows, weight.float()[flat])


BLOCKS = [GemmConfig(16, 32, 32, 1, 4, 2), GemmConfig(16, 64, 64, 3, 4, 2), GemmConfig(32, 32, 64, 8, 4, 2)]


@pytest.mark.parametrize(
    ("kind", "tokens", "blocks"), every_nth(product(["spread", "one expert"], [1, 7, 40], BLOCKS), 4)
)
def test_every_assignment_has_its_product(blocks: GemmConfig, tokens: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = _ids(tokens, kind)
    x = torch.randn(tokens, 80, generator=generator)
    weight = torch.randn(EXPERTS, 72, 80, generator=generator)
    rows = sort(ids, EXPERTS, blocks.block_m)
    y = torch.full((ids.numel(), 72), float("nan"))
    expected = _expected(x, weight, ids)
    assert (plain_gemm(y, x, weight, rows, blocks).float() - expected).norm() < 5e-3 * expected.norm()
    swapped = plain_gemm(torch.empty_like(y), x, weight, rows, blocks, swapped=True)
    assert torch.allclose(swapped, y, rtol=1e-4, atol=1e-4)
    # The second product has a row of its own for each assignment.
    again = plain_gemm(y.clone(), x.repeat_interleave(TOP_K, 0), weight, rows, blocks)
    assert torch.equal(again, y)


@pytest.mark.parametrize("swapped", [False, True])
def test_scales_of_rows_and_blocks(swapped: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, n, k = _ids(9, "spread"), 2 * SPAN, 2 * SPAN
    x = torch.randn(9, k, generator=generator)
    weight = torch.randn(EXPERTS, n, k, generator=generator)
    x_scale = torch.rand(9, k // SPAN, generator=generator)
    weight_scale = torch.rand(EXPERTS, n // SPAN, k // SPAN, generator=generator)
    blocks = GemmConfig(16, 64, 128, 2, 4, 2)
    y = torch.empty(ids.numel(), n)
    plain_gemm(y, x, weight, sort(ids, EXPERTS, 16), blocks, (x_scale, weight_scale), swapped)
    whole = weight.float() * weight_scale.repeat_interleave(SPAN, 1).repeat_interleave(SPAN, 2)
    expected = _expected(x.float() * x_scale.repeat_interleave(SPAN, 1), whole, ids)
    assert (y.float() - expected).norm() < 5e-3 * expected.norm()


def test_what_does_not_fit_is_refused() -> None:
    rows, x, weight = sort(_ids(4, "spread"), EXPERTS, 16), torch.zeros(4, 128), torch.zeros(EXPERTS, 8, 128)
    with pytest.raises(UsageError, match="sorted into other blocks than of 32"):
        plain_gemm(torch.empty(12, 8), x, weight, rows, GemmConfig(32, 32, 32, 1, 4, 2))
    with pytest.raises(UsageError, match="cuts across spans of 128"):
        plain_gemm(torch.empty(12, 8), x, weight, rows, GemmConfig(16, 32, 256, 1, 4, 2), (x, weight))


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("kind", ["spread", "one expert", "of other ranks"])
def test_sorted_rows_are_whole_blocks_of_one_expert(tokens: int, kind: str) -> None:
    ids = _ids(tokens, kind)
    rows = sort(ids, EXPERTS, 16)
    filled = int(rows.filled)
    taken = rows.order[:filled].view(-1, 16)
    flat = ids.flatten()
    assert sorted(taken[taken < len(flat)].tolist()) == (flat >= 0).nonzero().flatten().tolist()
    assert (rows.order[filled:] == len(flat)).all() and filled <= rows.most
    for block, expert in zip(taken, rows.experts.tolist(), strict=False):
        assert set(flat[block[block < len(flat)].long()].tolist()) == {expert}

"""The bound of the one-hot probe: sums cut off as tensor cores do pass it, and a wrong weight does not."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.triton.kernel_family import CODE_BASES
from moectl.problem.schemes import int_format
from support import kernel_cases as cases
from support.random_layers import DTYPES

KEPT = 25
"""Bits after the first of the largest number that are kept of all when Hopper's tensor cores align them."""


def truncated(numbers: torch.Tensor, bits: int, like: torch.Tensor) -> torch.Tensor:
    """`numbers` cut off `bits` binary places after the leading one of `like`."""
    unit = torch.exp2(torch.floor(torch.log2(like.abs().clamp(min=2.0**-200))) - bits)
    return torch.trunc(numbers / unit) * unit


def added(products: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """fp32 sums [...] of `total` and 16 products [..., 16], aligned to the largest of all and cut off."""
    numbers = torch.cat([products, total[..., None]], -1)
    aligned = truncated(numbers, KEPT, numbers.abs().amax(-1, keepdim=True)).sum(-1)
    return truncated(aligned, 23, aligned)


def through(h: torch.Tensor, weights: torch.Tensor, zero: float, base: int) -> torch.Tensor:
    """[tokens, rows]: ``h @ weights.T`` as the sums of ``base + zero + weight`` less those of the surplus."""
    total = torch.zeros(len(h), len(weights), dtype=torch.float64)
    tokens = torch.zeros(len(h), dtype=torch.float64)
    raised = weights + (base + zero)
    for k in range(0, h.shape[1], 16):
        total = added(h[:, None, k : k + 16] * raised[None, :, k : k + 16], total)
        tokens = added(h[:, k : k + 16], tokens)
    return (total - (base + zero) * tokens[:, None]).float()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_cut_sums_pass_and_wrong_weights_do_not(dtype: str, bits: int, size: int) -> None:
    weight = int_format(bits, 64, zero_point=True)
    problem = cases.probe(weight, (dtype, "F16"))
    surplus, base, zero = cases.surplus("stream", problem), CODE_BASES[dtype], float(2**bits - 1)
    if (dtype, bits) == ("bf16", 8):
        base = cases.INT8_OF_BF16
    assert surplus == abs(base + zero)
    made = torch.Generator().manual_seed(size)
    decoded = torch.randint(0, 2**bits, (size, size), generator=made) - 2 ** (bits - 1)
    scales = (torch.rand(1, size, generator=made) + 0.5) * 2.0 ** (2 - bits) / size**0.5
    h = (decoded * scales.half().float()).relu().square().to(DTYPES[dtype])
    eye = torch.eye(size, dtype=torch.float64)
    y = through(h.double(), eye, zero, base).to(h.dtype)
    assert cases.nearly(y, h, surplus)
    assert dtype == "bf16" or not torch.equal(y, h)
    for row, column, off in ((3, 40, 1), (17, 17, -1), (size - 1, 0, 1)):
        wrong = eye.clone()
        wrong[row, column] += off
        assert not cases.nearly(through(h.double(), wrong, zero, base).to(h.dtype), h, surplus)
    assert not cases.nearly(y.roll(1, 0), h, surplus)
    assert not cases.nearly(y.roll(1, 1), h, surplus)

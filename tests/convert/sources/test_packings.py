"""Packed forms of checkpoints, code by code, and packed again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moectl.convert.recipe.chain import Chain
from moectl.convert.sources import packings
from moectl.errors import CheckpointError

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).to(torch.int32)


def field(word, i, bits):
    """Code `i` of int32 words, counted from the lowest bits."""
    return (word.numpy().view(np.uint32) >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)


def code(packed, k, bits):
    """Code `k` of the rows of a canonical tensor."""
    t = packed.numpy()
    return t[..., k] if bits == 8 else (t[..., k // 2] >> (4 * (k % 2))) & 15


def both_ways(steps, stored):
    chain = Chain(steps)
    found = chain.apply(stored)
    assert torch.equal(chain.undo(found, "I32", tuple(stored.shape)), stored)
    return found


@pytest.mark.parametrize("bits", [4, 8])
def test_words_along_k(bits):
    stored, per = words((2, 6, 5)), 32 // bits
    found = both_ways(packings.WORDS_ALONG_K, stored)
    for k in range(5 * per):
        assert (code(found, k, bits) == field(stored[:, :, k // per], k % per, bits)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_k(bits):
    stored, per = words((2, 5, 6)), 32 // bits
    found = both_ways(packings.WORDS_OF_K, stored)
    for k in range(5 * per):
        assert (code(found, k, bits) == field(stored[:, k // per], k % per, bits)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points(bits):
    per = 32 // bits
    along, gptq = words((2, 3, 5)), words((2, 5, 3))
    zeros, others = both_ways(packings.zeros_along_n(bits), along), both_ways(packings.gptq_zeros(bits), gptq)
    assert zeros.shape == others.shape == (2, 3 * per, 5)
    for n in range(3 * per):
        assert (zeros[:, n].numpy() == field(along[:, n // per], n % per, bits)).all()
        assert (others[:, n].numpy() == field(gptq[:, :, n // per], n % per, bits)).all()
    assert torch.equal(both_ways(packings.gptq_zeros(bits, one_less=True), gptq), others + 1)


def test_a_zero_point_of_the_first_version_may_be_sixteen():
    """15 is stored for 16, which no nibble holds: it is kept apart here and refused where it is packed."""
    stored = torch.full((1, 1, 1), -1, dtype=torch.int32)
    found = both_ways(packings.gptq_zeros(4, one_less=True), stored)
    assert (found == 16).all()
    with pytest.raises(CheckpointError, match="more bits"):
        Chain(packings.gptq_zeros(4)).undo(found, "I32", (1, 1, 1))


def test_awq_columns():
    weights, zeros = words((2, 16, 3)), words((2, 4, 3), seed=1)
    packed, found = both_ways(packings.awq_weights(), weights), both_ways(packings.awq_zeros(), zeros)
    assert packed.shape == (2, 24, 8)
    for j in range(3):
        for i, column in enumerate(AWQ_COLUMNS):
            for k in range(16):
                assert (code(packed[:, 8 * j + column], k, 4) == field(weights[:, k, j], i, 4)).all()
            assert (found[:, 8 * j + column].numpy() == field(zeros[:, :, j], i, 4)).all()


def test_transposed():
    stored = torch.randn(2, 5, 3).bfloat16()
    assert torch.equal(Chain(packings.TRANSPOSED).apply(stored), stored.transpose(1, 2))

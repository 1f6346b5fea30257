"""Single steps and chains: what goes in comes back, and what a manifest may not ask for."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.convert.layouts.word_orders import E2M1_SHIFTED, NIBBLES_APART
from moectl.convert.recipe.chain import MAX_STEPS, Chain
from moectl.convert.steps.transforms import (
    DTYPES,
    STEPS,
    Add,
    Bits,
    DtypeView,
    Flip,
    PackedCodes,
    Pad,
    Rearrange,
    Widen,
    Xor,
    dtype_name,
)
from moectl.errors import CheckpointError
from support.layout_cases import random_bytes, same


@st.composite
def steps(draw):
    """Any step with a shape and dtype that it takes."""
    e, n, k = draw(st.integers(1, 3)), draw(st.integers(1, 9)), 4 * draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    axis = draw(st.integers(1, 2))
    kind = draw(st.sampled_from(sorted(STEPS)))
    if kind == "pad":
        return (
            Pad(axis, (n, k)[axis - 1] + draw(st.integers(0, 7)), draw(st.integers(0, 100))),
            (e, n, k),
            dtype,
        )
    if kind == "flip":
        return Flip(axis), (e, 2 * n, k), dtype
    if kind == "rearrange":
        return Rearrange("e n (k a b) -> e (b k) (n a)", {"a": 2, "b": 2}), (e, n, k), dtype
    if kind == "codes":
        return PackedCodes(draw(st.sampled_from((1, 2, 4))), True), (e, n, k), "U8"
    if kind == "xor":
        return Xor(draw(st.integers(0, 255))), (e, n, k), "U8"
    if kind == "add":
        return Add(draw(st.integers(0, 255))), (e, n, k), "U8"
    if kind == "bits":
        return Bits(tuple(draw(st.permutations(range(32))))), (e, n, k), "I32"
    if kind == "view":
        return DtypeView(dtype, draw(st.sampled_from(sorted(DTYPES)))), (e, n, k), dtype
    source = draw(st.sampled_from(("BF16", "F16")))
    return Widen(source), (e, n, k), source


@settings(max_examples=200, deadline=None)
@given(steps(), st.integers(0, 1 << 30))
def test_every_step_goes_back(case, seed):
    step, shape, dtype = case
    t = random_bytes(shape, dtype, seed)
    if isinstance(step, Widen) and dtype == "F16":
        t = torch.nan_to_num(t)  # only a half's NaN may change its bits
    out = step.apply(t)
    assert step.output_type(dtype, shape) == (dtype_name(out.dtype), tuple(out.shape))
    assert same(step.undo(out, dtype, shape).contiguous(), t)
    chain = Chain((step,))
    assert same(chain.undo(chain.apply(t), dtype, shape), t)
    assert Chain.from_json(json.loads(json.dumps(chain.to_json()))) == chain


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(32)), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5))
def test_bits_one_by_one(order, words):
    t = torch.tensor([[word - (1 << 32) if word >> 31 else word for word in words]], dtype=torch.int32)
    expected = [sum((word >> source & 1) << i for i, source in enumerate(order)) for word in words]
    got = [int(word) & 0xFFFFFFFF for word in Bits(tuple(order)).apply(t)[0]]
    assert got == expected


def test_bits_in_several_blocks(monkeypatch):
    t = random_bytes((2, 5, 1001), "I32")
    whole = E2M1_SHIFTED.apply(t)
    monkeypatch.setattr("moectl.convert.steps.transforms._BLOCK_WORDS", 7)
    assert same(E2M1_SHIFTED.apply(t), whole)


def test_codes_one_by_one():
    t = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    assert PackedCodes(4, True).apply(t).tolist() == [[1, 2, 3, 4]]
    assert PackedCodes(2, True).apply(t).tolist() == [[1, 0, 2, 0, 3, 0, 0, 1]]
    with pytest.raises(CheckpointError, match="more bits"):
        PackedCodes(4, False).apply(torch.tensor([[1, 16]], dtype=torch.uint8))


def test_nibbles_apart():
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert [f"{int(x) & 0xFFFFFFFF:08x}" for x in NIBBLES_APART.apply(word)[0]] == ["75316420"]


def test_widening_keeps_nans():
    t = torch.tensor([[0x7F81, 0x7FC0, -1, 0x3F80]], dtype=torch.int16).view(torch.bfloat16)
    step = Widen("BF16")
    assert same(step.undo(step.apply(t), "BF16", (1, 4)), t)


def test_a_view_of_bytes_that_start_anywhere():
    t = random_bytes((1, 1, 9), "U8")[..., 1:]
    chain = Chain((DtypeView("U8", "I32"),))
    assert same(chain.undo(chain.apply(t), "U8", (1, 1, 8)), t.contiguous())


def test_output_may_be_given():
    chain = Chain((Pad(1, 3, 7),))
    t, out = random_bytes((2, 2), "U8"), torch.empty((2, 3), dtype=torch.uint8)
    assert chain.apply(t, out).data_ptr() == out.data_ptr()
    assert out[:, 2].tolist() == [7, 7]
    with pytest.raises(CheckpointError, match="output must be U8"):
        chain.apply(t, torch.empty((2, 4), dtype=torch.uint8))


def test_an_empty_chain_copies():
    t = random_bytes((2, 3), "BF16")
    out = Chain().apply(t)
    assert same(out, t)
    assert out.data_ptr() != t.data_ptr()


@pytest.mark.parametrize(
    ("chain", "shape", "dtype", "message"),
    [
        (Chain((Pad(1, 4),)), (1, 5), "U8", "cannot pad"),
        (Chain((Pad(3, 4),)), (1, 5), "U8", "cannot pad"),
        (Chain((Flip(1),)), (1, 5), "U8", "no halves"),
        (Chain((DtypeView("U8", "I32"),)), (1, 5), "U8", "whole elements"),
        (Chain((DtypeView("I32", "U8"),)), (1, 5), "U8", "needs I32, got U8"),
        (Chain((Xor(1),)), (1, 5), "BF16", "needs bytes"),
        (Chain((Bits(tuple(range(32))),)), (1, 5), "U8", "32-bit words"),
        (Chain((PackedCodes(4, False),)), (1, 5), "U8", "do not fill bytes"),
        (Chain((Widen("F16"),)), (1, 5), "BF16", "needs F16"),
        (Chain((Rearrange("e (n a) -> e a n", {"a": 2}),)), (1, 5), "U8", "multiple of 2"),
        (Chain((Pad(1, 1 << 31), Pad(2, 1 << 31))), (1, 5, 5), "U8", "larger than any MoE layer"),
    ],
)
def test_shapes_that_a_chain_cannot_take(chain, shape, dtype, message):
    with pytest.raises(CheckpointError, match=message):
        chain.stored_type(dtype, shape)


def test_the_way_back_refuses_another_shape():
    chain = Chain((Pad(1, 8),))
    with pytest.raises(CheckpointError, match=r"stored as U8 \(2, 8\), got U8 \(2, 9\)"):
        chain.undo(random_bytes((2, 9), "U8"), "U8", (2, 5))


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        [1],
        [{}],
        [{"step": "exec"}],
        [{"step": ["pad"]}],
        [{"step": "pad", "axis": 1}],
        [{"step": "pad", "axis": 0, "to": 4}],
        [{"step": "pad", "axis": 1, "to": 1 << 60}],
        [{"step": "pad", "axis": True, "to": 4}],
        [{"step": "pad", "axis": 1, "to": 4, "more": 1}],
        [{"step": "flip", "axis": -1}],
        [{"step": "xor", "mask": 256}],
        [{"step": "bits", "order": list(range(31))}],
        [{"step": "bits", "order": [0] * 32}],
        [{"step": "view", "source": "U8", "target": "Q9"}],
        [{"step": "widen", "source": "F32"}],
        [{"step": "codes", "bits": 3, "unpack": True}],
        [{"step": "rearrange", "pattern": "e n -> n e", "sizes": {}}],
        [{"step": "rearrange", "pattern": "e n -> e n", "sizes": {"m": 2}}],
        [{"step": "rearrange", "pattern": "e n -> e n", "sizes": {"n": 0}}],
        [{"step": "rearrange", "pattern": "e n -> e n", "sizes": {"e": 1}}],
        [{"step": "rearrange", "pattern": "e (n -> e n", "sizes": {}}],
        [{"step": "rearrange", "pattern": 5, "sizes": {}}],
        [{"step": "flip", "axis": 1}] * (MAX_STEPS + 1),
    ],
)
def test_a_manifest_may_not_ask_for_this(data):
    with pytest.raises(CheckpointError):
        Chain.from_json(data)


def test_unknown_dtypes_are_refused():
    with pytest.raises(CheckpointError, match=r"tensors of torch.float64 cannot be converted"):
        Chain().apply(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="unknown dtype 'Q9'"):
        Chain().stored_type("Q9", (2, 2))
    assert Chain().stored_type("I64", (2, 2)) == ("I64", (2, 2)), "what no step touches is stored as it is"


def test_memory_does_not_grow_with_the_batch(monkeypatch):
    """Blocks of experts: no step ever sees more than a block."""
    monkeypatch.setattr("moectl.convert.recipe.chain.BLOCK_BYTES", 4096)
    seen = []

    class Spy(Xor):
        def apply(self, t):
            seen.append(t.numel())
            return super().apply(t)

    Chain((Spy(255),)).apply(random_bytes((64, 8, 64), "U8"))
    assert max(seen) <= 4096 and math.fsum(seen) == 64 * 8 * 64

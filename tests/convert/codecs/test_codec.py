"""Codecs against the formats' definitions, value by value."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moectl.convert.codecs import check_scales, codec_for
from moectl.errors import CheckpointError, UsageError
from moectl.problem.schemes import FULL, MXFP4, WeightFormat, int_format

RECORDED = (
    Path(__file__).resolve().parents[2] / "data" / "codecs" / "ckpt_compressed_tensors_pack.safetensors"
)

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
mxfp4 = codec_for(MXFP4)

INTS = [int_format(4, 32), int_format(4, 128), int_format(4, FULL), int_format(8, 64), int_format(8, FULL)]
INTS += [int_format(4, 32, "F16"), int_format(8, 32, "F32")]


def e2m1(code: int) -> float:
    """A code by the definition: sign, two exponent bits of bias 1, one mantissa bit, subnormals."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def test_mxfp4_every_code_and_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    for byte in range(255):
        scale = torch.full((1, 16, 1), byte, dtype=torch.uint8)
        values = mxfp4.decode(codes, scale)
        assert values.dtype is torch.float32
        flat = values.reshape(-1).tolist()
        for at in range(0, 512, 37):
            code = (at // 2) & 15 if at % 2 == 0 else (at // 2) >> 4
            exact = e2m1(code) * 2.0 ** (byte - 127)
            assert flat[at] == (exact if abs(exact) < 2.0**128 else math.copysign(math.inf, exact))
    assert mxfp4.decode(codes, torch.full((1, 16, 1), 255, dtype=torch.uint8)).isnan().all()


def test_mxfp4_negative_zero_keeps_its_sign():
    values = mxfp4.decode(torch.full((1, 1, 16), 0x80, dtype=torch.uint8), torch.full((1, 1, 1), 127).byte())
    assert torch.signbit(values[0, 0]).tolist() == [False, True] * 16
    values[..., 31] = 6
    codes = mxfp4.encode(values).codes
    assert codes[0, 0, 0] == 0x80


def blocks(elements):
    return st.lists(elements, min_size=32, max_size=32)


ordinary = st.floats(-(2.0**100), 2.0**100, width=32)
tiny = st.floats(-(2.0**-120), 2.0**-120, width=32)


@settings(max_examples=150, deadline=None)
@given(blocks(ordinary) | blocks(tiny) | blocks(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_mxfp4_encodes_to_the_nearest(values):
    w = torch.tensor(values, dtype=torch.float32).reshape(1, 1, 32)
    codes, scale, *_ = mxfp4.encode(w)
    largest = max(map(abs, w.reshape(-1).tolist()))
    exponent = max(math.frexp(largest)[1] - 1 - 2, -127) if largest else -127
    assert scale.item() == exponent + 127
    for i, value in enumerate(w.reshape(-1).tolist()):
        code = codes[0, 0, i // 2].item() >> (4 * (i % 2)) & 15
        size = abs(value) / 2.0**exponent
        best = min(abs(size - magnitude) for magnitude in MAGNITUDES)
        nearest = [j for j, magnitude in enumerate(MAGNITUDES) if abs(size - magnitude) == best]
        assert code & 7 == (nearest[0] if len(nearest) == 1 else next(j for j in nearest if j % 2 == 0))
        assert code >> 3 == int(math.copysign(1.0, value) < 0)


def test_mxfp4_ties_go_to_even_codes():
    sizes = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    expected = (0, 2, 2, 4, 4, 6, 6)
    w = torch.zeros(1, 1, 32)
    w[..., 0:7] = torch.tensor(sizes)
    w[..., 8:15] = -torch.tensor(sizes)
    w[..., 31] = 6.0
    codes = mxfp4.encode(w)[0][0, 0]
    unpacked = torch.stack((codes & 15, codes >> 4), -1).reshape(-1).tolist()
    assert unpacked[0:7] == list(expected)
    assert unpacked[8:15] == [code | 8 for code in expected]


def test_mxfp4_goes_round():
    """Decoded weights encode to weights that are equal, though a block may choose a smaller scale."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 5, 48), dtype=torch.uint8, generator=generator)
    scale = torch.randint(90, 160, (3, 5, 3), dtype=torch.uint8, generator=generator)
    codes[..., 15::16] |= 0x07  # a 6 in every block, so that the scale is the only one possible
    values = mxfp4.decode(codes, scale)
    again = mxfp4.encode(values)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scale)


def test_mxfp4_zero_and_saturation():
    codes, scale, *_ = mxfp4.encode(torch.zeros(1, 2, 64))
    assert not codes.any()
    assert not scale.any()
    largest = torch.finfo(torch.float32).max
    codes, scale, *_ = mxfp4.encode(torch.full((1, 1, 32), largest))
    assert (codes == 0x77).all()
    assert scale.item() == 127 + 125
    assert torch.isfinite(mxfp4.decode(codes, scale)).all()


@pytest.mark.parametrize("weight", INTS, ids=str)
def test_ints_decode_by_definition(weight):
    codec, bits, e, n, k = codec_for(weight), weight.bits, 2, 3, 256
    group = k if weight.group == FULL else weight.group
    u = torch.randint(0, 1 << bits, (e, n, k), generator=torch.Generator().manual_seed(1))
    packed = (u[..., 0::2] | u[..., 1::2] << 4).to(torch.uint8) if bits == 4 else u.to(torch.uint8)
    scale = torch.rand(e, n, k // group).to(torch.bfloat16)
    zero = torch.randint(0, 1 << bits, (e, n, k // group), dtype=torch.uint8)
    symmetric, asymmetric = codec.decode(packed, scale), codec.decode(packed, scale, zero)
    for at in ((0, 0, 0), (1, 2, 255), (0, 1, 97), (1, 0, 32)):
        g = (*at[:2], at[2] // group)
        assert symmetric[at] == (u[at] - 2 ** (bits - 1)) * scale[g].float()
        assert asymmetric[at] == (u[at] - zero[g].int()) * scale[g].float()


@pytest.mark.parametrize("weight", INTS, ids=str)
def test_ints_encode_to_the_nearest(weight):
    codec, limit = codec_for(weight), 2 ** (weight.bits - 1)
    w = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [[[1e-3]], [[50.0]]]
    )
    codes, scale, *_ = codec.encode(w)
    group = 256 if weight.group == FULL else weight.group
    step = scale.double().repeat_interleave(group, -1)
    largest = w.reshape(2, 5, -1, group).abs().amax(-1)
    assert torch.equal(scale, (largest / (limit - 0.5)).to(scale.dtype))
    error = (codec.decode(codes, scale).double() - w.double()).abs()
    # The scale's own rounding moves the ends by limit * 2**-8 steps at most.
    assert (error <= step * (0.5 + limit * 2.0**-8)).all()
    inside = w.double().abs() <= step * (limit - 1)
    assert (error <= step * (0.5 + 1e-5))[inside].all()


@pytest.mark.parametrize("weight", INTS, ids=str)
def test_ints_encode_extremes_to_numbers(weight):
    codec = codec_for(weight)
    w = torch.zeros(1, 3, 256)
    w[0, 1] = torch.finfo(torch.float32).tiny / 4
    w[0, 2, ::2] = torch.finfo(torch.float32).max
    codes, scale, *_ = codec.encode(w)
    check_scales(scale)
    values = codec.decode(codes, scale)
    assert torch.isfinite(values).all()
    assert not values[0, 0].any()


def test_ints_go_round():
    codec = codec_for(int_format(4, 32))
    codes = torch.randint(0, 256, (2, 3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    codes[..., ::16] = 0x00  # -8 in every group: a scale of its magnitude / 7.5 is not the original
    scale = torch.full((2, 3, 4), 0.25, dtype=torch.bfloat16)
    values = codec.decode(codes, scale)
    again, smaller, *_ = codec.encode(values * (7.5 / 8))
    assert torch.equal(smaller, scale)
    assert (again.int() & 15).min() == 0


def test_packed_codes_are_those_of_compressed_tensors():
    recorded = load_file(RECORDED)
    for name, bits, packed in (("weight_int8", 4, "weight_packed"), ("weight8_int8", 8, "weight8_packed")):
        q = recorded[f"in.{name}"]
        codes = recorded[f"out.{packed}"].contiguous().view(torch.uint8)
        scale = torch.ones(*q.shape[:2], 1, dtype=torch.bfloat16)
        codec = codec_for(int_format(bits, FULL))
        assert torch.equal(codec.decode(codes, scale), q.float())


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor([[[1, 2]], [[255, 3]]], dtype=torch.uint8), r"1 of 4 scales .*E8M0 byte 255.*expert 1"),
        (torch.tensor([[[math.nan, 2.0]]], dtype=torch.bfloat16), "NaN or infinity"),
        (torch.tensor([[[math.inf, 2.0]]], dtype=torch.float16), "NaN or infinity"),
    ],
)
def test_scales_that_are_no_numbers(scale, message):
    with pytest.raises(CheckpointError, match=message):
        check_scales(scale)


def test_scales_that_are_numbers():
    check_scales(torch.arange(255, dtype=torch.uint8).reshape(1, 3, 85))
    check_scales(torch.tensor([[[0.0, -0.0, 65504.0]]], dtype=torch.float16))
    check_scales(torch.empty(0, 3, 2))


@pytest.mark.parametrize(
    ("weight", "shape", "value", "message"),
    [
        (MXFP4, (1, 1, 32), math.nan, "32 of 32 weights to encode are NaN"),
        (MXFP4, (1, 1, 32), math.inf, "NaN or infinite"),
        (MXFP4, (1, 1, 48), 1.0, "whole groups and bytes, got 1 rows of 48"),
        (MXFP4, (1, 32), 1.0, "experts, rows, columns"),
        (int_format(4, 32), (1, 1, 48), 1.0, "whole groups"),
        (int_format(4, FULL), (1, 1, 3), 1.0, "whole groups and bytes"),
        (int_format(8, 32), (1, 1, 32), -math.inf, "NaN or infinite"),
    ],
)
def test_weights_that_cannot_be_encoded(weight, shape, value, message):
    with pytest.raises(CheckpointError, match=message):
        codec_for(weight).encode(torch.full(shape, value))


@pytest.mark.parametrize(
    ("weight", "codes", "scale", "message"),
    [
        (
            MXFP4,
            torch.zeros(1, 2, 16).byte(),
            torch.zeros(1, 2, 2).byte(),
            r"need scales .*\[1, 2, 1\], got \[1, 2, 2\]",
        ),
        (MXFP4, torch.zeros(1, 2, 17).byte(), torch.zeros(1, 2, 1).byte(), "whole groups"),
        (MXFP4, torch.zeros(1, 2, 16).byte(), torch.zeros(1, 2, 1), "uint8 codes and uint8 scales"),
        (int_format(4, 32), torch.zeros(1, 2, 16).byte(), torch.zeros(1, 2, 2), "need scales"),
        (int_format(4, 32), torch.zeros(1, 2, 16).byte(), torch.zeros(1, 2, 1).byte(), "float scales"),
        (int_format(4, 32), torch.zeros(1, 2, 16).int(), torch.zeros(1, 2, 1), "uint8 codes"),
    ],
)
def test_codes_and_scales_that_do_not_fit(weight, codes, scale, message):
    with pytest.raises(CheckpointError, match=message):
        codec_for(weight).decode(codes, scale)


@pytest.mark.parametrize(
    "weight", [WeightFormat("fp6", 6, (1, 32)), WeightFormat("mxfp4", 4, (2, 32)), int_format(8, FULL, "I32")]
)
def test_formats_without_a_codec(weight):
    with pytest.raises(UsageError, match=r"no codec (knows|stores)"):
        codec_for(weight)

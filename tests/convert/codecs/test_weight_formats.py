"""Every weight format: codes to values and back, block by block, at the ends of what floats can hold."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from moectl.convert.codecs import Encoded, codec_for, decode_role, from_halves, in_halves
from moectl.convert.codecs.grids import E2M1, E4M3, INT4, INT8
from moectl.convert.codecs.scales import E8M0_RULES
from moectl.errors import CheckpointError, UsageError
from moectl.problem.schemes import BF16, FULL, MXFP4, MXFP8, NVFP4, WeightFormat, int_format

FP8_BLOCK = WeightFormat("fp8", 8, (128, 128), "F32")
FP8_CHANNEL = WeightFormat("fp8", 8, (1, FULL), "F32")
FP8_TENSOR = WeightFormat("fp8", 8, (FULL, FULL), "F32")
FP8_BLOCK_E8M0 = WeightFormat("fp8", 8, (128, 128), "E8M0")
ASYMMETRIC = int_format(4, 32, "F16", zero_point=True)
FORMATS = {
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "fp8 block": FP8_BLOCK,
    "fp8 block bf16": WeightFormat("fp8", 8, (128, 128), "BF16"),
    "fp8 block e8m0": FP8_BLOCK_E8M0,
    "fp8 channel": FP8_CHANNEL,
    "fp8 tensor": FP8_TENSOR,
    "int4 g32": int_format(4, 32),
    "int4 channel": int_format(4, FULL, "F32"),
    "int8 channel": int_format(8, FULL),
    "int4 g32 zeros": ASYMMETRIC,
    "int4 g128 zeros": int_format(4, 128, "BF16", zero_point=True),
    "int8 g64 zeros": int_format(8, 64, "F32", zero_point=True),
}
FLOATS = {name: weight for name, weight in FORMATS.items() if not weight.name.startswith("int")}
GRIDS = {"E2M1": E2M1, "E4M3": E4M3, "INT4": INT4, "INT8": INT8}


@pytest.fixture(params=FORMATS.values(), ids=FORMATS.keys())
def weight(request):
    return request.param


def weights(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(weight, encoded, n, k):
    """The product of all scales for each weight, spread row by row and column by column, in float64."""
    scale = encoded.scale
    if scale.dtype is torch.uint8 and weight.name == "nvfp4":
        scale = scale.view(torch.float8_e4m3fn).double()
    elif scale.dtype is torch.uint8:
        scale = torch.exp2(scale.double() - 127)
    rows = math.ceil(n / scale.shape[1]) if weight.block[0] == FULL else weight.block[0]
    columns = k if weight.group == FULL else weight.group
    spread = scale.double().repeat_interleave(rows, 1)[:, :n].repeat_interleave(columns, 2)[..., :k]
    if encoded.global_scale is not None:
        parts = encoded.global_scale.shape[1]
        spread = spread * encoded.global_scale.double().repeat_interleave(n // parts, 1)
    return spread


def test_e4m3_is_torch_s_own():
    ours = torch.tensor([E4M3.value(code) for code in range(256)])
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(ours.nan_to_num(nan=999), theirs.nan_to_num(nan=999))


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_grids_round_to_the_nearest_value_and_ties_to_even(grid):
    values = sorted({grid.value(code) for code in range(1 << grid.bits)} - {math.nan})
    values = [value for value in values if not math.isnan(value)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    around = [math.nextafter(m, s) for m in middles for s in (-math.inf, math.inf)]
    x = torch.tensor([*values, *middles, *around, 3 * values[0], 3 * values[-1]], dtype=torch.float64).float()
    x = torch.cat((x, weights(300) * grid.largest / 3, weights(300) * 2.0**grid.bits / 1000))
    codes, rounded = grid.codes(x.clone()), grid.round(x.clone())
    table = torch.tensor([grid.value(code) for code in range(1 << grid.bits)])
    assert torch.equal(table[codes.int()], rounded)
    for number, code in zip(x.tolist(), codes.tolist(), strict=True):
        error = abs(number - table[code].item())
        best = min(abs(number - value) for value in values)
        assert error == best
        others = [v for v in values if abs(number - v) == best and v != table[code].item()]
        if others:
            assert code % 2 == 0


def test_decode_is_code_times_scales(weight):
    codec, n, k = codec_for(weight), 192, 256
    encoded = codec.encode(weights(2, n, k))
    codes = encoded.codes
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(2)
    values = torch.tensor([codec.grid.value(code) for code in range(1 << weight.bits)], dtype=torch.float64)
    exact = values[codes.int()]
    if weight.zero_point:
        group = k if weight.group == FULL else weight.group
        zero = encoded.zero.double() - 2 ** (weight.bits - 1)
        exact = exact - zero.repeat_interleave(group, 2)
    exact = exact * factors(weight, encoded, n, k)
    decoded = codec.decode(*encoded)
    assert decoded.dtype is torch.float32
    assert torch.equal(decoded, exact.float())


def test_decoded_weights_have_their_own_codes_at_their_own_scales(weight):
    codec = codec_for(weight)
    encoded = codec.encode(weights(2, 128, 256))
    decoded = codec.decode(*encoded)
    blocks = codec.blocks(decoded)
    w = decoded if encoded.global_scale is None else decoded / encoded.global_scale
    again = codec.pack(blocks, codec.codes(blocks.split(w), encoded.scale, encoded.zero))
    assert torch.equal(codec.decode(again, *encoded[1:]), decoded)


@pytest.mark.parametrize("weight", FLOATS.values(), ids=FLOATS.keys())
def test_encoding_twice_changes_nothing(weight):
    """A block's largest weight is on the grid the second time; integers lie half a step within theirs."""
    codec = codec_for(weight)
    once = codec.decode(*codec.encode(weights(2, 128, 256)))
    twice = codec.decode(*codec.encode(once))
    assert torch.allclose(twice, once, rtol=2e-2 if weight == NVFP4 else 1e-6)
    if weight != NVFP4:
        assert torch.equal(codec.decode(*codec.encode(twice)), twice)


EXTREMES = {
    "zeros": torch.zeros(1, 128, 256),
    "one value": torch.full((1, 128, 256), 0.37),
    "minus one value": torch.full((1, 128, 256), -1e-3),
    "subnormal": torch.full((1, 128, 256), 1e-42),
    "huge": torch.full((1, 128, 256), 3.0e38),
    "mixed": torch.cat((torch.full((1, 64, 256), 3e38), torch.full((1, 64, 256), -1e-40)), 1),
}


@pytest.mark.parametrize("values", EXTREMES.values(), ids=EXTREMES.keys())
def test_extremes_decode_to_numbers(weight, values):
    codec = codec_for(weight)
    encoded = codec.encode(values)
    decoded = codec.decode(*encoded)
    largest = values.abs().max()
    reach = 65504.0 * 2 ** (weight.bits - 1) if weight.scale_dtype == "F16" else math.inf
    if not (weight.name == "mxfp8" and largest > 1e38):
        assert torch.isfinite(decoded).all()
    if 1e-5 < largest < reach:
        assert ((decoded - values).abs() <= largest * 0.5).all()
    if not largest:
        assert not decoded.any()


def test_a_block_of_one_value_is_met(weight):
    codec, values = codec_for(weight), torch.full((1, 128, 256), 0.37)
    error = (codec.decode(*codec.encode(values)) - values).abs().max() / 0.37
    assert error <= {4: 0.2, 8: 0.05}[weight.bits]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_only(weight, bad):
    values = weights(3, 128, 256)
    values[2, 5, 7] = bad
    with pytest.raises(CheckpointError, match=r"1 of 98304 weights .* NaN or infinite, first in expert 2"):
        codec_for(weight).encode(values)


def test_blocks_that_are_not_whole_at_the_ends():
    codec, values = codec_for(FP8_BLOCK), weights(2, 200, 333)
    encoded = codec.encode(values)
    assert encoded.codes.shape == values.shape
    assert encoded.scale.shape == (2, 2, 3)
    assert encoded.scale[1, 1, 2] == values[1, 128:, 256:].abs().max() / 448
    assert torch.allclose(codec.decode(*encoded), values, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("weight", [FP8_BLOCK, FP8_TENSOR, NVFP4, FP8_CHANNEL], ids=str)
def test_halves_have_scales_of_their_own(weight):
    codec = codec_for(weight)
    gate, up = weights(2, 160, 256), 50 * weights(2, 160, 256, seed=1)
    both = Encoded(torch.cat((gate, up), 1))
    roles = from_halves(codec.encode(in_halves(both, 2).codes), 2).roles("w13")
    decoded = decode_role(weight, roles, "w13", halves=2)
    assert torch.equal(decoded[:, :160], codec.decode(*codec.encode(gate)))
    assert torch.equal(decoded[:, 160:], codec.decode(*codec.encode(up)))
    expected = {FP8_BLOCK: (2, 4, 2), FP8_TENSOR: (2, 2, 1), NVFP4: (2, 320, 16), FP8_CHANNEL: (2, 320, 1)}
    assert tuple(roles["w13_scale"].shape) == expected[weight]
    if weight == NVFP4:
        assert tuple(roles["w13_global"].shape) == (2, 2, 1)


def test_one_scale_for_both_halves_holds_for_both():
    codes = torch.randint(0, 120, (3, 8, 64), dtype=torch.uint8)
    scale = torch.tensor([0.5, 1.0, 2.0])[:, None, None]
    roles = {"w13": codes, "w13_scale": scale}
    whole = codec_for(FP8_TENSOR).decode(codes, scale)
    assert torch.equal(decode_role(FP8_TENSOR, roles, "w13", halves=2), whole)


@pytest.mark.parametrize("rule", E8M0_RULES)
@pytest.mark.parametrize("weight", [MXFP4, MXFP8, FP8_BLOCK_E8M0], ids=str)
def test_rules_for_powers_of_two(weight, rule):
    codec = codec_for(weight, rule)
    largest, top = codec.grid.largest, 2.0 ** math.floor(math.log2(codec.grid.largest))
    first_saturating = {
        "floor": math.inf,
        "even": 2 * top * (1 - 2.0 ** -(codec.grid.mantissa + 2)),
        "up": largest,
    }
    for size in (top, largest, math.nextafter(largest, 1e9), 1.9 * top, 1.99 * top, 3.0, 1e-3, 7e20):
        size = torch.tensor(size, dtype=torch.float32).item()
        scale = 2.0 ** (math.floor(math.log2(size)) - math.log2(top))
        relative = size / scale
        if rule == "up":
            scale *= 2 if relative > largest else 1
        elif rule == "even":
            scale *= 2 if relative >= first_saturating["even"] else 1
        encoded = codec.encode(torch.full((1, 128, 256), size))
        assert 2.0 ** (encoded.scale.flatten()[0].item() - 127) == scale, (size, rule)


def test_rules_have_names():
    with pytest.raises(UsageError, match="no rule for scales is called 'down'"):
        codec_for(MXFP4, "down")


def test_16_bit_weights_are_their_own_codes():
    codec, values = codec_for(BF16), weights(2, 3, 5)
    encoded = codec.encode(values)
    assert encoded.codes.dtype is torch.bfloat16
    assert torch.equal(codec.decode(*encoded), values.bfloat16().float())
    assert torch.isfinite(codec.decode(*codec.encode(torch.full((1, 1, 2), 3.4e38)))).all()
    with pytest.raises(CheckpointError, match="floats without scales"):
        codec.decode(encoded.codes, torch.ones(2, 3, 1))


def test_a_format_says_what_it_lacks_or_has_too_much():
    codes, scale = torch.zeros(1, 4, 16).byte(), torch.zeros(1, 4, 2).byte()
    with pytest.raises(CheckpointError, match="needs a global scale"):
        codec_for(NVFP4).decode(codes, scale)
    with pytest.raises(
        CheckpointError, match=r"needs global scales \[1, parts of 4 rows, 1\], got \[1, 3, 1\]"
    ):
        codec_for(NVFP4).decode(codes, scale, global_scale=torch.ones(1, 3, 1))
    with pytest.raises(CheckpointError, match="has no global scale"):
        codec_for(MXFP4).decode(codes, scale[..., :1], global_scale=torch.ones(1, 1, 1))
    with pytest.raises(CheckpointError, match="has no zero points"):
        codec_for(MXFP4).decode(codes, scale[..., :1], scale[..., :1])
    with pytest.raises(CheckpointError, match="role w2 is missing; there are w13"):
        decode_role(MXFP4, {"w13": codes}, "w2")
    with pytest.raises(CheckpointError, match="do not make 2 equal parts"):
        decode_role(
            FP8_BLOCK, {"w13": torch.zeros(1, 3, 8).byte(), "w13_scale": torch.ones(1, 2, 1)}, "w13", 2
        )

"""Quantized tokens against the codec of the same weight format, bit for bit, and tiles of scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.convert.codecs import codec_for
from moectl.convert.layouts.trtllm import TILES_128X4
from moectl.errors import NoBackend, UsageError
from moectl.kernels.quantize_tokens import dequantize, in_tiles, quantize
from moectl.problem.schemes import (
    FP8_CHANNEL,
    FULL,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    ActFormat,
    WeightFormat,
)
from support.scale_tiles import from_tiles

BY_TOKEN, BY_BLOCK = ActFormat("fp8", 8, (1, FULL)), ActFormat("fp8", 8, (1, 128))
BY_POWERS = replace(BY_BLOCK, scale_dtype="E8M0")
STATIC = ActFormat("fp8", 8, (FULL, FULL), dynamic=False)
PAIRS = {
    "fp8 by token": (BY_TOKEN, FP8_CHANNEL, "floor"),
    "fp8 by block": (BY_BLOCK, WeightFormat("fp8", 8, (1, 128), "F32"), "floor"),
    "mxfp8": (MXFP8_ACT, MXFP8, "up"),
    "nvfp4": (NVFP4_ACT, NVFP4, "floor"),
}
"""Activation format, the weight format of the same blocks, and the codec's rule for E8M0 scales."""


def tokens(count: int = 37, hidden: int = 384) -> torch.Tensor:
    """Rows of sizes far apart, with a row and a block of zeros, and codes in the middle of two values."""
    generator = torch.Generator().manual_seed(count + hidden)
    sizes = torch.exp2(torch.randint(-12, 12, (count, 1), generator=generator).float())
    x = torch.randn(count, hidden, generator=generator) * sizes
    x[1], x[2, :128] = 0, 0
    x[3] = (torch.arange(hidden) % 97).float() / 8
    x[4], x[4, ::32] = 0.25, 6.0
    return x.bfloat16()


def global_scale(name: str, x: torch.Tensor) -> torch.Tensor | None:
    return x.float().abs().max()[None] / (448 * 6) if name == "nvfp4" else None


@pytest.mark.parametrize("name", PAIRS)
def test_decodes_as_the_codec_does(name: str) -> None:
    form, weight, rule = PAIRS[name]
    x = tokens()
    scale = global_scale(name, x)
    found = quantize(x, form, scale)
    assert len(found) == len(x) and found.format == form
    codes, scales = found.values.view(torch.uint8)[None], found.scales[None]
    judge = codec_for(weight, rule).decode(
        codes, scales, None, None if scale is None else scale.view(1, 1, 1)
    )
    assert torch.equal(dequantize(found, scale), judge[0])


@pytest.mark.parametrize("name", PAIRS)
def test_chooses_the_codes_and_scales_of_the_codec(name: str) -> None:
    form, weight, rule = PAIRS[name]
    x = tokens()
    judge = codec_for(weight, rule).encode(x.float()[None])
    found = quantize(x, form, None if judge.global_scale is None else judge.global_scale.view(1))
    assert judge.scale is not None
    assert torch.equal(found.values.view(torch.uint8), judge.codes[0])
    # The codec's smallest E8M0 byte, for blocks of zeros, is a number that float32 only has as a subnormal.
    hit = judge.scale[0] != 0 if name == "mxfp8" else torch.ones_like(judge.scale[0], dtype=torch.bool)
    assert torch.equal(found.scales[hit], judge.scale[0][hit]) and hit.float().mean() > 0.9


def test_scales_that_are_powers_of_two_are_the_smallest_with_which_no_code_saturates() -> None:
    x = tokens().float()
    x[5], x[5, 128:256], x[6] = 2.0**-140, 448 * 2.0**9, -(448 * 2.0**9 + 1)
    found, exact = quantize(x, BY_POWERS), quantize(x, BY_BLOCK)
    scales = found.scales
    assert found.format.rounds_scales and scales.dtype == torch.float32
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    # Blocks of zeros and of numbers too small keep the smallest normal number, which is a power of two.
    assert torch.equal(scales == 2.0**-126, exact.scales == 2.0**-126)
    assert ((exact.scales <= scales) & (scales < 2 * exact.scales)).all()
    assert scales[5, :2].tolist() == [2.0**-126, 2.0**9] and scales[6, 0] == 2.0**10
    blocks = x.view(len(x), -1, 128)
    codes = (blocks / scales[..., None]).to(torch.float8_e4m3fn)
    assert torch.equal(found.values.view(torch.uint8), codes.flatten(1).view(torch.uint8))
    assert (blocks / scales[..., None]).abs().max() <= 448
    # With a scale already a power of two, the codes are those of fp32 scales.
    same = scales == exact.scales
    assert same.any() and not same.all()
    both = [item.values.view(torch.uint8).view(len(x), -1, 128)[same] for item in (found, exact)]
    assert torch.equal(*both)


def test_infinities_and_nan_leave_other_blocks_alone() -> None:
    x = tokens().float()
    clean = quantize(x, BY_POWERS)
    x[7, 3], x[7, 200] = float("nan"), float("-inf")
    found = quantize(x, BY_POWERS)
    assert found.scales[7].isnan().tolist() == [True, False, False] and found.scales[7, 1].isinf()
    decoded = dequantize(found)
    assert decoded[7, :128].isnan().all() and decoded[7, 128:256].isnan().all()
    clean.values.view(torch.uint8)[7, :256] = found.values.view(torch.uint8)[7, :256]
    assert torch.equal(clean.values.view(torch.uint8), found.values.view(torch.uint8))


def test_static_scales_are_taken_as_they_are() -> None:
    x, scale = tokens(), torch.tensor([0.3])
    rounded = replace(STATIC, scale_dtype="E8M0")
    assert not rounded.rounds_scales
    assert torch.equal(quantize(x, rounded, scale).scales, quantize(x, STATIC, scale).scales)


def test_a_tie_between_two_codes_goes_to_the_even_one() -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    # A block whose largest number is 6 has a scale of 1.
    row = [6.0, *ties, *(-size for size in ties), 0.0]
    expected = [6.0, *ties.values(), *(-size for size in ties.values()), 0.0]
    found = quantize(torch.tensor([row]).bfloat16(), NVFP4_ACT)
    assert dequantize(found)[0].tolist() == expected


def test_static_scales_are_one_number() -> None:
    x, scale = tokens(), torch.tensor([0.5])
    found = quantize(x, STATIC, scale)
    assert found.scales.shape == (len(x), 1) and (found.scales == 0.5).all()
    expected = (x.float() / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.5
    assert torch.equal(dequantize(found, scale), expected)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 9), (512, 16)])
def test_scales_in_tiles_are_the_layout_of_tensor_cores(rows: int, columns: int) -> None:
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    tiles = in_tiles(scales)
    assert tiles.shape[0] % 128 == 0 and tiles.shape[1] % 4 == 0
    assert torch.equal(from_tiles(tiles, rows, columns), scales)
    full = torch.zeros(tiles.shape, dtype=torch.uint8)
    full[:rows, :columns] = scales
    assert torch.equal(TILES_128X4.apply(full[None]).flatten(), tiles.flatten())
    stacked = torch.stack((scales, scales.flip(0)))
    assert torch.equal(in_tiles(stacked)[1], in_tiles(stacked[1]))
    assert torch.equal(from_tiles(in_tiles(stacked), rows, columns), stacked)


@pytest.mark.parametrize(
    ("form", "hidden", "scale", "error", "says"),
    [
        (ActFormat("int4", 4, (1, 32)), 128, None, NoBackend, "there are quantizers to fp8, mxfp8, mxfp4"),
        (BY_BLOCK, 192, None, NoBackend, "192 columns are no whole number of blocks of 128"),
        (ActFormat("fp8", 8, (FULL, FULL)), 128, None, NoBackend, "static ones of everything"),
        (ActFormat("fp8", 8, (1, FULL), dynamic=False), 128, None, NoBackend, "static ones of everything"),
        (ActFormat("fp8", 8, (128, 128)), 128, None, NoBackend, "of one token or of its blocks"),
        (ActFormat("nvfp4", 4, (1, FULL)), 128, None, NoBackend, "4-bit codes have scales by block"),
        (STATIC, 128, None, UsageError, "need the layer's scale of inputs, got none"),
        (BY_BLOCK, 128, torch.ones(1), UsageError, "have no scale of the whole layer, got one"),
    ],
)
def test_refusals(
    form: ActFormat, hidden: int, scale: torch.Tensor | None, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        quantize(torch.ones(2, hidden, dtype=torch.bfloat16), form, scale)

"""Quantizers against rounding to nearest, block by block, through the codec's decode."""

from __future__ import annotations

import json
import math

import pytest
import torch

from moectl.convert.codecs import codec_for, decode_role, from_halves, in_halves
from moectl.convert.codecs.codec import Encoded
from moectl.convert.quantize import Quantizer, hessian, matrix_quantizer, quantize
from moectl.errors import CheckpointError, UsageError
from moectl.problem.schemes import BF16, FULL, MXFP4, MXFP8, NVFP4, WeightFormat, int_format

FORMATS = {
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "fp8 block": WeightFormat("fp8", 8, (128, 128), "F32"),
    "fp8 block e8m0": WeightFormat("fp8", 8, (128, 128), "E8M0"),
    "fp8 channel": WeightFormat("fp8", 8, (1, FULL), "F32"),
    "fp8 tensor": WeightFormat("fp8", 8, (FULL, FULL), "F32"),
    "int4 g32": int_format(4, 32),
    "int4 channel": int_format(4, FULL, "F32"),
    "int4 g32 zeros": int_format(4, 32, "F16", zero_point=True),
    "int8 channel": int_format(8, FULL),
    "int8 g64 zeros": int_format(8, 64, zero_point=True),
}
KINDS = ("mxfp4", "nvfp4", "fp8 block", "fp8 tensor", "int4 g32 zeros", "int8 channel")
"""Formats of every kind of blocks and scales, for what goes column by column and is slow on small ones."""

E, N, K = 2, 256, 256
"""Two blocks of 128 each way, so that every format has several blocks and halves of whole ones."""


@pytest.fixture(params=FORMATS.values(), ids=FORMATS.keys())
def weight(request):
    return request.param


def heavy(*shape, seed=0):
    """Student t of three degrees of freedom, some outlier columns and an all-zero stretch."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, *shape, generator=generator)
    w = normal[0] / (normal[1:].square().sum(0) / 3).sqrt()
    w[..., ::67] *= 20
    w[:, :128, :128] *= 1e-3
    w[:, 3, :64] = 0
    return w.to(torch.bfloat16)


def block_errors(weight, roles, w, halves=1, weights=1.0):
    """``[m, block rows, block columns]`` float64 sums of squared errors of ``w13``."""
    decoded = decode_role(weight, roles, "w13", halves)
    squared = (decoded.double() - w.double()).square() * weights
    parts = squared.reshape(-1, squared.shape[1] // halves, squared.shape[2])
    blocks = codec_for(weight).blocks(parts)
    return blocks.split(parts).sum((2, 4))


def rtn(weight, w, halves=1):
    encoded = codec_for(weight).encode(in_halves(Encoded(w), halves).codes)
    return from_halves(encoded, halves).roles("w13")


def test_rtn_is_the_codec_s_encoding(weight):
    w = heavy(E, N, K)
    found = quantize(w, Quantizer(weight, "rtn"), halves=2)
    expected = rtn(weight, w, 2)
    assert found.roles.keys() == expected.keys()
    for role, tensor in expected.items():
        assert torch.equal(found.roles[role], tensor), role


def test_search_is_never_worse_than_rtn_in_any_block(weight):
    w = heavy(E, N, K)
    found = quantize(w, Quantizer(weight), halves=2)
    ours, theirs = block_errors(weight, found.roles, w, 2), block_errors(weight, rtn(weight, w, 2), w, 2)
    assert (ours <= theirs * (1 + 1e-5)).all()
    assert ours.sum() < theirs.sum()


def test_weighted_search_is_never_worse_than_rtn_in_any_block(weight):
    w = heavy(E, N, K)
    importance = torch.rand(E, K, generator=torch.Generator().manual_seed(1)).pow(4) * 30
    found = quantize(w, Quantizer(weight), importance=importance)
    plain = quantize(w, Quantizer(weight))
    weights = importance[:, None].double()
    ours = block_errors(weight, found.roles, w, weights=weights)
    assert (ours <= block_errors(weight, rtn(weight, w), w, weights=weights) * (1 + 1e-5)).all()
    assert ours.sum() <= block_errors(weight, plain.roles, w, weights=weights).sum() * (1 + 1e-5)


@pytest.mark.parametrize("rule", ["floor", "even", "up"])
def test_the_rule_does_not_matter_much_after_a_search(rule):
    w = heavy(1, N, K)
    first = quantize(w, Quantizer(MXFP4)).report.errors.squared
    assert quantize(w, Quantizer(MXFP4, rule=rule)).report.errors.squared <= 1.01 * first


def correlated(tokens, k, seed=2):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(k // 4, k, generator=generator)
    x = torch.randn(tokens, k // 4, generator=generator) @ basis
    return x + 0.3 * torch.randn(tokens, k, generator=generator)


def output_error(weight, roles, w, h):
    lost = decode_role(weight, roles, "w13").double() - w.double()
    return ((lost @ h.double()) * lost).sum(-1)


@pytest.mark.parametrize("weight", [FORMATS[kind] for kind in KINDS], ids=KINDS)
def test_feedback_lowers_the_error_of_outputs(weight):
    w, h = heavy(E, N, K), hessian(correlated(512, K))
    found = quantize(w, Quantizer(weight, "gptq"), hessian=h)
    fed_back = output_error(weight, found.roles, w, h)
    nearest = output_error(weight, rtn(weight, w), w, h)
    searched = output_error(weight, quantize(w, Quantizer(weight), importance=h.diagonal()).roles, w, h)
    rows = {1: 1, 128: 128, FULL: N}[weight.block[0]]
    for other in (nearest, searched):
        by_scale = (t.reshape(E, -1, rows).sum(-1) for t in (fed_back, other))
        ours, theirs = by_scale
        assert (ours <= theirs * (1 + 1e-4)).all()
    assert fed_back.sum() < 0.8 * searched.sum()
    assert found.report.errors.output == pytest.approx(fed_back.sum().item(), rel=1e-3)
    assert found.report.nearest.output == pytest.approx(nearest.sum().item(), rel=1e-3)


def test_feedback_of_experts_with_activations_of_their_own():
    w, x = heavy(E, 64, K), [correlated(300, K, seed) for seed in (3, 4)]
    own = torch.stack([hessian(part) for part in x])
    found = quantize(w, Quantizer(int_format(4, 128), "gptq"), hessian=own)
    for i in range(E):
        alone = quantize(w[i : i + 1], Quantizer(int_format(4, 128), "gptq"), hessian=own[i])
        assert torch.equal(found.roles["w13"][i : i + 1], alone.roles["w13"])


def test_feedback_where_columns_were_never_used():
    w, x = heavy(1, 64, K), correlated(300, K)
    x[:, 10:20] = 0
    found = quantize(w, Quantizer(MXFP4, "gptq"), hessian=hessian(x))
    lost = (decode_role(MXFP4, found.roles, "w13") - w.float())[..., 10:20]
    assert lost.abs().max() < w[..., :32].abs().max()


def test_feedback_with_fewer_tokens_than_columns():
    w, h = heavy(1, 64, K), hessian(correlated(20, K))
    found = quantize(w, Quantizer(int_format(4, 32), "gptq"), hessian=h)
    assert found.report.errors.output < found.report.nearest.output


@pytest.mark.parametrize("method", ["search", "gptq"])
@pytest.mark.parametrize("weight", [FORMATS[kind] for kind in KINDS], ids=KINDS)
def test_batches_and_pieces_change_nothing(weight, method, monkeypatch):
    w, h = heavy(3, N, K), hessian(correlated(300, K))
    options = Quantizer(weight, method)
    whole = quantize(w, options, "w2", hessian=h)
    monkeypatch.setattr(matrix_quantizer, "PIECE", {"cpu": 128 * K})
    monkeypatch.setattr(matrix_quantizer, "MIN_PIECE", 128 * K)
    parts = [quantize(w[i : i + 1], options, "w2", hessian=h, first_expert=i) for i in range(3)]
    for role, tensor in whole.roles.items():
        assert torch.equal(tensor, torch.cat([part.roles[role] for part in parts])), role
    merged = parts[0].report.merge(parts[1].report).merge(parts[2].report)
    assert merged.weights == whole.report.weights == w.numel()
    assert merged.errors.squared == pytest.approx(whole.report.errors.squared, rel=1e-6)
    assert merged.errors.worst == whole.report.errors.worst
    again = quantize(w, options, "w2", hessian=h)
    assert all(torch.equal(again.roles[role], tensor) for role, tensor in whole.roles.items())


def test_the_report_is_what_decoding_shows(weight):
    w = heavy(E, N, K)
    found = quantize(w, Quantizer(weight), halves=2, first_expert=5)
    lost = decode_role(weight, found.roles, "w13", 2).double() - w.double()
    report, summary = found.report, found.report.summary()
    assert summary["rms_error"] == pytest.approx(lost.square().mean().sqrt().item(), rel=1e-5)
    snr = 10 * math.log10(w.double().square().sum() / lost.square().sum())
    assert summary["snr_db"] == pytest.approx(snr, abs=1e-4)
    assert summary["rtn"]["rms_error"] >= summary["rms_error"]
    errors = block_errors(weight, found.roles, w, 2)
    parts = w.double().square().reshape(2 * E, N // 2, K)
    blocks = codec_for(weight).blocks(parts)
    relative = (errors / blocks.split(parts).sum((2, 4))).nan_to_num(0).sqrt()
    assert report.errors.worst.relative == pytest.approx(relative.max().item(), rel=1e-4)
    matrix, row, column = (t.item() for t in (relative == relative.max()).nonzero()[0])
    worst = report.errors.worst
    assert (worst.expert, worst.column) == (5 + matrix // 2, column * blocks.columns)
    assert worst.row == matrix % 2 * (N // 2) + row * blocks.rows
    json.dumps(summary)


def test_16_bit_weights_are_rounded():
    w = torch.randn(2, 4, 8)
    found = quantize(w, Quantizer(BF16), "w2")
    assert torch.equal(found.roles["w2"], w.bfloat16())
    lost = w.bfloat16().double() - w.double()
    assert found.report.errors.squared == pytest.approx(lost.square().sum().item(), rel=1e-4)


def test_zeros_cost_nothing(weight):
    found = quantize(torch.zeros(1, 128, K), Quantizer(weight))
    assert not decode_role(weight, found.roles, "w13").any()
    assert found.report.summary()["snr_db"] is None
    assert found.report.errors.worst.relative == 0


@pytest.mark.parametrize("size", [1e-42, 1e-20, 3e38])
def test_extreme_sizes_are_no_worse_than_rtn(weight, size):
    w = torch.randn(1, 128, K, generator=torch.Generator().manual_seed(5)).clamp(-3, 3) / 3 * size
    found = quantize(w, Quantizer(weight))
    decoded = decode_role(weight, found.roles, "w13")
    usual = decode_role(weight, rtn(weight, w), "w13")
    assert torch.isfinite(decoded).all()
    ours, theirs = (((t.double() - w.double()) / size).square().sum() for t in (decoded, usual))
    if size == 1e-20 or size == 3e38:
        assert ours <= theirs * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    w = heavy(1, 16, 64).clamp(-1e4, 1e4).to(dtype)
    found, exact = quantize(w, Quantizer(NVFP4)), quantize(w.float(), Quantizer(NVFP4))
    assert all(torch.equal(found.roles[role], tensor) for role, tensor in exact.roles.items())


def test_what_is_refused():
    w = torch.randn(2, 128, 96)
    with pytest.raises(CheckpointError, match="whole groups and bytes, got 128 rows of 96"):
        quantize(w, Quantizer(int_format(4, 128)))
    with pytest.raises(CheckpointError, match="1 of 24576 weights to encode are NaN"):
        quantize(
            w.index_put((torch.tensor(1), torch.tensor(2), torch.tensor(3)), torch.tensor(math.nan)),
            Quantizer(MXFP4),
        )
    with pytest.raises(UsageError, match="gptq needs the Hessian"):
        quantize(w, Quantizer(MXFP4, "gptq"))
    with pytest.raises(UsageError, match=r"importance must be \[96\] or \[2, 96\], got \[3\]"):
        quantize(w, Quantizer(MXFP4), importance=torch.ones(3))
    with pytest.raises(UsageError, match="importance must be finite and not negative"):
        quantize(w, Quantizer(MXFP4), importance=-torch.ones(96))
    with pytest.raises(UsageError, match="no quantizer is called 'best'"):
        Quantizer(MXFP4, "best")
    with pytest.raises(UsageError, match="no rule for scales is called 'down'"):
        Quantizer(MXFP4, rule="down")
    with pytest.raises(UsageError, match="damping"):
        Quantizer(MXFP4, damping=0.0)
    with pytest.raises(UsageError, match="do not make 2 halves"):
        quantize(w[:, :127], Quantizer(MXFP4), halves=2)
    with pytest.raises(UsageError, match="cannot be merged"):
        first = quantize(w, Quantizer(MXFP4), "w2").report
        first.merge(quantize(w, Quantizer(MXFP4), "w13").report)

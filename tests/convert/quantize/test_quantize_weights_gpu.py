"""The same quantizers on a GPU: the same rounding, and scales as good."""

from __future__ import annotations

import pytest
import torch

from moectl.convert.codecs import codec_for, decode_role
from moectl.convert.quantize import Quantizer, hessian, quantize
from support.quantizers import FORMATS, tensors

pytestmark = pytest.mark.gpu
W = torch.stack([t.bfloat16() for t in tensors(256, 512).values()])


@pytest.mark.parametrize("weight", FORMATS.values(), ids=FORMATS.keys())
def test_codes_and_values_are_those_of_the_cpu(weight):
    codec = codec_for(weight)
    here, there = codec.encode(W), codec.encode(W.cuda())
    for ours, theirs in zip(here, there, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs.cpu())
    assert torch.equal(codec.decode(*here), codec.decode(*there).cpu())


@pytest.mark.parametrize("method", ["rtn", "search", "gptq"])
@pytest.mark.parametrize("weight", FORMATS.values(), ids=FORMATS.keys())
def test_errors_are_those_of_the_cpu(weight, method):
    x = torch.randn(700, 512, generator=torch.Generator().manual_seed(3))
    x = x @ torch.randn(512, 512, generator=torch.Generator().manual_seed(4)) / 20
    h, options = hessian(x), Quantizer(weight, method)
    here = quantize(W, options, halves=2, hessian=h).report
    found = quantize(W.cuda(), options, halves=2, hessian=h.cuda())
    assert all(tensor.is_cuda for tensor in found.roles.values())
    lost = decode_role(weight, found.roles, "w13", 2).cpu().double() - W.double()
    assert found.report.errors.squared == pytest.approx(lost.square().sum().item(), rel=1e-4)
    tolerance = 0.02 if method == "gptq" else 1e-3  # feedback amplifies the last bits of the factor
    assert found.report.errors.squared == pytest.approx(here.errors.squared, rel=tolerance)
    assert found.report.errors.output == pytest.approx(here.errors.output, rel=tolerance)

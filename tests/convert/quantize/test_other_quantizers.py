"""The default quantizer against other packages', at the same format on the same weights."""

from __future__ import annotations

import pytest
import torch

from moectl.convert.codecs import decode_role
from moectl.convert.quantize import Quantizer, quantize
from support.quantizers import FORMATS, PEERS, tensors

TENSORS = tensors(256, 1024)


def rms(decoded: torch.Tensor, w: torch.Tensor) -> float:
    return (decoded.double() - w.double()).square().mean().sqrt().item()


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("package", PEERS)
def test_the_default_is_at_least_as_accurate(package, name, kind):
    module, theirs = PEERS[package]
    pytest.importorskip(module, reason=f"{package} is not installed; only some are wanted for development")
    weight, w = FORMATS[name], TENSORS[kind]
    decoded = theirs(w.clone(), weight)
    if decoded is None:
        pytest.skip(f"{package} has no {name}")
    found = quantize(w[None], Quantizer(weight), "w2")
    ours = rms(decode_role(weight, found.roles, "w2")[0], w)
    assert 0 < ours <= rms(decoded, w) * (1 + 1e-6)


@pytest.mark.parametrize(
    "name", ["nvfp4", "int4 g32", "int4 g32 bf16 scales", "int4 g128 zeros", "fp8 block"]
)
def test_rounding_to_nearest_is_that_of_compressed_tensors(name):
    """The same usual scales, so that a gain of the search is a gain over them."""
    module, theirs = PEERS["compressed-tensors"]
    pytest.importorskip(module, reason="compressed-tensors needs Python 3.11")
    weight = FORMATS[name]
    for w in TENSORS.values():
        decoded = theirs(w.clone(), weight)
        assert decoded is not None
        found = quantize(w[None], Quantizer(weight, "rtn"), "w2")
        ours = rms(decode_role(weight, found.roles, "w2")[0], w)
        assert ours == pytest.approx(rms(decoded, w), rel=2e-3)

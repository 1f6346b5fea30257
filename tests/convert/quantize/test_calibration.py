"""Calibration activations from a file, and what is computed from them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from moectl.convert.codecs import decode_role
from moectl.convert.quantize import Calibration, Quantizer, hessian, importance, intermediate, quantize
from moectl.errors import CheckpointError
from moectl.kernels.activation import activate
from moectl.problem.moe_problem import Activation
from moectl.problem.schemes import MXFP4


def tokens(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_the_most_particular_activations_are_taken(tmp_path):
    stored = {"x": tokens(5, 8), "layers.3.x": tokens(6, 8, 1), "layers.3.experts.2.x": tokens(7, 8, 2)}
    save_file({name: t.bfloat16() for name, t in stored.items()}, tmp_path / "c.safetensors")
    calibration = Calibration(tmp_path / "c.safetensors")
    for layer, expert, name in ((0, 2, "x"), (3, 0, "layers.3.x"), (3, 2, "layers.3.experts.2.x")):
        assert torch.equal(calibration.tokens(layer, expert, 8), stored[name].bfloat16().float())
    assert calibration.shared(0)
    assert not calibration.shared(3)


def test_files_that_do_not_fit(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(CheckpointError, match="cannot be read"):
        Calibration(path)
    path.write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Calibration(path)
    save_file({"layers.1.x": tokens(4, 8), "layers.2.x": tokens(4, 8) / 0, "layers.3.x": tokens(0, 8)}, path)
    calibration = Calibration(path)
    with pytest.raises(CheckpointError, match=r"expert 7 of layer 0\..*layers.0.experts.7.x"):
        calibration.tokens(0, 7, 8)
    with pytest.raises(CheckpointError, match=r"must be floats \[tokens, 16\], got F32 \[4, 8\]"):
        calibration.tokens(1, 0, 16)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        calibration.tokens(2, 0, 8)
    with pytest.raises(CheckpointError, match=r"got F32 \[0, 8\]"):
        calibration.tokens(3, 0, 8)


@pytest.mark.parametrize("factor", [0.0, 1e20, 1e-20])
def test_activations_without_squares_are_refused(factor, tmp_path):
    save_file({"x": tokens(4, 8) * factor}, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match="must have magnitudes up to between 1e-15 and 1e\\+15, got"):
        Calibration(tmp_path / "c.safetensors").tokens(0, 0, 8)


def test_all_experts_are_looked_for_at_once(tmp_path):
    stored = {f"layers.0.experts.{expert}.x": tokens(4, 8) for expert in range(3)}
    save_file(stored, tmp_path / "c.safetensors")
    calibration = Calibration(tmp_path / "c.safetensors")
    calibration.check(0, 3, 8)
    with pytest.raises(CheckpointError, match="no activations for expert 3 of layer 0"):
        calibration.check(0, 4, 8)


def test_moments():
    x = tokens(10_000, 6)
    assert torch.allclose(hessian(x), (x.double().T @ x.double() / len(x)).float(), atol=1e-5)
    assert torch.allclose(importance(x), hessian(x).diagonal(), atol=1e-5)


def test_calibration_lowers_the_error_of_a_whole_expert():
    """Both matrices by feedback; the second sees the activations of the unquantized first one."""
    x = tokens(400, 16, 1) @ tokens(16, 64, 2) / 4 + 0.2 * tokens(400, 64, 3)
    w13, w2 = tokens(192, 64, 4)[None] / 8, tokens(64, 96, 5)[None] / 10
    activation = Activation("silu")

    def act(rows):
        return activate(rows, activation, "concatenated")

    middle = intermediate(x, w13[0], act)
    assert torch.allclose(middle, act(x @ w13[0].T), atol=1e-5)
    exact = middle @ w2[0].T

    def lost(options, **given):
        first = quantize(w13, options, "w13", halves=2, **{k: f(x) for k, f in given.items()})
        second = quantize(w2, options, "w2", **{k: f(middle) for k, f in given.items()})
        a, b = decode_role(MXFP4, first.roles, "w13")[0], decode_role(MXFP4, second.roles, "w2")[0]
        return (act(x @ a.T) @ b.T - exact).square().mean().item()

    nearest, searched = lost(Quantizer(MXFP4, "rtn")), lost(Quantizer(MXFP4), importance=importance)
    fed_back = lost(Quantizer(MXFP4, "gptq"), hessian=hessian)
    assert searched < nearest
    assert fed_back < 0.8 * nearest

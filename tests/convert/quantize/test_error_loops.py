"""The compiled loops against plain torch, and the search through both."""

from __future__ import annotations

import pytest
import torch

from moectl.convert.codecs import codec_for
from moectl.convert.codecs.blocks import ScaleBlocks
from moectl.convert.codecs.grids import E2M1, E4M3, INT4, INT8
from moectl.convert.quantize import Quantizer, error_loops, matrix_quantizer, quantize, threads
from moectl.problem.schemes import NVFP4, WeightFormat, int_format

GRIDS = {"E2M1": E2M1, "E4M3": E4M3, "INT4": INT4, "INT8": INT8}
SHAPES = {
    "groups": ScaleBlocks(64, 256, 1, 16),
    "blocks": ScaleBlocks(256, 384, 128, 128),
    "whole rows, not of whole lanes": ScaleBlocks(5, 107, 1, 107),
    "one row": ScaleBlocks(1, 64, 1, 32),
}


def cases(blocks, grid):
    generator = torch.Generator().manual_seed(0)
    w = blocks.split(torch.randn(1, blocks.n, blocks.k, generator=generator))
    scales = (3, *blocks.scales)
    factors = (torch.rand(scales, generator=generator) + 0.2) / grid.largest * 3
    shifts = torch.randint(-8, 8, scales, generator=generator).float()
    importance = ScaleBlocks(1, blocks.k, 1, blocks.columns).split(
        torch.rand(1, 1, blocks.k, generator=generator)
    )
    return w, factors, shifts, importance


@pytest.mark.parametrize("blocks", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_compiled_errors_are_those_of_plain_torch(grid, blocks):
    w, factors, shifts, importance = cases(blocks, grid)
    for shift in (None, shifts):
        for weights in (None, importance):
            expected = error_loops.plain_errors(grid, w, factors, shift, weights)
            found = error_loops.compiled_errors(grid, w, factors, shift, weights)
            assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("blocks", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_compiled_codes_are_those_of_plain_torch(grid, blocks):
    w, factors, shifts, _ = cases(blocks, grid)
    w[..., 0], w[..., 1] = 0.0, -0.0
    w[..., 2:4] *= 1e-3
    w[..., 4:6] *= 1e3
    for shift in (None, shifts[:1]) if grid in (INT4, INT8) else (None,):
        expected = error_loops.plain_codes(grid, w, factors[:1], shift)
        assert torch.equal(error_loops.compiled_codes(grid, w, factors[:1], shift), expected)


def test_threads_change_nothing(monkeypatch):
    w = torch.randn(2, 300, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for count in (1, 3):
        monkeypatch.setattr(matrix_quantizer, "thread_count", lambda count=count: count)
        monkeypatch.setattr(matrix_quantizer, "PIECE", {"cpu": 40 * 1024})
        monkeypatch.setattr(matrix_quantizer, "MIN_PIECE", 40 * 1024)
        found.append(quantize(w, Quantizer(NVFP4)))
    assert found[0].report == found[1].report
    assert all(torch.equal(found[1].roles[role], tensor) for role, tensor in found[0].roles.items())


def test_threads_of_pieces_leave_torch_s_own_alone():
    before = torch.get_num_threads()
    assert set(threads.run_on_threads(lambda _: torch.get_num_threads(), range(50), 3)) == {1}
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError):
        threads.run_on_threads(lambda number: 1 // number, [1, 0, 2], 2)


@pytest.mark.parametrize(
    "weight",
    [NVFP4, int_format(4, 128, zero_point=True), WeightFormat("fp8", 8, (128, 128), "F32")],
    ids=str,
)
def test_the_compiled_search_is_never_worse_than_rtn(weight, monkeypatch):
    monkeypatch.setattr(error_loops, "COMPILED_FROM", 0)
    w = torch.randn(1, 256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert error_loops.loops_for(w.device, w.numel()) is error_loops.COMPILED
    found = quantize(w, Quantizer(weight))
    codec = codec_for(weight)

    def errors(encoded):
        blocks = codec.blocks(w)
        return blocks.split((codec.decode(*encoded) - w.float()).double().square()).sum((2, 4))

    ours = errors(tuple(found.roles.get(f"w13{s}") for s in ("", "_scale", "_zero", "_global")))
    theirs = errors(codec.encode(w))
    assert (ours <= theirs * (1 + 1e-5)).all()
    assert ours.sum() < theirs.sum()


def test_small_matrices_and_other_devices_are_measured_plainly():
    assert error_loops.loops_for(torch.device("cpu"), error_loops.COMPILED_FROM - 1) is error_loops.PLAIN
    assert error_loops.loops_for(torch.device("cuda"), 1 << 30) is error_loops.PLAIN

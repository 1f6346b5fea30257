"""FlashInfer's own layout functions agree, for those that run without a GPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch

from moectl.convert.layouts import cutlass, trtllm
from moectl.convert.layouts.registry import Chain, layout_named
from moectl.problem.schemes import MXFP4, int_format
from support.layout_cases import canonical_tensors, problem_for, random_bytes, same

try:
    distribution("flashinfer-python")
except PackageNotFoundError:
    pytest.skip("flashinfer-python is not installed; the dev extra installs it", allow_module_level=True)

# Tests import it, which takes seconds: an installed package that does not load fails them.
EPILOGUE_TILE_M = 128


def shuffled(t: torch.Tensor, gated: bool) -> torch.Tensor:
    """Rows as FlashInfer's public functions put them: up before gate in turn, then the epilogue shuffle."""
    import flashinfer
    from flashinfer.fused_moe.core import reorder_rows_for_gated_act_gemm

    if gated:
        gate, up = t.chunk(2)
        t = reorder_rows_for_gated_act_gemm(torch.cat((up, gate)))
    return flashinfer.shuffle_matrix_a(t, EPILOGUE_TILE_M)


def tiled(scale: torch.Tensor, gated: bool) -> torch.Tensor:
    """Scales with FlashInfer's row indices for them, then its 128 x 4 tiles without a GPU."""
    from flashinfer.experimental.b12x.moe._shared.kernels import reference_flashinfer
    from flashinfer.fused_moe.core import reorder_rows_for_gated_act_gemm
    from flashinfer.utils import get_shuffle_matrix_sf_a_row_indices

    if gated:
        gate, up = scale.chunk(2)
        scale = reorder_rows_for_gated_act_gemm(torch.cat((up, gate)))
    scale = scale[get_shuffle_matrix_sf_a_row_indices(scale, EPILOGUE_TILE_M)]
    return reference_flashinfer._block_scale_interleave_128x4_torch(scale)


@pytest.mark.parametrize("matrix", ["w13", "w2"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (512, 384)])
def test_trtllm_mxfp4(matrix, hidden, intermediate):
    layout = layout_named("trtllm-mxfp4")
    problem = problem_for(layout, MXFP4, "concatenated", hidden, intermediate)
    tensors, chains = canonical_tensors(problem), layout.chains(problem)
    gated = matrix == "w13"
    weights = chains[matrix].apply(tensors[matrix])
    scales = chains[f"{matrix}_scale"].apply(tensors[f"{matrix}_scale"])
    for expert in range(problem.experts):
        assert same(weights[expert], shuffled(tensors[matrix][expert], gated))
        assert same(scales[expert].reshape(-1), tiled(tensors[f"{matrix}_scale"][expert], gated))


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_trtllm_mxint4(matrix):
    from flashinfer.fused_moe import convert_to_block_layout

    layout = layout_named("trtllm-mxint4")
    problem = problem_for(layout, int_format(4, 32), "concatenated", 512, 256)
    tensors, chains = canonical_tensors(problem), layout.chains(problem)
    gated = matrix == "w13"
    weights = chains[matrix].apply(tensors[matrix])
    scales = chains[f"{matrix}_scale"].apply(tensors[f"{matrix}_scale"])
    for expert in range(problem.experts):
        signed = tensors[matrix][expert] ^ 0x88
        assert same(weights[expert], convert_to_block_layout(shuffled(signed, gated), 128))
        assert same(scales[expert], tiled(tensors[f"{matrix}_scale"][expert], gated))


def test_cutlass_sm90_scales():
    from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm

    scale = random_bytes((3, 192, 24), "U8")
    assert same(Chain(cutlass.SCALES).apply(scale), interleave_moe_scales_for_sm90_mixed_gemm(scale))


def test_scale_tiles():
    from flashinfer.experimental.b12x.moe._shared.kernels import reference_flashinfer

    scale = random_bytes((3, 256, 12), "U8")
    theirs = reference_flashinfer._block_scale_interleave_128x4_torch(scale)
    assert same(Chain((trtllm.TILES_128X4,)).apply(scale).reshape(-1), theirs)

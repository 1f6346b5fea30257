"""FlashInfer's CUDA operators for repacking, in torch.

The scales' tiles are those of cuBLAS: 128 rows by 4 columns, row r at 16 * (r % 32) + 4 * (r // 32).
The weights of mixed-input GEMMs on Hopper take moectl's steps, which
tests/kernels/external/test_gpu_flashinfer.py compares with the operator itself.
"""

from __future__ import annotations

import torch


def block_scale_interleave(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = scales.shape[-2:]
    assert rows % 128 == 0 and columns % 4 == 0, "no padding here"
    tiles = scales.view(*scales.shape[:-2], rows // 128, 4, 32, columns // 4, 4)
    return tiles.movedim((-4, -2), (-2, -4)).reshape(-1)


nvfp4_block_scale_interleave = block_scale_interleave


def interleave_moe_weights_for_sm90_mixed_gemm(weight: torch.Tensor, quant_type: str) -> torch.Tensor:
    from moectl.convert.layouts import cutlass
    from moectl.convert.recipe.chain import Chain

    assert quant_type == "fp4"
    return Chain(cutlass.WEIGHTS).apply(weight)


OPERATORS = (
    "block_scale_interleave",
    "nvfp4_block_scale_interleave",
    "interleave_moe_weights_for_sm90_mixed_gemm",
)
"""Replaced wherever FlashInfer exports them."""

"""The warpwise kernels, compiled without a GPU: weights go from memory into mma operands directly."""

from __future__ import annotations

import pytest

from moectl.inspection import layer_without_weights
from moectl.kernels.triton.inspection.shipped import inspect
from moectl.kernels.triton.inspection.standin import STAND_INS
from moectl.kernels.triton.launch import Launch
from moectl.kernels.triton.warpwise import WarpwiseTile

LAYERS = {
    "moonshotai/Kimi-K2-Thinking": (WarpwiseTile(8, 1, 2, 4, 4, 4), 245),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (WarpwiseTile(8, 1, 2, 4, 2, 4), 220),
}
"""Models, a tile, and how many instructions a warp may spend on 64x64 weights: more mean that values move
between threads, or wait in shared memory, on their way into the products."""

PRODUCTS = 20
"""Of 64x64 weights with 8 tokens: 16, and 4 that take the surplus off."""

CASES = [("moonshotai/Kimi-K2-Thinking", arch) for arch in STAND_INS]
CASES += [(name, 90) for name in LAYERS if name != CASES[0][0]]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_weights_meet_no_shared_memory(name: str, arch: int) -> None:
    tile, most = LAYERS[name]
    kernels = inspect(layer_without_weights(name), 16, Launch("warpwise", tile), STAND_INS[arch])
    gemms = [kernel for kernel in kernels if "gemm" in kernel.name]
    assert len(gemms) == 2
    for gemm in gemms:
        print(gemm)
        assert gemm.mma and not gemm.wgmma and (arch != 90 or not gemm.faults)
        (loop,) = gemm.loops
        assert loop.products == PRODUCTS and loop.instructions <= most

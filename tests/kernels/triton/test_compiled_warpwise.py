"""The warpwise kernels, compiled without a GPU: weights go from memory into mma operands directly."""

from __future__ import annotations

import pytest
from devtools.inspection.offline_gpu import OFFLINE_GPUS
from devtools.inspection.published_kernels import layer_without_weights
from devtools.inspection.shipped_kernels import inspect

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.warpwise_launches import WarpwiseTile

LAYERS = {
    "moonshotai/Kimi-K2-Thinking": (WarpwiseTile(8, 1, 2, 4, 4, 4), 245),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (WarpwiseTile(8, 1, 2, 2, 2, 2, fused=1), 220),
}
"""Models, a tile, and how many instructions a warp may spend on 64x64 weights: more mean that values move
between threads, or wait in shared memory, on their way into the products."""

PRODUCTS = 20
"""Of 64x64 weights with 8 tokens: 16, and 4 that take the surplus off."""

KIMI, QWEN = LAYERS
CASES = [(KIMI, 80), (QWEN, 90)]
CASES += [
    pytest.param(KIMI, arch, marks=() if arch == 90 else pytest.mark.slow)
    for arch in OFFLINE_GPUS
    if arch > 80
]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_weights_meet_no_shared_memory(name: str, arch: int) -> None:
    tile, most = LAYERS[name]
    kernels = inspect(layer_without_weights(name), 16, Launch("warpwise", tile), OFFLINE_GPUS[arch])
    multiplying = [kernel for kernel in kernels if kernel.mma]
    assert len(multiplying) == 2 - tile.fused
    for kernel in multiplying:
        print(kernel)
        assert not kernel.wgmma and (arch != 90 or not kernel.faults)
    loops = [loop for kernel in multiplying for loop in kernel.loops]
    assert [loop.products for loop in loops] == [PRODUCTS, PRODUCTS]
    assert all(loop.instructions <= most for loop in loops)

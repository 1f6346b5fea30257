# mypy: ignore-errors
"""Device code for the tests of the hazard check: a product whose A operand is made in registers."""

import triton
import triton.language as tl


@triton.jit
def _bytes_by_bf16_kernel(
    W, X, Y, K, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PINNED: tl.constexpr
):
    """Y ``[BN, BM]`` = W ``[BN, K]`` int8 times X ``[K, BM]`` bf16, pipelined; the sum pinned or not."""
    rows, columns, depth = tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for k in tl.range(0, K, BK, num_stages=4):
        w = tl.load(W + rows[:, None] * K + k + depth[None, :])
        x = tl.load(X + (k + depth)[:, None] * BM + columns[None, :])
        acc = tl.dot(w.to(tl.bfloat16), x, acc)
        if PINNED:
            acc = tl.inline_asm_elementwise("// keep", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)
    tl.store(Y + rows[:, None] * BM + columns[None, :], acc)

# mypy: ignore-errors
"""Device code of `grouped_gemm.plain_gemm`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["share"])
def _plain_gemm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    order_ptr,
    expert_ptr,
    filled_ptr,
    n,
    k,
    blocks,
    assignments,
    share,
    SCALED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """``y[a] = x[a // share] @ weight[expert of a].T`` for the assignments ``a`` of one block.

    Programs of `GROUP_M` row blocks sweep the columns together, so that weights are reused in L2. With
    `SCALED` there is a scale for every 128 columns of a row of x, and every 128 x 128 weights. With `SWAPPED`
    the weights are the left operand, which has at least 64 rows in a wgmma.
    """
    program = tl.program_id(0)
    columns = tl.cdiv(n, BLOCK_N)
    first = program // (GROUP_M * columns) * GROUP_M
    height = tl.minimum(blocks - first, GROUP_M)
    within = program % (GROUP_M * columns)
    block = first + within % height
    column = within // height
    if block * BLOCK_M >= tl.load(filled_ptr):
        return
    rows = tl.load(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    there = rows < assignments
    source = rows // share
    expert = tl.load(expert_ptr + block).to(tl.int64)
    out = column * BLOCK_N + tl.arange(0, BLOCK_N)
    wrapped = (out % n).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    if SWAPPED:
        x_at = x_ptr + source[None, :] * k + inner[:, None]
        weight_at = weight_ptr + expert * n * k + wrapped[:, None] * k + inner[None, :]
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        x_at = x_ptr + source[:, None] * k + inner[None, :]
        weight_at = weight_ptr + expert * n * k + wrapped[None, :] * k + inner[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, k, BLOCK_K):
        if SWAPPED:
            x = tl.load(x_at, mask=there[None, :] & (inner[:, None] < k - done), other=0.0)
            weight = tl.load(weight_at, mask=inner[None, :] < k - done, other=0.0)
        else:
            x = tl.load(x_at, mask=there[:, None] & (inner[None, :] < k - done), other=0.0)
            weight = tl.load(weight_at, mask=inner[:, None] < k - done, other=0.0)
        if SCALED:
            spans = tl.cdiv(k, 128)
            x_scale = tl.load(x_scale_ptr + source * spans + done // 128, mask=there, other=0.0)
            strips = tl.cdiv(n, 128)
            weight_scale = tl.load(
                weight_scale_ptr + (expert * strips + wrapped // 128) * spans + done // 128
            )
            if SWAPPED:
                total += tl.dot(weight, x) * weight_scale[:, None] * x_scale[None, :]
            else:
                total += tl.dot(x, weight) * x_scale[:, None] * weight_scale[None, :]
        elif SWAPPED:
            total = tl.dot(weight, x, acc=total)
        else:
            total = tl.dot(x, weight, acc=total)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if SWAPPED:
        total = tl.trans(total, (1, 0))
    y_at = y_ptr + rows[:, None] * n + out[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=there[:, None] & (out[None, :] < n))

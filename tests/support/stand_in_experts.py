"""Writes a file like vLLM's `fused_moe.py`, whose imports cannot be made and whose kernel is written here.

The kernel has the parameters of vLLM's and computes the same, for where vLLM's own is not.
"""

from __future__ import annotations

from pathlib import Path

from moectl.kernels.external.vllm_triton import PARAMETERS

BODY = """
    block = tl.program_id(0) // tl.cdiv(N, BLOCK_SIZE_N)
    part = tl.program_id(0) % tl.cdiv(N, BLOCK_SIZE_N)
    if block * BLOCK_SIZE_M < tl.load(num_tokens_post_padded_ptr):
        slots = tl.load(sorted_token_ids_ptr + block * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M))
        live = slots < num_valid_tokens
        expert = tl.load(expert_ids_ptr + block).to(tl.int64)
        n = part * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        inside = n < N
        rows = slots // top_k
        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        for first in range(0, K, BLOCK_SIZE_K):
            k = first + tl.arange(0, BLOCK_SIZE_K)
            a = tl.load(a_ptr + rows[:, None] * stride_am + k[None, :] * stride_ak,
                        mask=live[:, None] & (k < K)[None, :], other=0.0)
            b = tl.load(b_ptr + expert * stride_be + k[:, None] * stride_bk + n[None, :] * stride_bn,
                        mask=(k < K)[:, None] & inside[None, :], other=0.0)
            product = tl.dot(a, b, out_dtype=tl.float32)
            if group_k > 0:
                scale = tl.load(a_scale_ptr + rows * stride_asm + (first // group_k) * stride_ask, mask=live,
                                other=0.0)
                columns = tl.load(b_scale_ptr + expert * stride_bse + (n // group_n) * stride_bsn
                                  + (first // group_k) * stride_bsk, mask=inside, other=0.0)
                product = product * scale[:, None] * columns[None, :]
            acc += product
        if use_fp8_w8a8 and group_k == 0:
            if per_channel_quant:
                scale = tl.load(a_scale_ptr + rows * stride_asm, mask=live, other=0.0)
                columns = tl.load(b_scale_ptr + expert * stride_bse + n * stride_bsn, mask=inside, other=0.0)
                acc = acc * scale[:, None] * columns[None, :]
            else:
                acc = acc * tl.load(a_scale_ptr) * tl.load(b_scale_ptr + expert)
        if HAS_BIAS:
            bias = tl.load(b_bias_ptr + expert * stride_bbe + n * stride_bbn, mask=inside, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if MUL_ROUTED_WEIGHT:
            acc = acc * tl.load(topk_weights_ptr + slots, mask=live, other=0.0)[:, None]
        write(c_ptr + slots.to(tl.int64)[:, None] * stride_cm + n[None, :] * stride_cn, acc.to(compute_type),
              live[:, None] & inside[None, :])
"""

HELPER = """
@triton.jit
def write(pointers, values, mask):
    tl.store(pointers, values, mask=mask)
"""

CONSTANTS = PARAMETERS[PARAMETERS.index("group_n") :]


def source(parameters: tuple[str, ...] = PARAMETERS) -> str:
    """The text of the file."""
    names = [f"    {name}{': tl.constexpr' if name in CONSTANTS else ''}," for name in parameters]
    head = (
        "import no_such_engine\nfrom no_such_engine import tl, triton\n\nraise SystemExit('was imported')\n"
    )
    signature = "\n".join(("@triton.jit", "def fused_moe_kernel(", *names, "):"))
    return f"{head}\n{HELPER}\n\n{signature}{BODY}"


def write_experts(peers: Path, parameters: tuple[str, ...] = PARAMETERS) -> Path:
    """The directory of the file below `peers`, a directory as ``MOECTL_PEERS`` names one."""
    folder = peers / "vllm_triton"
    (folder / "configs").mkdir(parents=True)
    (folder / "fused_moe.py").write_text(source(parameters))
    return folder

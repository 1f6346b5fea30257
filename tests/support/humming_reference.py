"""Humming's repacking thread by thread, and its CUDA operators by it, so that its Python runs on a CPU."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LANES, MINI = 32, 8
"""Threads of a block of 64 rows by 64 columns, and rows of the tiles that they share."""


def repacked(codes, bits, act_bits, *, plain=False, packed_k=False, fused=False) -> np.ndarray:
    """``[e, rows, words]`` of ``[e, n, k]`` codes: what every thread of every block collects and stores.

    `plain`: codes in their own order in a word. `packed_k`: 64 columns to a row of the result. `fused`: then
    without the exchange of rows and columns within a word, and with only signs interleaved.
    """
    e, n, k = codes.shape
    row_columns = 64 if packed_k else 256 // act_bits
    out = np.zeros((e, k // row_columns, n * row_columns * bits // 32), dtype=np.uint64)
    for nb in range(n // 64):
        for kb in range(k // 64):
            for lane in range(LANES):
                rows, columns = collected(lane, act_bits, packed_k and not fused)
                block = codes[:, 64 * nb : 64 * nb + 64, 64 * kb : 64 * kb + 64]
                words = in_words(block[:, rows, columns], bits, act_bits, plain, fused)
                per_row = 16 * bits // act_bits
                for i, word in enumerate(np.moveaxis(words, -1, 0)):
                    part, (region, s) = i // per_row, divmod(i % per_row, bits)
                    if packed_k:
                        row, half = kb, bits // 2
                        at = (
                            (nb * 4 + region * 2 + s // half) * 32 * bits
                            + lane * bits
                            + part * half
                            + s % half
                        )
                    else:
                        row = kb * 64 // row_columns + part
                        at = nb * 64 * row_columns * bits // 32 + region * 32 * bits + lane * bits + s
                    out[:, row, at] = word
    return out


@cache
def collected(lane: int, act_bits: int, swap: bool) -> tuple[list[int], list[int]]:
    """Rows and columns in a block of the 128 codes of a thread, in the order in which it packs them."""
    per_step, rows_of_warp = 32 // act_bits, act_bits * 4
    order = []
    for tile in range(64 // MINI):
        for step in range(act_bits // 2):
            for j in range(per_step):
                column = step * (128 // act_bits) + lane % 4 * per_step + j
                inner = (step % 2, tile % 2) if swap else (tile % 2, step % 2)
                key = (step // 2, tile * 8 // rows_of_warp, tile * 8 % rows_of_warp // 16, *inner, j)
                order.append((key, tile * MINI + lane // 4, column))
    order.sort()
    return [row for _, row, _ in order], [column for _, _, column in order]


def in_words(values, bits, act_bits, plain, fused) -> np.ndarray:
    """Codes of a thread as words, in the order in which registers are filled from them."""
    per, stride = 32 // bits, 32 // act_bits
    group = per // stride
    spread = [i if plain else i % group * stride + i // group for i in range(per)]
    sign = np.uint64(1 << (bits - 1))
    words = values.reshape(*values.shape[:-1], -1, per)
    low = (words if fused else words[..., spread]) & (sign - np.uint64(1))
    shifts = np.uint64(bits) * np.arange(per, dtype=np.uint64)
    return ((low | words[..., spread] & sign) << shifts).sum(-1, dtype=np.uint64)


def unpack_weight(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """``[..., n * 32 / bits]`` codes of int32 words, the first in the lowest bits."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << num_bits) - 1)).flatten(-2)


def pack_weight(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The words of `unpack_weight`."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int64)
    parts = codes.to(torch.int64).unflatten(-1, (-1, 32 // num_bits)) << shifts
    return as_words(parts.sum(-1).numpy().astype(np.uint64))


def as_words(values: np.ndarray) -> torch.Tensor:
    """int32 with the bits of unsigned numbers."""
    return torch.from_numpy(values.astype(np.uint32).view(np.int32))


def repack_weight(
    inputs: torch.Tensor,
    weight_bits: int,
    activation_bits: int,
    is_weight_packed: bool,
    should_preprocess_for_int2fp: bool = False,
    should_preprocess_with_zp: bool = False,
    zero_point: torch.Tensor | None = None,
    use_packed_k_layout: bool = False,
    use_native_dequant: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Codes ``[e, n, k]`` in Humming's order; integers as sign and distance from the zero point if asked."""
    assert activation_bits == 16 and is_weight_packed and not others["use_fused_e8m0_scale"]
    codes = unpack_weight(inputs, weight_bits)
    if should_preprocess_for_int2fp:
        around = torch.full_like(codes, 1 << (weight_bits - 1))
        if should_preprocess_with_zp:
            assert zero_point is not None
            rows = unpack_weight(zero_point.mT.contiguous(), weight_bits).mT
            around = rows.repeat_interleave(codes.shape[-1] // rows.shape[-1], -1)
        codes = torch.where(codes >= around, codes - around, (1 << weight_bits) - 1 - codes)
    values = codes.numpy().astype(np.uint64)
    plain = {"plain": use_native_dequant, "packed_k": use_packed_k_layout}
    return as_words(repacked(values, weight_bits, activation_bits, **plain))


def install(capability: tuple[int, int], compiler: tuple[int, int] = (13, 2)) -> None:
    """Have Humming's Python believe in a GPU of `capability` and a CUDA compiler, without either."""
    import humming.config.config
    import humming.device
    import humming.ops
    import humming.transform
    import humming.tune
    from humming.jit.runtime import KernelRuntime

    for operator in (unpack_weight, pack_weight, repack_weight):
        setattr(humming.ops, operator.__name__, operator)
    major, minor = capability
    info = SimpleNamespace(
        is_ppu=False,
        sm_major=major,
        sm_minor=minor,
        sm_version=10 * major + minor,
        sm_count=132,
        name="NVIDIA H200",
        max_registers_per_sm=65536,
        max_threads_per_sm=2048,
        max_smem_size=227 << 10,
        max_smem_size_kb=227.0,
        memory_bandwidth_gbps=4800.0,
        tensorcore_tops=defaultdict(lambda: 990.0, float16=990.0),
        default_smem_size=48 << 10,
        l2_cache_size=50 << 20,
        l2_cache_size_mb=50.0,
    )
    humming.device.current_device._value = info
    for module in (humming.transform, humming.tune, humming.config.config):
        module.DeviceInfo = lambda device=None: humming.device.current_device
    humming.tune.get_device_index = lambda device=None: 0
    humming.config.config._cuda_compiler_version = lambda compiler_: compiler
    KernelRuntime._get_compiler = staticmethod(lambda *words: "")
    torch.cuda.device = lambda device=None: nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.Tensor.cuda = lambda self, *words: self

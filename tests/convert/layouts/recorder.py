"""Recordings made here, from index formulas alone: no chain, no step, no layout of the project.

One function per producing function and format: from a random generator and sizes to the function's
name, its parameters, and the input and output tensors of a recording.
"""

from __future__ import annotations

import torch

F8 = torch.float8_e4m3fn
NIBBLE_N, NIBBLE_K = (0, 0, 8, 8, 0, 0, 8, 8), (0, 8, 0, 8, 1, 9, 1, 9)
ZERO_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def up(size, unit):
    return -(-size // unit) * unit


def data(g, *shape, most=256):
    return torch.randint(0, most, shape, dtype=torch.uint8, generator=g)


def codes_of(t):
    """``[e, n, k]`` codes of packed bytes."""
    return torch.stack((t & 15, t >> 4), -1).flatten(-2)


def packed(codes, bits):
    """Codes along the last axis as int32 words, lowest first."""
    per = 32 // bits
    parts = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, per)
    words = sum(parts[..., i] << (bits * i) for i in range(per))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def bytes_of(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


def grown(t, rows, columns, halves=1, fill=0):
    """Each half of the rows, and the columns, of ``[e, rows, columns]`` padded."""
    e, n, k = t.shape
    out = torch.full((e, halves, rows, columns), fill, dtype=t.dtype)
    out[:, :, : n // halves, :k] = t.reshape(e, halves, n // halves, k)
    return out.reshape(e, halves * rows, columns)


def marlin(codes, bits, a8=False):
    """``[e, n, k]`` codes to words, tile by tile and lane by lane."""
    e, n, k = codes.shape
    per, tile_n, tile_k = 32 // bits, (32 if a8 else 64), (32 if a8 else 16)
    words = torch.zeros(e, k // tile_k, n // tile_n, 1024 // per, per, dtype=torch.uint8)
    kt, nt = torch.arange(k // tile_k)[:, None], torch.arange(n // tile_n)[None]
    for lane in range(32):
        for w in range(4):
            for word, i, dn, dk in positions(lane, w, bits, a8):
                rows, columns = tile_n * nt + dn, tile_k * kt + dk
                words[:, :, :, word, i] = codes[:, rows.expand(len(kt), -1), columns.expand(-1, nt.shape[1])]
    return packed(words.flatten(-2), bits).reshape(e, k // 16, n * 16 // per)


def positions(lane, w, bits, a8):
    """Word of the tile, code of the word, and the row and column of the code inside the tile."""
    if a8:
        n, k = 16 * (w // 2) + 8 * (w % 2) + lane // 4, 4 * (lane % 4)
        if bits == 4:
            return [(4 * lane + w, i, n, k + i // 2 + 16 * (i % 2)) for i in range(8)]
        return [(8 * lane + 2 * w + h, i, n, k + i + 16 * h) for h in range(2) for i in range(4)]
    n, k = 16 * w + lane // 4, 2 * (lane % 4)
    if bits == 4:
        return [(4 * lane + w, i, n + NIBBLE_N[i], k + NIBBLE_K[i]) for i in range(8)]
    return [(8 * lane + 2 * w + h, i, n + 8 * h, k + (0, 8, 1, 9)[i]) for h in range(2) for i in range(4)]


def columns64(n):
    j = torch.arange(n)
    return 64 * (j // 64) + 8 * (j % 8) + j % 64 // 8


def columns32(n):
    j = torch.arange(n) % 32
    return 32 * (torch.arange(n) // 32) + 2 * (j // 8) + j % 2 + 8 * (j % 8 // 2)


def in_order(columns, order):
    """`columns` with those of every ``len(order)`` taken in `order`."""
    return columns.reshape(-1, len(order))[:, list(order)].reshape(-1)


def shuffled(rows, unit=32):
    r, q = torch.arange(rows), torch.arange(rows) % unit
    return unit * (r // unit) + unit // 8 * (q % 8) + q // 8


def gated(rows):
    """Up and gate in turn inside the shuffle, of rows with all gates first."""
    t = shuffled(rows)
    return torch.where(t % 2 == 0, rows // 2 + t // 2, t // 2)


def tiles(t):
    """Scales ``[e, rows, columns]`` in 128 x 4 tiles, padded with zero."""
    e, n, k = t.shape
    rows, columns = up(n, 128), up(k, 4)
    r, c = torch.arange(n)[:, None], torch.arange(k)[None]
    at = r // 128 * 128 * columns + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    out = torch.zeros(e, rows * columns, dtype=t.dtype)
    out[:, at.reshape(-1)] = t.reshape(e, -1)
    return out.reshape(e, rows, columns)


def blocks(t, width):
    return t.reshape(*t.shape[:-1], -1, width).transpose(1, 2).contiguous()


def swapped(t):
    return torch.cat(t.chunk(2, 1)[::-1], 1)


def marlin_int(g, e, h, inter, bits=4, group=32, zero=False, act="None", dtype=torch.bfloat16):
    function = "vllm oracle/int_wna16.py::_process_weights_marlin (x)"
    pad = up(inter, max(64, group))
    inputs, outputs = {}, {}
    a8 = act != "None"
    for name, n, k, full_n, full_k, halves in (("w13", inter, h, pad, h, 2), ("w2", h, inter, h, pad, 1)):
        codes = data(g, e, halves * n, k, most=1 << bits)
        groups = 1 if group == -1 else k // group
        scale = torch.rand(e, halves * n, groups, generator=g).to(dtype) + 0.5
        zeros = data(g, e, halves * n, groups, most=1 << bits)
        inputs |= {name: packed(codes, bits), f"{name}_scale": scale}
        known = codes
        if act == "torch.float8_e4m3fn":
            known = torch.where(codes >= 8, codes - 8, 15 - codes)
            scale = scale * 512
        outputs[name] = marlin(grown(known, full_n, full_k, halves), bits, a8)
        full_groups = 1 if group == -1 else full_k // group
        wide = grown(scale, full_n, full_groups, halves)
        order = columns64 if full_groups > 1 and not a8 else columns32
        if act == "torch.int8" and full_groups > 1:
            outputs[f"{name}_input_global_scale"] = scale.max().float() / 4096
            wide = (wide / scale.max() * 4096).round().to(torch.int16).view(dtype)
        outputs[f"{name}_scale"] = wide.transpose(1, 2)[:, :, order(halves * full_n)].contiguous()
        if zero:
            inputs[f"{name}_qzeros"] = packed(zeros.transpose(1, 2), bits).transpose(1, 2).contiguous()
            wide = grown(zeros, full_n, full_groups, halves).transpose(1, 2)
            found = columns64(halves * full_n)
            outputs[f"{name}_qzeros"] = packed(
                wide[:, :, found if a8 else in_order(found, ZERO_ORDER[bits])], bits
            )
    params = {"E": e, "hidden": h, "intermediate": inter, "padded_intermediate": pad, "bits": bits}
    return (
        function,
        params | {"group_size": group, "zp": zero, "act": act, "dtype": str(dtype)},
        inputs,
        outputs,
    )


def marlin_fp8(g, e, h, inter, mode="tensor", dtype=torch.bfloat16):
    function = "vllm marlin_utils_fp8.py::prepare_fp8_moe_layer_for_marlin"
    block = 128 if mode == "block" else 0
    pad = up(inter, block or 64)
    inputs, outputs = {}, {}
    for name, n, k, full_n, full_k, halves in (("w13", inter, h, pad, h, 2), ("w2", h, inter, h, pad, 1)):
        weight = data(g, e, halves * n, k)
        counts = {"tensor": (1, 1), "tensor2": (halves, 1), "channel": (halves * n, 1)}
        rows, columns = counts.get(mode, (halves * up(n, 128) // 128, up(k, 128) // 128))
        scale = torch.rand(e, rows, columns, generator=g) + 0.1
        inputs |= {
            name: weight.view(F8),
            f"{name}_scale": scale.flatten(1) if rows <= 2 and not block else scale,
        }
        outputs[name] = marlin(grown(weight, full_n, full_k, halves), 8)
        wide = torch.cat([part_rows(scale, i, halves, n, mode) for i in range(halves)], 1)
        wide = grown(wide, full_n, max(1, full_k // 128) if block else 1, halves).to(dtype)
        wide = wide * 2.0 ** (120 if dtype is torch.bfloat16 else 8)
        order = columns64 if wide.shape[2] > 1 else columns32
        outputs[f"{name}_scale"] = wide.transpose(1, 2)[:, :, order(halves * full_n)].contiguous()
    params = {"E": e, "hidden": h, "intermediate": inter, "intermediate_padded": pad, "mode": mode}
    return function, params | {"dtype": str(dtype)}, inputs, outputs


def part_rows(scale, half, halves, n, mode):
    """The scale of every row of one half."""
    rows = scale.shape[1]
    if mode == "channel":
        return scale[:, half * n : half * n + n]
    if mode == "block":
        return scale[:, rows // halves * half + torch.arange(n) // 128]
    return scale[:, [half if rows == 2 else 0] * n]


def awq(g, e, h, inter, group=32, dtype=torch.float16):
    """An AWQ layer: the Marlin one of zero points, its inputs packed along n in AWQ's order."""
    _, params, inputs, outputs = marlin_int(g, e, h, inter, 4, group, True, "None", dtype)
    for name in ("w13", "w2"):
        codes, scale = unpacked(inputs[name]), inputs[f"{name}_scale"]
        zeros = unpacked(inputs[f"{name}_qzeros"].transpose(1, 2).contiguous())
        inputs[name] = packed(along_n(codes.transpose(1, 2)), 4)
        inputs[f"{name}_qzeros"] = packed(along_n(zeros), 4)
        inputs[f"{name}_scale"] = scale.transpose(1, 2).contiguous()
    del params["zp"]
    return "vllm oracle/int_wna16.py::_process_awq_weights_marlin (y)", params, inputs, outputs


def unpacked(words):
    parts = [(words.to(torch.int64) >> 4 * i & 15).to(torch.uint8) for i in range(8)]
    return torch.stack(parts, -1).flatten(-2)


def along_n(codes):
    """Nibble i of a word is column ``AWQ_COLUMNS[i]`` of its eight."""
    return codes.reshape(*codes.shape[:-1], -1, 8)[..., list(AWQ_COLUMNS)].flatten(-2)


def mxfp4(g, e, h, inter, backend="FLASHINFER_TRTLLM_MXFP4_BF16", interleaved=False):
    kind = "convert_gpt_oss_weight" if interleaved else "convert_weight"
    function = f"vllm oracle/mxfp4.py::{kind}_to_mxfp4_moe_kernel_format({backend})"
    trtllm, sm90 = "TRTLLM" in backend, backend == "FLASHINFER_CUTLASS_MXFP4_BF16"
    hp, ip = up(h, 256 if trtllm else 128), up(inter, 128)
    inputs, outputs = {}, {}
    for name, n, k, full_n, full_k, halves in (("w13", inter, h, ip, hp, 2), ("w2", h, inter, hp, ip, 1)):
        weight, scale = data(g, e, halves * n, k // 2), data(g, e, halves * n, k // 32)
        bias = torch.randn(e, halves * n, generator=g).bfloat16()
        inputs |= {name: weight, f"{name}_scale": scale, f"{name}_bias": bias}
        parts = [weight, scale, bias.unsqueeze(2)]
        if interleaved and halves == 2:
            parts = [torch.cat((t[:, 0::2], t[:, 1::2]), 1) for t in parts]
        weight, scale, bias = (
            grown(t, full_n, columns, halves)
            for t, columns in zip(parts, (full_k // 2, full_k // 32, 1), strict=True)
        )
        if trtllm:
            rows = gated(2 * full_n) if halves == 2 else shuffled(full_n)
            outputs |= {name: weight[:, rows], f"{name}_bias": bias[:, rows, 0].float()}
            outputs[f"{name}_scale"] = tiles(scale[:, rows]).view(F8)
            continue
        if halves == 2:
            weight, scale, bias = (swapped(t) for t in (weight, scale, bias))
        outputs |= {name: woven(weight) if sm90 else weight, f"{name}_bias": bias[:, :, 0].contiguous()}
        outputs[f"{name}_scale"] = sm90_scales(scale) if sm90 else tiles(scale)
    params = {"E": e, "hidden": h, "intermediate": inter, "hidden_padded": hp, "intermediate_padded": ip}
    return function, params | {"w13_rows": "interleaved" if interleaved else "concatenated"}, inputs, outputs


def shifted(y):
    """Four bytes of E2M1 pairs as a word: low nibbles to the low half, code j shifted right by 3 j."""
    halves = []
    for nibbles in (y & 15, y >> 4):
        code = nibbles.to(torch.int64)
        sign, rest = code >> 3, code & 7
        slots = (sign << 15 | rest << 6) >> torch.tensor([0, 3, 6, 0])
        last = sign << 14 | rest >> 1 << 10 | (rest & 1) << 13
        halves.append(slots[..., 0] | slots[..., 1] | slots[..., 2] | last[..., 3])
    word = halves[0] | halves[1] << 16
    return torch.stack([(word >> 8 * i & 255).to(torch.uint8) for i in range(4)], -1)


def woven(t):
    _, n, k = t.shape
    out = torch.zeros_like(t)
    for lane in range(16):
        row = 16 * torch.arange(n // 16)[:, None, None] + torch.arange(8)[None, :, None]
        column = 32 * torch.arange(k // 32)[None, None] + 8 * (lane // 4) + lane % 4
        y = torch.stack([t[:, row + dn, column + dk] for dk in (0, 4) for dn in (0, 8)], -1)
        at = 32 * torch.arange(k // 32)[None, None] + 16 * (lane // 8) + 4 * (lane % 4)
        for i, byte in enumerate(shifted(y).unbind(-1)):
            out[:, row + 8 * (lane // 4 % 2), at + i] = byte
    return out


def sm90_scales(t):
    e, n, groups = t.shape
    out = torch.zeros(e, n // 64, groups // 4, 16, 16, dtype=torch.uint8)
    for r in range(n):
        for c in range(groups):
            out[:, r // 64, c // 4, r % 16, 4 * (r % 64 // 16) + c % 4] = t[:, r, c]
    return out


NVFP4 = {
    "FLASHINFER_TRTLLM": ("flashinfer_fp4_moe.py::prepare_nvfp4_moe_layer_for_fi_or_cutlass", 256),
    "FLASHINFER_CUTLASS": ("flashinfer_fp4_moe.py::prepare_nvfp4_moe_layer_for_fi_or_cutlass", 1),
    "VLLM_CUTLASS": ("flashinfer_fp4_moe.py::prepare_nvfp4_moe_layer_for_fi_or_cutlass", 1),
    "CUTEDSL": ("flashinfer_fp4_moe.py::prepare_nvfp4_moe_layer_for_flashinfer_cutedsl", 256),
    "B12X": ("b12x_moe.py::prepare_nvfp4_moe_layer_for_b12x", 1),
}


def nvfp4(g, e, h, inter, backend="FLASHINFER_TRTLLM", gate=True, twice=False):
    function, hidden = NVFP4[backend]
    own = backend in ("CUTEDSL", "B12X")
    hp, ip = up(h, hidden), up(inter, 64 if gate else 128)
    count = 2 if gate else 1
    inputs = {
        "a13_scale": torch.rand(e, 2 if twice else count, generator=g),
        "a2_scale": torch.rand(e, generator=g),
        "w13_scale_2": torch.rand(e, generator=g),
        "w2_scale_2": torch.rand(e, generator=g),
    }
    outputs = {name: t.clone() for name, t in inputs.items()}
    whole = backend not in ("VLLM_CUTLASS", "B12X")
    outputs["a13_scale"] = inputs["a13_scale"].max().repeat(e) if whole else inputs["a13_scale"].amax(1)
    if whole:
        outputs["a2_scale"] = inputs["a2_scale"].max().repeat(e)
    for name, n, k, full_n, full_k, halves in (("w13", inter, h, ip, hp, count), ("w2", h, inter, hp, ip, 1)):
        weight, scale = data(g, e, halves * n, k // 2), data(g, e, halves * n, k // 16, most=127)
        inputs |= {name: weight, f"{name}_scale": scale.view(F8)}
        pair = [grown(weight, full_n, full_k // 2, halves), grown(scale, full_n, full_k // 16, halves)]
        if backend == "FLASHINFER_TRTLLM":
            pair = [t[:, gated(2 * full_n) if halves == 2 else shuffled(full_n)] for t in pair]
        elif halves == 2 and backend in ("FLASHINFER_CUTLASS", "CUTEDSL"):
            pair = [swapped(t) for t in pair]
            if own:
                r = torch.arange(2 * full_n)
                low = 64 * (r // 128) + r % 128
                rows = torch.where(r % 128 < 64, low, full_n + low - 64)
                pair = [t[:, rows] for t in pair]
        outputs |= {name: pair[0], f"{name}_scale": tiles(pair[1]).view(F8)}
    params = {"E": e, "hidden": h, "intermediate": inter, "hidden_padded": hp, "intermediate_padded": ip}
    function = f"vllm {function}" + ("" if own else f"({backend})")
    return function, params | {"gated": gate, "activation": "silu"}, inputs, outputs


def flashinfer_fp8(g, e, h, inter, mode="tensor", trtllm=True, gate=True):
    function = f"vllm flashinfer_utils.py::prepare_fp8_moe_layer_for_fi(is_trtllm={trtllm})"
    unit = {"tensor": 16 if gate else 128, "block": 1, "mx": 128}[mode]
    hp, ip, count = up(h, 256 if mode == "mx" else 1), up(inter, unit), 2 if gate else 1
    inputs, outputs = {}, {}
    for name, n, k, full_n, full_k, halves in (("w13", inter, h, ip, hp, count), ("w2", h, inter, hp, ip, 1)):
        weight = data(g, e, halves * n, k)
        wide = grown(weight, full_n, full_k, halves)
        rows = gated(2 * full_n) if halves == 2 else shuffled(full_n)
        if mode == "mx":
            scale = data(g, e, halves * n, k // 32)
            made = tiles(grown(scale, full_n, full_k // 32, halves, 127)[:, rows])
        elif mode == "tensor":
            scale = torch.rand(e, generator=g)
            made = scale
        else:
            scale = torch.rand(e, halves * up(n, 128) // 128, k // 128, generator=g) * 1e-10 * 3
            made = (swapped(scale) if halves == 2 else scale).clamp(min=1e-10)
        if mode == "block":
            wide = swapped(wide) if halves == 2 else wide
            out = blocks(wide[:, shuffled(wide.shape[1], 16)], 128) if trtllm else wide
        elif trtllm:
            out = wide[:, rows]
        else:
            out = swapped(wide) if halves == 2 else wide
        inputs |= {name: weight.view(F8), f"{name}_scale": scale}
        outputs |= {name: out.contiguous().view(F8), f"{name}_scale": made}
    params = {"E": e, "hidden": h, "intermediate": inter, "hidden_padded": hp, "intermediate_padded": ip}
    return function, params | {"mode": mode, "gated": gate}, inputs, outputs


def bf16(g, e, h, inter, gate=True):
    function = "vllm flashinfer_utils.py::align_moe_weights_for_fi + more"
    ip, count = up(inter, 128), 2 if gate else 1
    inputs, outputs = {}, {}
    for name, n, k, full_n, full_k, halves in (("w13", inter, h, ip, h, count), ("w2", h, inter, h, ip, 1)):
        inputs[name] = torch.randn(e, halves * n, k, generator=g).bfloat16()
        wide = grown(inputs[name], full_n, full_k, halves)
        outputs[name] = blocks(wide[:, gated(2 * full_n) if halves == 2 else shuffled(full_n)], 64)
    params = {"E": e, "hidden": h, "intermediate": inter, "intermediate_padded": ip, "gated": gate}
    return function, params, inputs, outputs

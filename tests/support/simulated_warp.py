"""A warp that runs PTX instruction by instruction, in numpy; registers are 32 lanes of 32 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Register = NDArray[np.uint32]
LANE = np.arange(32)
G, C = LANE // 4, LANE % 4


def halves(r: Register, dtype: str) -> NDArray[np.float64]:
    """[32, 2] values of pairs of 16-bit floats."""
    pairs = torch.from_numpy(r.copy().view(np.int16).reshape(32, 2))
    return pairs.view(torch.bfloat16 if dtype == "bf16" else torch.float16).double().numpy()


def paired(values: torch.Tensor) -> Register:
    """[32, 2] values of a 16-bit dtype as registers."""
    return values.contiguous().view(torch.int16).numpy().view(np.uint32).reshape(32).copy()


def f32(values: NDArray[np.float64] | Register) -> Register:
    return np.asarray(values).astype(np.float32).view(np.uint32)


def as_f32(r: Register) -> NDArray[np.float64]:
    return r.view(np.float32).astype(np.float64)


def mma(dtype: str, a: Sequence[Register], b: Sequence[Register], c: Sequence[Register]) -> list[Register]:
    """m16n8k16: fragments in, fragments out, the sum in fp64 rounded once."""
    left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i in range(4):
        for half in range(2):
            left[G + 8 * (i % 2), 2 * C + 8 * (i // 2) + half] = halves(a[i], dtype)[:, half]
        sums[G + 8 * (i // 2), 2 * C + i % 2] = as_f32(c[i])
    for i in range(2):
        for half in range(2):
            right[2 * C + 8 * i + half, G] = halves(b[i], dtype)[:, half]
    d = left @ right + sums
    return [f32(d[G + 8 * (i // 2), 2 * C + i % 2]) for i in range(4)]


def lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    out = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a: Register, b: Register, selector: Register) -> Register:
    source = np.concatenate([a.view(np.uint8).reshape(32, 4), b.view(np.uint8).reshape(32, 4)], 1)
    picked = [source[:, int(selector[0]) >> 4 * i & 7] for i in range(4)]
    return np.stack(picked, 1).reshape(-1).view(np.uint32).copy()


def add_bf16x2(a: Register, b: Register) -> Register:
    return paired(torch.from_numpy(halves(a, "bf16") + halves(b, "bf16")).bfloat16())


def fma_bf16x2(a: Register, b: Register, c: Register) -> Register:
    return paired(torch.from_numpy(halves(a, "bf16") * halves(b, "bf16") + halves(c, "bf16")).bfloat16())


def mul_f16x2(a: Register, b: Register) -> Register:
    return paired(torch.from_numpy(halves(a, "fp16") * halves(b, "fp16")).half())


OPERATIONS: dict[str, Callable[..., Register]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "shr.b32": lambda a, n: a >> n,
    "shf.r.wrap.b32": lambda a, b, n: (a >> n) | (b << (32 - n)),
    "shf.l.wrap.b32": lambda a, b, n: (b << n) | (a >> (32 - n)),
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "max.u32": np.maximum,
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "add.rn.bf16x2": add_bf16x2,
    "max.u16x2": lambda a, b: np.maximum(a.view(np.uint16), b.view(np.uint16)).view(np.uint32),
    "mul.rn.bf16x2": lambda a, b: fma_bf16x2(a, b, np.zeros_like(a)),
    "mul.rn.f16x2": mul_f16x2,
    "fma.rn.bf16x2": fma_bf16x2,
    "sub.rn.f32": lambda a, b: f32(as_f32(a) - as_f32(b)),
    "mul.rn.f32": lambda a, b: f32(as_f32(a) * as_f32(b)),
    "fma.rn.f32": lambda a, b, c: f32(as_f32(a) * as_f32(b) + as_f32(c)),
    "cvt.f32.f16": lambda a: f32(halves(a, "fp16")[:, 0]),
}


def execute(text: str, registers: dict[str, Register]) -> None:
    """Runs `text` on the registers, which start as its operands."""

    def value(name: str) -> Register:
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), np.uint32)
        return registers[name] if name in registers else np.full(32, int(name, 0), np.uint32)

    for line in re.split(r";\s*", text.strip()[1:-1]):
        line = line.strip(" \n{}") if line.count("{") != line.count("}") else line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        if name.startswith("mma"):
            d, *operands = (group.split(",") for group in re.findall(r"\{([^}]*)\}", rest))
            dtype = "bf16" if "bf16" in name else "fp16"
            results = mma(dtype, *([value(x.strip()) for x in group] for group in operands))
            registers.update(zip((x.strip() for x in d), results, strict=True))
        elif unpacked := re.match(r"\{(\w+), (\w+)\}, (\S+)", rest):
            whole = value(unpacked[3])
            registers[unpacked[1]], registers[unpacked[2]] = whole & 0xFFFF, whole >> 16
        elif packed := re.match(r"(\S+), \{(\w+), (\w+)\}", rest):
            registers[packed[1]] = value(packed[2]) | value(packed[3]) << 16
        else:
            to, *operands = (x.strip() for x in rest.split(","))
            registers[to] = OPERATIONS[name](*map(value, operands))

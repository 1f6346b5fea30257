# mypy: ignore-errors
"""Inline wgmma for SM90: products whose number of token columns is any multiple of 16.

Triton's layouts are powers of two wide, so an accumulator of 96 columns takes two products, each of which
reads A again. Here wgmma is inline PTX: an accumulator is a ``[64, 16]`` tensor for each unit of 16 columns,
which together are the registers of a single product, and A is four ``[64, 16]`` tensors.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .prefill_tiles import _mma

KINDS = {gl.bfloat16: "bf16", gl.float16: "f16"}
"""Operand types as wgmma spells them."""


@gluon.constexpr_function
def _list(names):
    return "{" + ", ".join(names) + "}"


@gluon.constexpr_function
def _product_asm(UNITS, DTYPE):
    """PTX of a product over 64 columns of A.

    Operands: the accumulators, tied to the results; 16 registers of A; the tokens' byte offset from the start
    of shared memory, where they are rows of 128 swizzled bytes.
    """
    count = 8 * UNITS
    kind = KINDS[DTYPE]
    acc = _list([f"${i}" for i in range(count)])
    lines = [
        "{ .reg .b32 low; .reg .b64 d;",
        "mov.u32 low, global_smem;",
        f"add.u32 low, low, ${2 * count + 16};",
        "shr.u32 low, low, 4;",
        "mov.b64 d, {low, 0x40000040};",
        "wgmma.fence.sync.aligned;",
    ]
    for k in range(4):
        if k:
            lines.append("add.u64 d, d, 2;")
        a = _list([f"${2 * count + 4 * k + i}" for i in range(4)])
        shape = f"m64n{16 * UNITS}k16.f32.{kind}.{kind}"
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {acc}, {a}, d, 1, 1, 1, 0;")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _product_registers(UNITS):
    count = 8 * UNITS
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * 24)


@gluon.constexpr_function
def _wait_asm(LATER):
    return f"wgmma.wait_group.sync.aligned {LATER};"


@gluon.constexpr_function
def _wait_registers(UNITS, A):
    results = ["=f"] * (8 * UNITS) + ["=r"] * (4 * A)
    return ",".join(results + [str(i) for i in range(len(results))])


@gluon.constexpr_function
def _results(UNITS, DTYPE, A):
    """Result types: those of an accumulator, then of `A` tensors of A."""
    return (gl.float32,) * UNITS + (DTYPE,) * A


@gluon.jit
def joint_zeros(UNITS: gl.constexpr):
    """A zeroed accumulator of 64 rows."""
    acc = ()
    for _ in gl.static_range(UNITS):
        acc += (gl.full([64, 16], 0.0, gl.float32, _mma(16)),)
    return acc


@gluon.jit
def joint_operand(a):
    """An A operand [64, 64] as four tensors of 16 columns each."""
    M: gl.constexpr = _mma(16)
    even, odd = gl.split(a.reshape([64, 2, 2, 16]).permute((0, 3, 1, 2)))
    a0, a2 = gl.split(even)
    a1, a3 = gl.split(odd)
    return (
        gl.convert_layout(a0, M, assert_trivial=True),
        gl.convert_layout(a1, M, assert_trivial=True),
        gl.convert_layout(a2, M, assert_trivial=True),
        gl.convert_layout(a3, M, assert_trivial=True),
    )


@gluon.jit
def joint_issued(a, place, acc, UNITS: gl.constexpr):
    """Issues the product of `a` and the tokens at byte offset `place`; the accumulator is pending."""
    DTYPE: gl.constexpr = a[0].dtype
    ASM: gl.constexpr = _product_asm(UNITS, DTYPE)
    REGISTERS: gl.constexpr = _product_registers(UNITS)
    RESULTS: gl.constexpr = _results(UNITS, DTYPE, 0)
    at = gl.full([64, 16], place, gl.int32, _mma(16))
    return gl.inline_asm_elementwise(ASM, REGISTERS, acc + a + (at,), RESULTS, False, 8)


@gluon.jit
def joint_finished(acc, a, LATER: gl.constexpr, UNITS: gl.constexpr):
    """The accumulator once at most LATER later products are in flight, and the last operand in `a`.

    `a`, one operand or two concatenated ones, stays live until then.
    """
    DTYPE: gl.constexpr = a[0].dtype
    A: gl.constexpr = len(a)
    ASM: gl.constexpr = _wait_asm(LATER)
    REGISTERS: gl.constexpr = _wait_registers(UNITS, A)
    RESULTS: gl.constexpr = _results(UNITS, DTYPE, A)
    out = gl.inline_asm_elementwise(ASM, REGISTERS, acc + a, RESULTS, False, 8)
    return out[:UNITS], out[UNITS + A - 4 :]


@gluon.jit
def side_by_side(parts, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Tensors ``[64, 16]`` FIRST to FIRST + COUNT as one; COUNT is 1, 2 or 4."""
    if COUNT == 1:
        made = parts[FIRST]
    elif COUNT == 2:
        made = gl.join(parts[FIRST], parts[FIRST + 1]).permute((0, 2, 1)).reshape([64, 32])
    else:
        even = gl.join(parts[FIRST], parts[FIRST + 2])
        odd = gl.join(parts[FIRST + 1], parts[FIRST + 3])
        made = gl.join(even, odd).permute((0, 2, 3, 1)).reshape([64, 64])
    return made


@gluon.jit
def joined(acc, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Units FIRST to FIRST + COUNT of an accumulator as one tensor; COUNT is 1, 2 or 4."""
    made = side_by_side(acc, FIRST, COUNT)
    return gl.convert_layout(made, _mma(16 * COUNT), assert_trivial=True)

# mypy: ignore-errors
"""Inline wgmma for SM90 of weights in shared memory that are decoded into the first operand's registers: FP8
for 16-bit tokens, 64 columns of 64 rows at a time, or INT4 for INT8 tokens, 128 columns.

The weights lie in rows of 128 swizzled bytes. A thread reads the codes that its registers of wgmma's first
operand need, and converts them. FP8: two adjacent ones at a time; all E4M3 codes are exact in bf16 and fp16,
NaN among them. INT4: four bytes, whose low halves are columns 4t to 4t + 3 of 32, and whose high halves are
those 16 further on; INT8 codes with the same bits in their upper halves are 16 times as large. An operand is
16 registers, kept as tensors of an accumulator's shape (`shared_wgmma`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .mixed_width_wgmma import _wait_asm
from .prefill_tiles import _mma
from .shared_wgmma import _list, register_of, sums_of, unit_of

KINDS = {
    "bf16": ("k16.f32.bf16.bf16", ", 1, 1, 0"),
    "fp16": ("k16.f32.f16.f16", ", 1, 1, 0"),
    "int4": ("k32.s32.s8.s8", ""),
}
"""Types of operands as wgmma spells them, by those of the tokens, or of INT4 weights; and its arguments that
negate and transpose operands, if they exist."""

OPERAND = 16
"""Registers of an operand: four for each product, over 16 columns of 16 bits or 32 of 8."""


@gluon.constexpr_function
def _place_asm(KIND):
    return (
        "{ .reg .b32 lane, row, at; mov.u32 lane, %laneid; mov.u32 row, %tid.x; "
        "and.b32 row, row, 0x60; shr.u32 row, row, 1; shr.u32 at, lane, 2; add.u32 row, row, at; "
        "shl.b32 row, row, 7; shl.b32 at, at, 4; or.b32 row, row, at; "
        f"and.b32 at, lane, 3; shl.b32 at, at, {2 if KIND == 'int4' else 1}; or.b32 $0, row, at; }}"
    )


@gluon.jit
def lane_place(KIND: gl.constexpr):
    """Where a thread's first two codes are in a row block's bytes, or its first four bytes of INT4: those of
    columns 2t and 2t + 1 of row g of its warp's 16, of lane 4g + t. The 16 bytes that they are in are
    exchanged by the row's swizzle."""
    ASM: gl.constexpr = _place_asm(KIND)
    return gl.inline_asm_elementwise(ASM, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _converted(KIND, to):
    """PTX from the codes in `p` to a register of two numbers."""
    if KIND == "fp16":
        return f"cvt.rn.f16x2.e4m3x2 {to}, p;"
    return (
        "cvt.rn.f16x2.e4m3x2 both, p; mov.b32 {low, high}, both; cvt.f32.f16 x, low; cvt.f32.f16 y, high; "
        f"cvt.rn.bf16x2.f32 {to}, y, x;"
    )


@gluon.constexpr_function
def _decode_asm(HALF, KIND, UNIT):
    """PTX of an operand: rows g and g + 8, each with columns 2t, 2t + 1 and those 8 further on, or of INT4
    four columns from 4t on and those 16 further on.

    Operands: the registers; the thread's place; the row block's byte offset from the start of shared memory;
    of INT4 a zero of each row.
    """
    zeros = OPERAND + UNIT
    lines = [
        "{ .reg .b32 at, chunk, both; .reg .b16 p, low, high; .reg .f32 x, y;",
        "mov.u32 at, global_smem;",
        f"add.u32 at, at, ${OPERAND};",
        f"add.u32 at, at, ${OPERAND + UNIT // 2};",
    ]
    for k in range(4):
        lines.append(f"xor.b32 chunk, at, {16 * (4 * HALF + k)};")
        if KIND == "int4":
            for i, further in enumerate((0, 8 * 128)):
                lines.append(f"ld.shared.b32 both, [chunk+{further}];")
                lines.append(f"and.b32 ${4 * k + 2 + i}, both, 0xf0f0f0f0;")
                lines.append(f"shl.b32 both, both, 4; and.b32 ${4 * k + i}, both, 0xf0f0f0f0;")
                if k == 0:
                    lines.append(f"or.b32 ${i}, ${i}, ${zeros + 2 * i};")
            continue
        for i, further in enumerate((0, 8 * 128, 8, 8 * 128 + 8)):
            lines.append(f"ld.shared.u16 p, [chunk+{further}];")
            lines.append(_converted(KIND, f"${4 * k + i}"))
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _decode_registers(KIND, UNIT):
    return ",".join(["=&r"] * OPERAND + ["r"] * (UNIT // 2 * (3 if KIND == "int4" else 2)))


@gluon.constexpr_function
def tensors_of(UNIT):
    """Tensors of an operand, of UNIT columns each."""
    return OPERAND // (UNIT // 2)


@gluon.constexpr_function
def _operands(UNIT):
    """Result types of an operand."""
    return (gl.int32,) * tensors_of(UNIT)


@gluon.jit
def decoded(lane, rows, zeros, HALF: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr):
    """The operand of the first or second half of the columns of the row block at byte offset `rows`.

    Of INT4 it is there only once `zeros` are: one tensor of them, a zero of each row that depends on what
    products are to wait for.
    """
    UNIT: gl.constexpr = unit_of(WIDTH)
    ASM: gl.constexpr = _decode_asm(HALF, KIND, UNIT)
    REGISTERS: gl.constexpr = _decode_registers(KIND, UNIT)
    RESULTS: gl.constexpr = _operands(UNIT)
    place = gl.full([64, UNIT], lane, gl.int32, _mma(UNIT))
    block = gl.full([64, UNIT], rows, gl.int32, _mma(UNIT))
    arguments = (place, block)
    if len(zeros) > 0:
        arguments += (gl.zeros([64, UNIT], gl.int32, _mma(UNIT)) + gl.expand_dims(zeros[0], 1),)
    return gl.inline_asm_elementwise(ASM, REGISTERS, arguments, RESULTS, False, UNIT // 2)


@gluon.constexpr_function
def _issue_asm(WIDTH, KIND, FRESH, TIED):
    """PTX of the products of an operand and a line of the tokens.

    Operands: the accumulators, if TIED to the results; the operand's registers; the tokens' byte offset from
    the start of shared memory.
    """
    count = WIDTH // 2
    first = 2 * count if TIED else count
    acc = _list([f"${i}" for i in range(count)])
    types, more = KINDS[KIND]
    lines = [
        "{ .reg .b32 low; .reg .b64 d;",
        "mov.u32 low, global_smem;",
        f"add.u32 low, low, ${first + OPERAND};",
        "shr.u32 low, low, 4;",
        "mov.b64 d, {low, 0x40000040};",
        "wgmma.fence.sync.aligned;",
    ]
    for k in range(4):
        if k:
            lines.append("add.u64 d, d, 2;")
        a = _list([f"${first + 4 * k + i}" for i in range(4)])
        added = 0 if FRESH and k == 0 else 1
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{WIDTH}{types} {acc}, {a}, d, {added}{more};")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _issue_registers(WIDTH, KIND, TIED):
    count = WIDTH // 2
    tied = [str(i) for i in range(count)] if TIED else []
    of_sums = ("=" if TIED else "=&") + register_of(KIND)
    return ",".join([of_sums] * count + tied + ["r"] * (OPERAND + unit_of(WIDTH) // 2))


@gluon.jit
def decoded_issued(a, tokens, acc, WIDTH: gl.constexpr, KIND: gl.constexpr, FRESH: gl.constexpr):
    """Issues the products of operand `a` and the tokens at byte offset `tokens`; the sums are pending.

    They are in the registers of `acc`, if it isn't empty. With FRESH they do not begin with its numbers.
    """
    UNIT: gl.constexpr = unit_of(WIDTH)
    TIED: gl.constexpr = len(acc) > 0
    ASM: gl.constexpr = _issue_asm(WIDTH, KIND, FRESH, TIED)
    REGISTERS: gl.constexpr = _issue_registers(WIDTH, KIND, TIED)
    RESULTS: gl.constexpr = sums_of(WIDTH, 1, KIND)
    arguments = acc + a
    arguments += (gl.full([64, UNIT], tokens, gl.int32, _mma(UNIT)),)
    return gl.inline_asm_elementwise(ASM, REGISTERS, arguments, RESULTS, False, UNIT // 2)


@gluon.constexpr_function
def _finish_registers(WIDTH, KIND, HELD):
    results = ["=" + register_of(KIND)] * (WIDTH // 2) + ["=r"] * (HELD * OPERAND)
    return ",".join(results + [str(i) for i in range(len(results))])


@gluon.constexpr_function
def _finish_results(WIDTH, KIND, HELD):
    return sums_of(WIDTH, 1, KIND) + HELD * _operands(unit_of(WIDTH))


@gluon.jit
def decoded_finished(acc, a, coming, AHEAD: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr):
    """The sums once the products that read `a` are done, and `coming`, which was decoded before the wait if
    AHEAD, else empty."""
    ASM: gl.constexpr = _wait_asm(0)
    UNIT: gl.constexpr = unit_of(WIDTH)
    REGISTERS: gl.constexpr = _finish_registers(WIDTH, KIND, 1 + AHEAD)
    RESULTS: gl.constexpr = _finish_results(WIDTH, KIND, 1 + AHEAD)
    out = gl.inline_asm_elementwise(ASM, REGISTERS, acc + a + coming, RESULTS, False, UNIT // 2)
    return out[: WIDTH // UNIT], out[WIDTH // UNIT + tensors_of(UNIT) :]

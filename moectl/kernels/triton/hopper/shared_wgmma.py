# mypy: ignore-errors
"""Inline wgmma for SM90 whose operands are both in shared memory: a step over lines of 128 swizzled bytes.

An accumulator of 64 rows is a tuple of ``[64, 16]`` tensors, one for each unit of 16 columns (a single
``[64, 8]`` tensor for 8 columns), which together are the registers of one product of any such width.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .mixed_width_wgmma import _wait_asm
from .prefill_tiles import _mma

KINDS = {
    "bf16": ("k16.f32.bf16.bf16", ", 1, 1, 0, 0"),
    "fp16": ("k16.f32.f16.f16", ", 1, 1, 0, 0"),
    "fp8": ("k32.f32.e4m3.e4m3", ", 1, 1"),
    "int8": ("k32.s32.s8.s8", ""),
}
"""Operand types as wgmma spells them, and its arguments that negate and transpose operands, if they exist."""

BLOCK_BYTES = 64 * 128
"""A row block's operand in a piece."""


@gluon.constexpr_function
def unit_of(WIDTH):
    """Columns of the tensors of an accumulator of WIDTH columns."""
    return 8 if WIDTH == 8 else 16


@gluon.constexpr_function
def units_of(WIDTH):
    """Tensors of an accumulator of WIDTH columns."""
    return WIDTH // unit_of(WIDTH)


@gluon.constexpr_function
def _list(names):
    return "{" + ", ".join(names) + "}"


@gluon.constexpr_function
def _step_asm(WIDTH, BLOCKS, DEPTH, PIECE, TOKENS, KIND, FRESH, LEAD):
    """PTX of the products of BLOCKS row blocks over DEPTH pieces, one group of wgmmas; with LEAD the first
    32 bytes of columns are a group of their own.

    Operands: the accumulators, tied to the results unless FRESH, which begins new sums; the rows' byte offset
    from the start of shared memory, then the tokens'. PIECE and TOKENS are the bytes from one piece to the
    next, of rows and of tokens.
    """
    each = WIDTH // 2
    count = BLOCKS * each
    offsets = count if FRESH else 2 * count
    per_unit = unit_of(WIDTH) // 2
    types, more = KINDS[KIND]
    product = f"wgmma.mma_async.sync.aligned.m64n{WIDTH}{types}"
    lines = [
        "{ .reg .b32 low, rows, tokens; .reg .b64 a, b;",
        "mov.u32 low, global_smem;",
        f"add.u32 rows, low, ${offsets};",
        f"add.u32 tokens, low, ${offsets + per_unit};",
        "shr.u32 rows, rows, 4;",
        "shr.u32 tokens, tokens, 4;",
        "wgmma.fence.sync.aligned;",
    ]
    for piece in range(DEPTH):
        for k in range(4):
            for block in range(BLOCKS):
                at = (piece * PIECE + block * BLOCK_BYTES >> 4) + 2 * k
                acc = _list([f"${block * each + i}" for i in range(each)])
                first = 0 if FRESH and piece == 0 and k == 0 else 1
                lines += [
                    f"add.u32 low, rows, {at};",
                    "mov.b64 a, {low, 0x40000040};",
                    f"add.u32 low, tokens, {(piece * TOKENS >> 4) + 2 * k};",
                    "mov.b64 b, {low, 0x40000040};",
                    f"{product} {acc}, a, b, {first}{more};",
                ]
            if LEAD and piece == 0 and k == 0:
                lines.append("wgmma.commit_group.sync.aligned;")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def sum_type(KIND):
    """The dtype of sums of products."""
    return gl.int32 if KIND in ("int8", "int4") else gl.float32


@gluon.constexpr_function
def register_of(KIND):
    """The constraint of a register of sums."""
    return "r" if sum_type(KIND) == gl.int32 else "f"


@gluon.constexpr_function
def _step_registers(WIDTH, BLOCKS, KIND, FRESH):
    count = BLOCKS * WIDTH // 2
    tied = [] if FRESH else [str(i) for i in range(count)]
    of_sums = ("=&" if FRESH else "=") + register_of(KIND)
    return ",".join([of_sums] * count + tied + ["r"] * unit_of(WIDTH))


@gluon.constexpr_function
def _wait_registers(WIDTH, BLOCKS, KIND):
    count = BLOCKS * WIDTH // 2
    return ",".join(["=" + register_of(KIND)] * count + [str(i) for i in range(count)])


@gluon.constexpr_function
def sums_of(WIDTH, BLOCKS, KIND):
    """Types of accumulators: int32 of INT8 products, otherwise fp32."""
    return (sum_type(KIND),) * (BLOCKS * units_of(WIDTH))


@gluon.jit
def step_zeros(WIDTH: gl.constexpr, BLOCKS: gl.constexpr, KIND: gl.constexpr):
    """Zeroed accumulators of BLOCKS row blocks, one after the other in a tuple."""
    UNIT: gl.constexpr = unit_of(WIDTH)
    acc = ()
    for _ in gl.static_range(BLOCKS * units_of(WIDTH)):
        acc += (gl.full([64, UNIT], 0, sum_type(KIND), _mma(UNIT)),)
    return acc


@gluon.jit
def step_issued(
    rows, tokens, acc, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, DEPTH: gl.constexpr,
    PIECE: gl.constexpr, TOKENS: gl.constexpr, KIND: gl.constexpr, FRESH: gl.constexpr,
    LEAD: gl.constexpr = False,
):  # fmt: skip
    """Issues the products of a step, whose operands begin at byte offsets `rows` and `tokens`."""
    UNIT: gl.constexpr = unit_of(WIDTH)
    ASM: gl.constexpr = _step_asm(WIDTH, BLOCKS, DEPTH, PIECE, TOKENS, KIND, FRESH, LEAD)
    REGISTERS: gl.constexpr = _step_registers(WIDTH, BLOCKS, KIND, FRESH)
    RESULTS: gl.constexpr = sums_of(WIDTH, BLOCKS, KIND)
    a = gl.full([64, UNIT], rows, gl.int32, _mma(UNIT))
    b = gl.full([64, UNIT], tokens, gl.int32, _mma(UNIT))
    arguments = (a, b)
    if not FRESH:
        arguments = acc + arguments
    return gl.inline_asm_elementwise(ASM, REGISTERS, arguments, RESULTS, False, UNIT // 2)


@gluon.jit
def steps_finished(
    acc, LATER: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, KIND: gl.constexpr
):  # fmt: skip
    """The accumulators once at most LATER later steps' products are in flight."""
    ASM: gl.constexpr = _wait_asm(LATER)
    UNIT: gl.constexpr = unit_of(WIDTH)
    REGISTERS: gl.constexpr = _wait_registers(WIDTH, BLOCKS, KIND)
    RESULTS: gl.constexpr = sums_of(WIDTH, BLOCKS, KIND)
    return gl.inline_asm_elementwise(ASM, REGISTERS, acc, RESULTS, False, UNIT // 2)


@gluon.jit
def await_all_but_last():
    """Waits until at most the last group of products is in flight: others are done with shared memory."""
    gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 1; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )

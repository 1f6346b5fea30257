"""moectl's own layout, ``moectl-mtile64``: MXFP4, NVFP4, MXFP8, int4 and int8 for its GPU kernels.

Stored for e experts, with N rows and K columns of the padded matrix (`w13` of gated experts:
N = 2 * intermediate, K = hidden; `w2`: N = hidden, K = intermediate), both multiples of 64, and of the
group for K:

=======================  =========================  =====
4-bit weights            ``[e, N/64, K/64, 2048]``  U8
8-bit weights            ``[e, N/64, K/64, 4096]``  U8
MXFP4, MXFP8 scales      ``[e, N/64, K/64, 32]``    I32
NVFP4 scales             ``[e, N/64, K/64, 64]``    I32
NVFP4 global scales      ``[e, 2, 1]``, `w2` 1      F32
integer scales, g32      ``[e, N/64, K/64, 64]``    I32
integer scales, wider    ``[e, N/64, K/g, 32]``     I32
one scale for a row      ``[e, N/64, 1, 32]``       I32
zero points              as integer scales          I32
biases                   ``[e, N]``                 BF16 or F16, as the model's
=======================  =========================  =====

**4-bit weights.** A tile is 64 rows by 64 columns in the order ``(warp 4, g 8, c 4, j 4)`` of int32 words.
Word j of lane (g, c) holds rows ``16 * warp + g + 8 * h`` and columns ``16 * j + 2 * c + 8 * k8 + b``:
register ``r = 2 * k8 + h``, half word ``b``, which is the A operand of four 16-deep matrix instructions in
one 16-byte load. An integer code is at bits ``16 * b + 4 * r``; an MXFP4 code is spread as
`word_orders.E2M1_ROTATED` says, with byte r.

**8-bit weights.** Words in the order ``(warp 4, jj 2, g 8, c 4, jl 2, k8 2)``: a lane has two 16-byte loads,
and its word (jl, k8) of load jj holds the same rows, columns ``16 * (2 * jj + jl) + 2 * c + 8 * k8 + b``, at
byte ``2 * b + h``: bytes 0 and 2 are one register, 1 and 3 the other. MXFP8 codes are E4M3 as stored, whose
exponent and mantissa, shifted to bits 4 to 10 of a bf16, mean the value times 2^-120. Integer codes are two's
complement. In bf16, ``0x4300 | low 7 bits`` is 128 + those bits and ``0xC300 | sign bit`` is -128 or -256:
their sum is the value, with 3 operations for 2 values and a shift for each second register. In fp16, ``(byte
^ 0x6480)`` is 1152 + the value.

**Scales.** Words in the order ``(warp 4, g 8)``. MXFP4, MXFP8: bytes ``(h, kg)`` from the lowest, raw E8M0 of
row ``16 * warp + g + 8 * h`` and group ``kg`` of the tile's two. NVFP4: two words, jj = 0 then 1, each with
E4M3 of groups ``2 * jj`` and ``2 * jj + 1`` of the tile's four, row g in the low half and row g + 8 in the
high half: a half has the first group's scale at bits 4 to 10, and `word_orders.E4M3_PAIRS` has the rest.
There, a scale means its value times 2^-120 in bf16. Negative scales are refused. Integers in groups of 32:
two words, h = 0 then 1, each with group 0 in the low half and group 1 in the high half. Wider groups, or one
for the whole row: one word, row g in the low half and row g + 8 in the high half. Halves are the checkpoint's
16-bit floats. Zero points are 16-bit unsigned integers at the positions of their scales. Like codes, they are
unsigned: a weight is ``(code - zero) * scale``.

**Rows.** `w13` of gated experts, and its biases, are 8 gates, then the 8 ups with the same indices, in
every block of 16; rows of ungated experts keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, MXFP4, MXFP8, NVFP4, int_format
from ..canonical import INTERLEAVED, halves, padded, scale_dtype
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.rescale import AtMost
from ..steps.transforms import Bits, DtypeView, Pad, Rearrange, Step, Xor
from ..steps.value_steps import Shapes
from .weight_layout import WeightLayout
from .word_orders import BYTES, E2M1_ROTATED, E4M3_PAIRS, NIBBLES_APART, WORDS

_LANES = {"w": 4, "h": 2, "g": 8, "c": 4}

_TILES_4BIT = Rearrange("e (nb w h g) (kb j k8 c) -> e nb kb (w g c j k8 h)", {**_LANES, "j": 4, "k8": 2})
"""Bytes of two codes, neighbours along k, distributed to lanes."""

_TILES_8BIT = Rearrange(
    "e (nb w h g) (kb jj jl k8 c b) -> e nb kb (w jj g c jl k8 b h)",
    {**_LANES, "jj": 2, "jl": 2, "k8": 2, "b": 2},
)

_SIGNED = Xor(0x80)
"""Offset codes as two's complement."""

_ROWS = {"w": 4, "h": 2, "g": 8}

_GROUPS_OF_32 = Rearrange("e (nb w h g) (kb kg) -> e nb kb (w g h kg)", {**_ROWS, "kg": 2})
_GROUPS_OF_16 = Rearrange("e (nb w h g) (kb jj jl) -> e nb kb (w g jj h jl)", {**_ROWS, "jj": 2, "jl": 2})
_GROUPS_WIDER = Rearrange("e (nb w h g) kb -> e nb kb (w g h)", _ROWS)

_AS_16_BITS: tuple[Step, ...] = (Rearrange("e n (k b) -> e n k b", {"b": 1}), Pad(3, 2))
"""Bytes as little-endian 16-bit integers, with their two bytes as the last axis."""

_ZEROS_OF_32 = Rearrange("e (nb w h g) (kb kg) b -> e nb kb (w g h kg b)", {**_ROWS, "kg": 2})
_ZEROS_WIDER = Rearrange("e (nb w h g) kb b -> e nb kb (w g h b)", _ROWS)


def _eights(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded `w13` rows as 8 gates, 8 ups, so that one thread accumulates both of a pair."""
    if halves(problem, role) == 1:
        return ()
    tail = "" if role.endswith("_bias") else " k"
    order = "(n r s)" if problem.rows == INTERLEAVED else "(s n r)"
    return (Rearrange(f"e {order}{tail} -> e (n s r){tail}", {"s": 2, "r": 8}),)


_LARGEST_E4M3 = 0x7E
"""The byte of 448: above it are NaN and negative numbers."""


def _codes(problem: MoEProblem) -> tuple[Step, ...]:
    weight = problem.scheme.weight
    if weight.bits == 8:
        return (_TILES_8BIT,) if weight == MXFP8 else (_SIGNED, _TILES_8BIT)
    bits: Bits = E2M1_ROTATED if weight in (MXFP4, NVFP4) else NIBBLES_APART
    return (_TILES_4BIT, WORDS, bits, BYTES)


def _scales(problem: MoEProblem) -> tuple[Step, ...]:
    group = problem.scheme.weight.group
    if group == 16:
        return (_GROUPS_OF_16, WORDS, E4M3_PAIRS)
    return (_GROUPS_OF_32 if group == 32 else _GROUPS_WIDER, DtypeView(scale_dtype(problem), "I32"))


def _steps(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    start = (*padded(problem, role), *_eights(problem, role))
    match role.partition("_")[2]:
        case "global":
            return ()
        case "bias":
            return start
        case "scale":
            return (*start, *_scales(problem))
        case "zero":
            order = _ZEROS_OF_32 if problem.scheme.weight.group == 32 else _ZEROS_WIDER
            return (*start, *_AS_16_BITS, order, WORDS)
        case _:
            return (*start, *_codes(problem))


def _build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    outputs = {}
    for role in shapes:
        if role.endswith("_input"):
            continue
        signed = problem.scheme.weight == NVFP4 and role.endswith("_scale")
        values = (AtMost(_LARGEST_E4M3, "scales are E4M3 bytes of numbers that are not negative"),)
        outputs[role] = StoredOutput(role, values if signed else (), Chain(_steps(problem, role)))
    return outputs


MTILE64 = WeightLayout(
    name="moectl-mtile64",
    version=2,
    weights=(
        MXFP4,
        NVFP4,
        MXFP8,
        *(
            int_format(bits, group, zero_point=zero)
            for bits in (4, 8)
            for zero in (False, True)
            for group in (32, 64, 128, FULL)
        ),
    ),
    build=_build,
    scale_dtypes=("U8", "BF16", "F16"),
)

"""moectl's own layout, ``moectl-mtile64``: MXFP4 and symmetric int4 for its Triton kernels.

Stored for e experts, with N rows and K columns of the padded matrix (`w13`: N = 2 * intermediate,
K = hidden; `w2`: N = hidden, K = intermediate), both multiples of 64, and of the group for K:

=============  =========================  =====
weights        ``[e, N/64, K/64, 2048]``  U8
MXFP4 scales   ``[e, N/64, K/64, 32]``    I32
int4 g32       ``[e, N/64, K/64, 64]``    I32
int4 g64       ``[e, N/64, K/64, 32]``    I32
int4 g128      ``[e, N/64, K/128, 32]``   I32
biases         ``[e, N]``                 BF16 or F16, as the model's
=============  =========================  =====

A 2048-byte tile is 64 rows by 64 columns in the order ``(warp 4, g 8, c 4, j 4)`` of int32 words. Word
j of lane (g, c) holds rows ``16 * warp + g + 8 * h`` and columns ``16 * j + 2 * c + 8 * k8 + kb``:
register ``r = 2 * k8 + h``, half word ``kb``. An int4 code lies at bits ``16 * kb + 4 * r``; an MXFP4
code is spread as `words.E2M1_SHIFTED` says, with byte r.

Scale words are in the order ``(warp 4, g 8)``. MXFP4: bytes ``(h, kg)`` from the lowest, raw E8M0 of
row ``16 * warp + g + 8 * h`` and group ``kg`` of the tile's two. int4 g32: two words, h = 0 then 1,
each with the bf16 of group 0 in the low half and of group 1 in the high half. int4 g64 and g128: one
word, row g in the low half and row g + 8 in the high half.

`w13` rows, and its biases, are 8 gates then the 8 ups of the same indices in every block of 16.
"""

from __future__ import annotations

from ...problem import MoEProblem
from ...schemes import MXFP4, int_format
from ..canonical import INTERLEAVED, padded, scale_dtype
from ..transforms import Rearrange, Step, View
from ..weight_layout import WeightLayout, by_role
from .words import BYTES, E2M1_SHIFTED, NIBBLES_APART, WORDS

_TILES = Rearrange(
    "e (nb w h g) (kb j k8 c) -> e nb kb (w g c j k8 h)",
    {"w": 4, "h": 2, "g": 8, "j": 4, "k8": 2, "c": 4},
)
_GROUPS_OF_32 = Rearrange("e (nb w h g) (kb kg) -> e nb kb (w g h kg)", {"w": 4, "h": 2, "g": 8, "kg": 2})
_GROUPS_WIDER = Rearrange("e (nb w h g) kb -> e nb kb (w g h)", {"w": 4, "h": 2, "g": 8})


def _eights(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded `w13` rows as 8 gates, 8 ups; both of a pair then meet in one thread's accumulator."""
    if not role.startswith("w13"):
        return ()
    tail = "" if role.endswith("_bias") else " k"
    order = "(n r s)" if problem.rows == INTERLEAVED else "(s n r)"
    return (Rearrange(f"e {order}{tail} -> e (n s r){tail}", {"s": 2, "r": 8}),)


def _build(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    weight = problem.scheme.weight
    start = (*padded(problem, role), *_eights(problem, role))
    if role.endswith("_bias"):
        return start
    if role.endswith("_scale"):
        order = _GROUPS_OF_32 if weight.group == 32 else _GROUPS_WIDER
        return (*start, order, View(scale_dtype(problem), "I32"))
    bits = E2M1_SHIFTED if weight.name == "mxfp4" else NIBBLES_APART
    return (*start, _TILES, WORDS, bits, BYTES)


MTILE64 = WeightLayout(
    name="moectl-mtile64",
    version=1,
    weights=(MXFP4, *(int_format(4, group) for group in (32, 64, 128))),
    build=by_role(_build),
    scale_dtypes=("U8", "BF16"),
    ungated=False,
)

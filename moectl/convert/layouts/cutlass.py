"""FlashInfer CUTLASS on SM90: MXFP4 with 16-bit activations.

Stored per expert, with N rows and K columns of the padded matrix:

- weights ``[N, K / 2]`` bytes, two rows 8 apart and four columns woven into words;
- scales ``[N / 64, K / 128, 16, 16]`` E8M0 bytes;
- biases ``[N]`` in their own dtype.

`w13` rows are all ups, then all gates.
"""

from __future__ import annotations

from ...problem import MoEProblem
from ...schemes import MXFP4
from ..canonical import gate_then_up, padded
from ..transforms import Flip, Rearrange, Step
from ..weight_layout import WeightLayout, by_role
from .words import BYTES, E2M1_SHIFTED, WORDS

WEIGHTS: tuple[Step, ...] = (
    Rearrange(
        "e (g rh r) (k hh hl ch lo) -> e (g hl r) (k hh lo ch rh)",
        {"rh": 2, "r": 8, "hh": 2, "hl": 2, "ch": 2, "lo": 4},
    ),
    WORDS,
    E2M1_SHIFTED,
    BYTES,
)
SCALES: tuple[Step, ...] = (Rearrange("e (r i j) (g k) -> e r g j (i k)", {"i": 4, "j": 16, "k": 4}),)


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    flip = (*gate_then_up(problem, role), Flip(1)) if role.startswith("w13") else ()
    start = (*padded(problem, role), *flip)
    if role.endswith("_bias"):
        return start
    return (*start, *(SCALES if role.endswith("_scale") else WEIGHTS))


CUTLASS_SM90 = WeightLayout(
    name="cutlass-sm90",
    version=1,
    weights=(MXFP4,),
    build=by_role(_mxfp4),
    logical_dtypes={"w13": "F4", "w2": "F4", "w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"},
    scale_dtypes=("U8",),
)

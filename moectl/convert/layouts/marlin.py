"""Marlin: int4, int8 and MXFP4 weights with 16-bit activations.

Stored per expert, with N rows and K columns of the padded matrix (`w13`: N = 2 * intermediate):

- weights int32 ``[K / 16, N * 16 / codes per word]``: tiles of 16 k by 64 n, k-tile major;
- scales ``[groups, N]`` in their own dtype (MXFP4: raw E8M0 bytes);
- biases ``[N]``.

Rows keep the checkpoint's order. Scales are grouped exactly when there is more than one group, which
is how the kernel decides.
"""

from __future__ import annotations

from ...problem import MoEProblem
from ...schemes import FULL, MXFP4, int_format
from ..canonical import groups, padded
from ..transforms import Rearrange, Step
from ..weight_layout import WeightLayout, by_role
from .words import NIBBLES_APART, WORDS

_TILE = {"w": 4, "c": 2, "h": 8, "rh": 2, "l": 4}

WEIGHTS_4BIT: tuple[Step, ...] = (
    Rearrange("e (nt w c h) (kt rh l) -> e kt (nt h l w c rh)", _TILE),
    WORDS,
    NIBBLES_APART,
)
"""Bytes of two codes along k, then inside each word the even k before the odd ones."""

WEIGHTS_8BIT: tuple[Step, ...] = (
    Rearrange("e (nt w c h) (kt rh l rl) -> e kt (nt h l w c rl rh)", {**_TILE, "rl": 2}),
    WORDS,
)

SCALES_GROUPED = Rearrange("e (n j i) g -> e g (n i j)", {"i": 8, "j": 8})
SCALES_PER_CHANNEL = Rearrange("e (n a i b) g -> e g (n i a b)", {"a": 4, "i": 4, "b": 2})
SCALE_PAIRS = Rearrange("e g (n p q) -> e g (n q p)", {"p": 2, "q": 2})
BIAS = Rearrange("e (n a i b) -> e (n i a b)", {"a": 4, "i": 4, "b": 2})


def scale_steps(grouped: bool) -> tuple[Step, ...]:
    """Steps for integer scales ``[e, n, groups]``, for more than one group or for one."""
    return (SCALES_GROUPED if grouped else SCALES_PER_CHANNEL,)


def _integer(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    weight = problem.scheme.weight
    k = problem.dims.padded_hidden if role.startswith("w13") else problem.dims.padded_intermediate
    if role.endswith("_bias"):
        steps: tuple[Step, ...] = (BIAS,)
    elif role.endswith("_scale"):
        steps = scale_steps(groups(weight, k) > 1)
    else:
        steps = WEIGHTS_4BIT if weight.bits == 4 else WEIGHTS_8BIT
    return padded(problem, role) + steps


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    if role.endswith("_bias"):
        steps: tuple[Step, ...] = (BIAS,)
    else:
        steps = (SCALES_GROUPED, SCALE_PAIRS) if role.endswith("_scale") else WEIGHTS_4BIT
    return padded(problem, role) + steps


MARLIN_INT4 = WeightLayout(
    name="marlin-int4",
    version=1,
    weights=tuple(int_format(4, group) for group in (32, 64, 128, FULL)),
    build=by_role(_integer),
    scale_dtypes=("BF16", "F16"),
)

MARLIN_INT8 = WeightLayout(
    name="marlin-int8",
    version=1,
    weights=tuple(int_format(8, group) for group in (32, 64, 128, FULL)),
    build=by_role(_integer),
    scale_dtypes=("BF16", "F16"),
)

MARLIN_MXFP4 = WeightLayout(
    name="marlin-mxfp4",
    version=1,
    weights=(MXFP4,),
    build=by_role(_mxfp4),
    logical_dtypes={"w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"},
    scale_dtypes=("U8",),
)

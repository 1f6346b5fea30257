"""vLLM's CPU kernels on x86: BF16, FP8 block and MXFP4, transcribed from sources and never compared.

Stored per expert, with N rows and K columns of the padded matrix:

- BF16 ``[N / 16, K / 2, 32]``: 16 rows of two neighbouring k, for AMX;
- FP8 ``[N / 32, K / 2, 64]`` bytes: 32 rows of two neighbouring k; scales as they are;
- MXFP4 ``[N / 32, K / 2, 32]`` bytes: of the 64 codes that 32 rows have in one byte column, row after
  row, byte i has code i in its low nibble and code i + 32 in its high one; scales ``[N / 32, G, 32]``;
  biases F32.

`w13` rows are all gates, then all ups.
"""

from __future__ import annotations

from ...problem import MoEProblem
from ...schemes import BF16, FP8_BLOCK, MXFP4
from ..canonical import MODEL_DTYPE, gate_then_up, padded
from ..transforms import Codes, Rearrange, Step, Widen
from ..weight_layout import WeightLayout, by_role

_ROWS_OF_32 = Rearrange("e (o n) g -> e o g n", {"n": 32})


def _start(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    return (*padded(problem, role), *gate_then_up(problem, role))


def _bf16(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    if role.endswith("_bias"):
        return _start(problem, role)
    return (*_start(problem, role), Rearrange("e (o r) (k t) -> e o k (r t)", {"r": 16, "t": 2}))


def _fp8(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    if role.endswith(("_bias", "_scale")):
        return _start(problem, role)
    return (*_start(problem, role), Rearrange("e (o r) (k t) -> e o k (r t)", {"r": 32, "t": 2}))


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    start = _start(problem, role)
    if role.endswith("_bias"):
        return (*start, Widen(MODEL_DTYPE[problem.dtype]))
    if role.endswith("_scale"):
        return (*start, _ROWS_OF_32)
    codes = Rearrange("e (o h m) (k d) -> e o k (m d h)", {"h": 2, "m": 16, "d": 2})
    return (*start, Codes(4, True), codes, Codes(4, False))


CPU: tuple[WeightLayout, ...] = (
    WeightLayout(name="cpu-bf16", version=1, weights=(BF16,), build=by_role(_bf16)),
    WeightLayout(
        name="cpu-amx-fp8",
        version=1,
        weights=(FP8_BLOCK,),
        build=by_role(_fp8),
        logical_dtypes={"w13": "F8_E4M3", "w2": "F8_E4M3"},
        scale_dtypes=("F32", "BF16", "F16"),
    ),
    WeightLayout(
        name="cpu-amx-mxfp4",
        version=1,
        weights=(MXFP4,),
        build=by_role(_mxfp4),
        logical_dtypes={"w13": "F4", "w2": "F4", "w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"},
        scale_dtypes=("U8",),
        ungated=False,
    ),
)

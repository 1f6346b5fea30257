"""FlashInfer TRT-LLM: MXFP4 (16-bit or MXFP8 activations) and MXINT4.

Stored per expert, with N rows and K columns of the padded matrix:

- MXFP4 weights ``[N, K / 2]`` bytes, rows shuffled; scales ``[N, K / 32]`` E8M0 bytes, rows shuffled,
  then in 128 x 4 tiles (the shape is kept, the order is not); biases ``[N]`` F32, rows shuffled.
- MXINT4 weights ``[K / 256, N, 128]`` bytes of two's complement codes, rows shuffled, in blocks of 128
  bytes along K; scales ``[N * K / 32]``, rows shuffled, then in 128 x 4 tiles.

`w13` rows are up and gate alternating inside the shuffle. The kernels label raw E8M0 bytes as E4M3.
"""

from __future__ import annotations

from ...problem import MoEProblem
from ...schemes import MXFP4, int_format
from ..canonical import MODEL_DTYPE, gate_then_up, padded
from ..transforms import Flip, Rearrange, Step, Widen, Xor
from ..weight_layout import WeightLayout, by_role

TILES_128X4 = Rearrange("e (nb i j) (kb k) -> e (nb kb j i k)", {"i": 4, "j": 32, "k": 4})


def _shuffled_rows(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded rows in the order of the TRT-LLM epilogue: 32-row blocks, `w13` with up before gate."""
    tail = "" if role.endswith("_bias") else " k"
    start = padded(problem, role)
    if role.startswith("w13"):
        shuffle = Rearrange(f"e (s n a b){tail} -> e (n b s a){tail}", {"s": 2, "a": 8, "b": 2})
        return (*start, *gate_then_up(problem, role), Flip(1), shuffle)
    return (*start, Rearrange(f"e (n a b){tail} -> e (n b a){tail}", {"a": 8, "b": 4}))


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    rows = _shuffled_rows(problem, role)
    if role.endswith("_bias"):
        return (*rows, Widen(MODEL_DTYPE[problem.dtype]))
    if role.endswith("_scale"):
        k = problem.dims.padded_hidden if role.startswith("w13") else problem.dims.padded_intermediate
        return (*rows, TILES_128X4, Rearrange("e (n k) -> e n k", {"k": k // 32}))
    return rows


def _mxint4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    rows = _shuffled_rows(problem, role)
    if role.endswith("_scale"):
        return (*rows, TILES_128X4)
    return (*rows, Xor(0x88), Rearrange("e n (kb k) -> e kb n k", {"k": 128}))


TRTLLM_MXFP4 = WeightLayout(
    name="trtllm-mxfp4",
    version=1,
    weights=(MXFP4,),
    build=by_role(_mxfp4),
    logical_dtypes={"w13": "F4", "w2": "F4", "w13_scale": "F8_E4M3", "w2_scale": "F8_E4M3"},
    scale_dtypes=("U8",),
)

TRTLLM_MXINT4 = WeightLayout(
    name="trtllm-mxint4",
    version=1,
    weights=(int_format(4, 32),),
    build=by_role(_mxint4),
    scale_dtypes=("BF16",),
    bias=False,
)

"""FlashInfer TRT-LLM: MXFP4, MXINT4, NVFP4, FP8 (per tensor and block), MXFP8 and BF16.

Stored per expert, with N rows and K columns of the padded matrix:

- MXFP4, NVFP4 weights ``[N, K / 2]`` and FP8 per tensor, MXFP8 weights ``[N, K]`` bytes, rows shuffled;
- MXINT4 weights ``[K / 256, N, 128]`` bytes of two's complement codes, rows shuffled, in blocks of 128
  bytes along K; BF16 ``[K / 64, N, 64]`` and FP8 block ``[K / 128, N, 128]`` also in such blocks;
- block scales, dtype unchanged, rows shuffled, then in 128 x 4 tiles within the same shape (MXINT4: flat).
  FP8 block scales are F32, at least 1e-10, `w13` up before gate;
- FP8 per tensor scales ``[e]`` F32; NVFP4 global scales of weights ``[e]`` F32 (gate's for `w13`) and of
  activations ``[e]`` F32, the layer's maximum; with one global activation scale per token, ungated experts
  have more padding. The two are stored separately: engines compute their product once for kernels that need
  it;
- biases ``[N]`` F32, rows shuffled.

`w13` rows are up and gate alternating inside the shuffle (FP8 block: up before gate, then the shuffle).
MXFP4 kernels take raw E8M0 bytes labelled as E4M3.
"""

from __future__ import annotations

from dataclasses import replace

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import BF16, FP8_BLOCK, FP8_TENSOR, MXFP4, MXFP8, NVFP4, int_format
from ..canonical import groups, halves, padded, up_then_gate
from ..steps.transforms import Rearrange, Step, Widen, Xor
from .scaled_tensors import (
    E4M3_SCALES,
    E4M3_WEIGHTS,
    F4_WEIGHTS,
    FLOAT_DTYPES,
    fp8_block,
    fp8_tensor,
    nvfp4,
)
from .weight_layout import WeightLayout, by_role

TILES_128X4 = Rearrange("e (nb i j) (kb k) -> e (nb kb j i k)", {"i": 4, "j": 32, "k": 4})
_ONE_SCALE = 127
"""The E8M0 byte of 1."""


def shuffled_rows(problem: MoEProblem, role: str, fill: int = 0) -> tuple[Step, ...]:
    """Steps that pad rows and order them for the TRT-LLM epilogue: 32-row blocks, `w13` up before gate."""
    tail = "" if role.endswith("_bias") else " k"
    start = padded(problem, role, fill)
    if halves(problem, role) == 2:
        shuffle = Rearrange(f"e (s n a b){tail} -> e (n b s a){tail}", {"s": 2, "a": 8, "b": 2})
        return (*start, *up_then_gate(problem, role), shuffle)
    return (*start, Rearrange(f"e (n a b){tail} -> e (n b a){tail}", {"a": 8, "b": 4}))


def tiled(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Steps that put scales in 128 x 4 tiles within the same shape."""
    k = problem.dims.padded_hidden if role.startswith("w13") else problem.dims.padded_intermediate
    return (TILES_128X4, Rearrange("e (n k) -> e n k", {"k": groups(problem.scheme.weight, k)}))


def _in_blocks(width: int) -> Rearrange:
    return Rearrange("e n (kb k) -> e kb n k", {"k": width})


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    rows = shuffled_rows(problem, role)
    if role.endswith("_bias"):
        return (*rows, Widen(MODEL_DTYPES[problem.dtype]))
    return (*rows, *tiled(problem, role)) if role.endswith("_scale") else rows


def _mxint4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    rows = shuffled_rows(problem, role)
    return (*rows, TILES_128X4) if role.endswith("_scale") else (*rows, Xor(0x88), _in_blocks(128))


def _mxfp8(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    if role.endswith("_scale"):
        return (*shuffled_rows(problem, role, _ONE_SCALE), *tiled(problem, role))
    return shuffled_rows(problem, role)


def _bf16(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    return (*shuffled_rows(problem, role), _in_blocks(64))


def _fp8_block(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    shuffle = Rearrange("e (n a b) k -> e (n b a) k", {"a": 8, "b": 2})
    return (*padded(problem, role), *up_then_gate(problem, role), shuffle, _in_blocks(128))


TRTLLM_MXFP4 = WeightLayout(
    name="trtllm-mxfp4",
    version=1,
    weights=(MXFP4,),
    build=by_role(_mxfp4),
    logical_dtypes=F4_WEIGHTS | E4M3_SCALES,
    scale_dtypes=("U8",),
    ungated=False,
)

TRTLLM_MXINT4 = WeightLayout(
    name="trtllm-mxint4",
    version=1,
    weights=(int_format(4, 32),),
    build=by_role(_mxint4),
    scale_dtypes=("BF16",),
    bias=False,
    ungated=False,
)

TRTLLM_NVFP4 = WeightLayout(
    name="trtllm-nvfp4",
    version=1,
    weights=(NVFP4,),
    build=nvfp4(
        shuffled_rows,
        lambda problem, role: (*shuffled_rows(problem, role), *tiled(problem, role)),
        inputs="layer",
    ),
    logical_dtypes=F4_WEIGHTS | E4M3_SCALES,
    scale_dtypes=("U8",),
    bias=False,
)

TRTLLM: tuple[WeightLayout, ...] = (
    TRTLLM_MXFP4,
    TRTLLM_MXINT4,
    TRTLLM_NVFP4,
    replace(TRTLLM_NVFP4, name="trtllm-nvfp4-act-nvfp4-per-token"),
    WeightLayout(
        name="trtllm-fp8-tensor",
        version=1,
        weights=(FP8_TENSOR,),
        build=fp8_tensor(shuffled_rows),
        logical_dtypes=E4M3_WEIGHTS,
        scale_dtypes=FLOAT_DTYPES,
        bias=False,
    ),
    WeightLayout(
        name="trtllm-fp8-block",
        version=1,
        weights=(FP8_BLOCK,),
        build=fp8_block(_fp8_block, up_then_gate),
        logical_dtypes=E4M3_WEIGHTS,
        scale_dtypes=FLOAT_DTYPES,
        bias=False,
    ),
    WeightLayout(
        name="trtllm-mxfp8",
        version=1,
        weights=(MXFP8,),
        build=by_role(_mxfp8),
        logical_dtypes=E4M3_WEIGHTS | {"w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"},
        scale_dtypes=("U8",),
        bias=False,
    ),
    WeightLayout(
        name="trtllm-bf16",
        version=1,
        weights=(BF16,),
        build=by_role(_bf16),
        bias=False,
    ),
)

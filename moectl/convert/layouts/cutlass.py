"""CUTLASS kernels of FlashInfer and vLLM, CuteDSL and b12x: MXFP4, NVFP4, FP8 and BF16.

Stored per expert, with N rows and K columns of the padded matrix:

- weights ``[N, K / 2]`` or ``[N, K]`` bytes, or 16-bit floats; SM90 MXFP4 interleaves two rows 8 apart and
  four columns in words;
- block scales in 128 x 4 tiles, ``[N, groups]`` with N rounded up to 128 and groups to 4; SM90 MXFP4
  ``[N / 64, K / 128, 16, 16]``; FP8 block scales F32, at least 1e-10 (FlashInfer);
- NVFP4 global scales of weights and activations, and FP8 per tensor scales, ``[e]`` F32: of weights
  gate's; of activations the layer's maximum (FlashInfer, CuteDSL) or each expert's (vLLM, b12x);
- biases ``[N]`` BF16.

`w13` rows: FlashInfer all ups, then all gates; vLLM and b12x all gates, then all ups; CuteDSL 64 ups, 64
gates, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import BF16, FP8_BLOCK, FP8_TENSOR, MXFP4, NVFP4
from ..canonical import gates_first, groups, halves, padded, up_then_gate
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.rescale import Round
from ..steps.transforms import Pad, Rearrange, Step
from ..steps.value_steps import Shapes
from .scaled_tensors import (
    E4M3_SCALES,
    E4M3_WEIGHTS,
    E8M0_SCALES,
    F4_WEIGHTS,
    FLOAT_DTYPES,
    Steps,
    fp8_block,
    fp8_tensor,
    nvfp4,
)
from .trtllm import TILES_128X4
from .weight_layout import Build, WeightLayout, by_role, round_up
from .word_orders import BYTES, E2M1_SHIFTED, WORDS

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


def swizzled(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Padded scales of single rows in 128 x 4 tiles: ``[rows up to 128, groups up to 4]``."""
    dims = problem.dims
    sizes = (dims.padded_intermediate, dims.padded_hidden)
    n, k = sizes if role.startswith("w13") else sizes[::-1]
    rows, columns = (
        round_up(halves(problem, role) * n, 128),
        round_up(groups(problem.scheme.weight, k), 4),
    )
    return (Pad(1, rows), Pad(2, columns), TILES_128X4, Rearrange("e (n k) -> e n k", {"k": columns}))


def _ups_first(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    return (*padded(problem, role), *up_then_gate(problem, role))


def _blocks_of_64(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    """Alternating blocks of 64 ups and the 64 gates with the same indices."""
    if halves(problem, role) == 1:
        return padded(problem, role)
    return (*_ups_first(problem, role), Rearrange("e (s n r) k -> e (n s r) k", {"s": 2, "r": 64}))


def _with(scales: Callable[[MoEProblem, str], tuple[Step, ...]], rows: Steps) -> Steps:
    return lambda problem, role: (*rows(problem, role), *scales(problem, role))


def _mxfp4(rows: Steps, weights: Steps, scales: Steps) -> Build:
    """All tensors with their rows ordered by `rows`, then `weights` and `scales`; biases as BF16."""

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        outputs: dict[str, StoredOutput] = {}
        for role in shapes:
            kind = role.partition("_")[2]
            if kind == "bias":
                values = () if MODEL_DTYPES[problem.dtype] == "BF16" else (Round("BF16"),)
                outputs[role] = StoredOutput(role, values, Chain(rows(problem, role)))
            elif kind in ("", "scale"):
                steps = scales if kind else weights
                outputs[role] = StoredOutput(role, chain=Chain((*rows(problem, role), *steps(problem, role))))
        return outputs

    return build


def _nothing(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    return ()


def _mxfp4_layout(name: str, build: Build, bias: bool = True, ungated: bool = True) -> WeightLayout:
    return WeightLayout(name, 1, (MXFP4,), build, F4_WEIGHTS | E8M0_SCALES, ("U8",), bias, ungated)


def _nvfp4_layout(name: str, rows: Steps, inputs: str) -> WeightLayout:
    build = nvfp4(rows, _with(swizzled, rows), inputs=inputs)
    return WeightLayout(name, 1, (NVFP4,), build, F4_WEIGHTS | E4M3_SCALES, ("U8",), bias=False)


CUTLASS_SM90 = _mxfp4_layout(
    "cutlass-sm90", _mxfp4(_ups_first, lambda problem, role: WEIGHTS, lambda problem, role: SCALES)
)

CUTLASS: tuple[WeightLayout, ...] = (
    CUTLASS_SM90,
    _mxfp4_layout("cutlass-sm100", _mxfp4(_ups_first, _nothing, swizzled)),
    _mxfp4_layout("cutlass-mxfp4", _mxfp4(gates_first, _nothing, swizzled)),
    _mxfp4_layout("b12x-mxfp4", by_role(gates_first), bias=False),
    _nvfp4_layout("flashinfer-cutlass-nvfp4", _ups_first, "layer"),
    _nvfp4_layout("cutlass-nvfp4", gates_first, "expert"),
    _nvfp4_layout("cutedsl-nvfp4", _blocks_of_64, "layer"),
    _nvfp4_layout("cutedsl-batched-nvfp4", gates_first, "layer"),
    _nvfp4_layout("b12x-nvfp4", gates_first, "expert"),
    WeightLayout(
        name="cutlass-fp8-tensor",
        version=1,
        weights=(FP8_TENSOR,),
        build=fp8_tensor(_ups_first),
        logical_dtypes=E4M3_WEIGHTS,
        scale_dtypes=FLOAT_DTYPES,
        bias=False,
    ),
    WeightLayout(
        name="cutlass-fp8-block",
        version=1,
        weights=(FP8_BLOCK,),
        build=fp8_block(_ups_first, up_then_gate),
        logical_dtypes=E4M3_WEIGHTS,
        scale_dtypes=FLOAT_DTYPES,
        bias=False,
    ),
    WeightLayout(name="cutlass-bf16", version=1, weights=(BF16,), build=by_role(_ups_first)),
)

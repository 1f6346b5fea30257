"""vLLM's CPU kernels on x86, transcribed from their sources and never compared with their output.

Stored per expert, with N rows and K columns of the padded matrix:

- BF16 for AMX ``[N / 16, K / 2, 32]``: 16 rows of two neighbouring k;
- BF16 for vectors ``[N / 16, K, 16]``: 16 rows of each k;
- FP8 ``[N / 32, K / 2, 64]`` bytes: 32 rows of two neighbouring k; unchanged scales;
- MXFP4 ``[N / 32, K / 2, 32]`` bytes: of the 64 codes of 32 rows in one byte column, row by row, byte i has
  code i in its low nibble and code i + 32 in its high one; scales ``[N / 32, G, 32]``; biases F32;
- INT4 ``[N / 32, K / C, 16 * C + 128]`` bytes, with C the group size, at most 128. A block is its codes in
  the order (four k, two times 16 rows, 8 rows, k), each byte with row r in its low nibble and row r + 8 in
  its high one, then 32 int32: the sums of code minus zero point over the block's columns, which correct for
  the zero point of the activations. Scales F32 and zero points int8 ``[N / 32, G, 32]``; symmetric weights
  have zero points of 8. These kernels do not support biases.

`w13` rows are all gates, then all ups.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import BF16, FP8_BLOCK, FULL, MXFP4, int_format
from ..canonical import gate_then_up, gates_first, scale_dtype
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..recipe.weight_sums import MIDDLE, CodesAndSums, Fill
from ..steps.rescale import AtMost
from ..steps.transforms import DtypeView, PackedCodes, Rearrange, Step, Widen
from ..steps.value_steps import Shapes
from .weight_layout import WeightLayout, by_role

_ROWS_OF_32 = Rearrange("e (o n) g -> e o g n", {"n": 32})
_INT4_CODES = {"p": 2, "h": 2, "r": 8, "c": 4}
_LONGEST = 128


def _bf16(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    if role.endswith("_bias"):
        return gates_first(problem, role)
    return (*gates_first(problem, role), Rearrange("e (o r) (k t) -> e o k (r t)", {"r": 16, "t": 2}))


def _bf16_vec(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    if role.endswith("_bias"):
        return gates_first(problem, role)
    return (*gates_first(problem, role), Rearrange("e (o r) k -> e o k r", {"r": 16}))


def _fp8(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    if role.endswith(("_bias", "_scale")):
        return gates_first(problem, role)
    return (*gates_first(problem, role), Rearrange("e (o r) (k t) -> e o k (r t)", {"r": 32, "t": 2}))


def _mxfp4(problem: MoEProblem, role: str) -> tuple[Step, ...]:
    start = gates_first(problem, role)
    if role.endswith("_bias"):
        return (*start, Widen(MODEL_DTYPES[problem.dtype]))
    if role.endswith("_scale"):
        return (*start, _ROWS_OF_32)
    codes = Rearrange("e (o h m) (k d) -> e o k (m d h)", {"h": 2, "m": 16, "d": 2})
    return (*start, PackedCodes(4, True), codes, PackedCodes(4, False))


def _int4_weights(problem: MoEProblem, role: str, zero: str) -> CodesAndSums:
    """Codes in blocks, with their sums; sizes are whole blocks, so there is no padding."""
    group = problem.scheme.weight.group
    columns = _LONGEST if group == FULL else min(group, _LONGEST)
    order = gate_then_up(problem, role)
    pattern = "e (o p h r) (b k c) -> e o b (k p r c h)"
    codes = Rearrange(pattern, {**_INT4_CODES, "k": columns // _INT4_CODES["c"]})
    return CodesAndSums(zero, columns, (*order, codes), (*order, _ROWS_OF_32))


def _int4(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    widened = () if scale_dtype(problem) == "F32" else (Widen(scale_dtype(problem)),)
    outputs: dict[str, StoredOutput] = {}
    for matrix in ("w13", "w2"):
        scale, zero = f"{matrix}_scale", f"{matrix}_zero"
        rows = Chain((*gate_then_up(problem, scale), _ROWS_OF_32))
        outputs[matrix] = StoredOutput(
            matrix, (_int4_weights(problem, matrix, zero if zero in shapes else ""),)
        )
        outputs[scale] = StoredOutput(scale, chain=Chain((*rows.steps, *widened)))
        if zero in shapes:
            most = AtMost(127, "zero points are signed bytes here")
            outputs[zero] = StoredOutput(zero, (most,), Chain((*rows.steps, DtypeView("U8", "I8"))))
        else:
            outputs[zero] = StoredOutput(scale, (Fill(MIDDLE, "I8"),), rows)
    return outputs


CPU: tuple[WeightLayout, ...] = (
    WeightLayout(name="cpu-bf16", version=1, weights=(BF16,), build=by_role(_bf16)),
    WeightLayout(name="cpu-bf16-vec", version=1, weights=(BF16,), build=by_role(_bf16_vec)),
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
    WeightLayout(
        name="cpu-amx-int4",
        version=1,
        weights=tuple(
            int_format(4, group, zero_point=zero) for zero in (False, True) for group in (32, 64, 128, FULL)
        ),
        build=_int4,
        scale_dtypes=("F32", "BF16", "F16"),
        bias=False,
        ungated=False,
    ),
)

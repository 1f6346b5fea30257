"""What kernels of weights in rows must do, wherever they run: in the interpreter or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moectl.kernels.activation import activate
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.portable_launches import Tile
from moectl.kernels.layer_inputs import LayerInputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.quantize_tokens import dequantize, quantize
from moectl.kernels.tolerance import Tolerance, check, tolerance_for
from moectl.kernels.triton import token_codes
from moectl.kernels.triton.token_codes import LiveRows, quantize_rows
from moectl.kernels.triton.triton_runner import run_with
from moectl.layer.experts import ExpertLayer
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import (
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    INT8_ACT_TOKEN,
    ActFormat,
    Scheme,
    int_format,
)
from support.random_layers import inputs_of, skipping

UE8M0_BLOCK = replace(FP8_BLOCK, scale_dtype="E8M0")
UE8M0_TOKENS = replace(FP8_ACT_GROUP_128, scale_dtype="E8M0")
BF16_CHANNEL = replace(FP8_CHANNEL, scale_dtype="BF16")

SCHEMES: Mapping[str, Scheme] = {
    "plain": Scheme(BF16),
    "block": Scheme(FP8_BLOCK, FP8_ACT_GROUP_128),
    "block, E8M0 scales": Scheme(UE8M0_BLOCK, FP8_ACT_GROUP_128),
    "block, UE8M0 tokens": Scheme(UE8M0_BLOCK, UE8M0_TOKENS),
    "block, 16-bit tokens": Scheme(FP8_BLOCK),
    "channel and token": Scheme(FP8_CHANNEL, FP8_ACT_TOKEN),
    "channel, 16-bit tokens": Scheme(BF16_CHANNEL),
    "tensor, static": Scheme(FP8_TENSOR, FP8_ACT_TENSOR_STATIC),
    "tensor, dynamic": Scheme(FP8_TENSOR, FP8_ACT_TENSOR),
    "tensor, 16-bit tokens": Scheme(FP8_TENSOR),
    "channel, static": Scheme(FP8_CHANNEL, FP8_ACT_TENSOR_STATIC),
    "tensor and token": Scheme(FP8_TENSOR, FP8_ACT_TOKEN),
    "block and token": Scheme(FP8_BLOCK, FP8_ACT_TOKEN),
    "block, static": Scheme(FP8_BLOCK, FP8_ACT_TENSOR_STATIC),
    "channel, tokens in groups": Scheme(FP8_CHANNEL, FP8_ACT_GROUP_128),
    "channel and token, INT8": Scheme(int_format(8, FULL), INT8_ACT_TOKEN),
    "channel and token, INT8, F32 scales": Scheme(int_format(8, FULL, "F32"), INT8_ACT_TOKEN),
    "group and token, INT4": Scheme(int_format(4, 128), INT8_ACT_TOKEN),
    "group and token, INT4, F32 scales": Scheme(int_format(4, 128, "F32"), INT8_ACT_TOKEN),
}

LAUNCHES: Mapping[str, Launch] = {
    "decode 16x64x128 split 4": Launch("decode", Tile(16, 64, 128, stages=2, warps=4, split=4)),
    "decode 16x128x64": Launch("decode", Tile(16, 128, 64, stages=3, warps=4)),
    "grouped 16x64x128": Launch("grouped", Tile(16, 64, 128, stages=2, warps=4)),
    "grouped 64x128x64 tails": Launch("grouped", Tile(64, 128, 64, stages=3, warps=4, tails=2)),
}


@dataclass(frozen=True)
class RowCase:
    """A layer in rows and a call of it."""

    scheme: str
    launch: str
    sizes: tuple[int, int] = (256, 128)
    activation: Activation = SILU
    spread: tuple[int, int] = (4, 2)
    bias: bool = False
    on_input: bool = False
    rows: str = "concatenated"
    tokens: int = 5
    routing: str = "uniform"
    dtype: str = "fp16"

    @property
    def problem(self) -> MoEProblem:
        experts, top_k = self.spread
        return MoEProblem(
            Dims(*self.sizes),
            experts,
            top_k,
            SCHEMES[self.scheme],
            self.activation,
            Routing(weight_on_input=self.on_input),
            rows=self.rows,
            bias=self.bias,
            dtype=self.dtype,
        )

    def __str__(self) -> str:
        more = ("bias" * self.bias, "on input" * self.on_input, self.rows, self.routing)
        return " ".join(map(str, (self.scheme, self.launch, self.sizes, self.activation, self.tokens, *more)))


RELU2 = Activation("relu2", gated=False)
CASES: tuple[RowCase, ...] = (
    *(RowCase(scheme, launch) for scheme in SCHEMES for launch in ("decode 16x128x64", "grouped 16x64x128")),
    *(
        RowCase(scheme, "grouped 64x128x64 tails", (160, 72), SWIGLU_OAI, (5, 3), True, rows="interleaved")
        for scheme in (
            *("plain", "block", "channel and token", "tensor, static", "block, 16-bit tokens"),
            "channel and token, INT8",
        )
    ),
    *(
        RowCase(scheme, "decode 16x64x128 split 4", (392, 200), SILU, (3, 1), on_input=True, tokens=3)
        for scheme in (
            *("plain", "block", "channel and token", "tensor, dynamic", "tensor, 16-bit tokens"),
            "channel and token, INT8",
        )
    ),
    *(
        RowCase(scheme, launch, (136, 264), RELU2, (6, 2), True, tokens=9, routing=routing)
        for scheme, launch, routing in (
            ("plain", "grouped 16x64x128", "skipping"),
            ("block", "decode 16x128x64", "skipping"),
            ("block, E8M0 scales", "grouped 64x128x64 tails", "crowded"),
            ("block, UE8M0 tokens", "decode 16x64x128 split 4", "skipping"),
            ("tensor, dynamic", "grouped 16x64x128", "skipping"),
            ("tensor, dynamic", "decode 16x64x128 split 4", "crowded"),
            ("channel and token", "grouped 16x64x128", "skipping"),
            ("channel and token, INT8", "grouped 16x64x128", "skipping"),
            ("channel and token, INT8", "decode 16x128x64", "crowded"),
            ("tensor, static", "decode 16x128x64", "crowded"),
        )
    ),
    RowCase("group and token, INT4", "grouped 64x128x64 tails", (384, 256), SWIGLU_OAI, (5, 3), True),
    RowCase(
        "group and token, INT4, F32 scales",
        "decode 16x64x128 split 4",
        (640, 128),
        RELU2,
        (6, 2),
        routing="skipping",
    ),
    RowCase("plain", "decode 16x64x128 split 4", (128, 64), Activation("gelu_tanh"), (24, 22), tokens=2),
    RowCase("plain", "grouped 16x64x128", (128, 64), Activation("situ", beta=0.5, linear_beta=1.5), (24, 16)),
    RowCase(
        "block", "grouped 16x64x128", (256, 128), Activation("situ", beta=4.0), (4, 2), rows="interleaved"
    ),
    RowCase("channel and token", "decode 16x128x64", activation=Activation("swiglustep", limit=0.75)),
    RowCase("block", "grouped 16x64x128", (128, 128), Activation("silu", limit=0.75), (24, 22), tokens=2),
)
"""Every scheme by both families, and sizes that are no multiple of 64 or 128 with every other choice."""


def layer_of(problem: MoEProblem, device: str) -> ExpertLayer:
    """A random layer; one scale per tensor differs between gate and up."""
    return RandomLayer(problem, torch.device(device)).experts


def call_of(case: RowCase, device: str) -> LayerInputs:
    """The inputs of a case."""
    inputs = inputs_of(case.problem, case.tokens, device=device)
    if case.routing == "skipping":
        return skipping(inputs, every=3)
    if case.routing == "crowded":
        ids = torch.full_like(inputs.ids, -1)
        ids[:, 0] = case.problem.experts - 1
        return replace(inputs, ids=ids)
    return inputs


def rounded(x: Tensor, problem: MoEProblem, scale: Tensor | None, everything: Tensor) -> Tensor:
    """``[rows, columns]`` fp64: `x` as it enters a GEMM, quantized as the reference does."""
    act = problem.scheme.act
    if act.bits == 16:
        return x.double()
    if act.block == (FULL, FULL):
        form = replace(act, dynamic=False)
        if scale is None:
            largest = everything.float().abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
            scale = largest / torch.full_like(largest, 448)
        return dequantize(quantize(x, form, scale), scale).double()
    short = -x.shape[1] % 128
    padded = torch.nn.functional.pad(x, (0, short))
    return dequantize(quantize(padded, act)).double()[:, : x.shape[1]]


def expected_of(layer: ExpertLayer, inputs: LayerInputs) -> Tensor:
    """``[tokens, hidden]`` fp64 result with what enters each GEMM rounded as the kernels do."""
    problem, act = layer.problem, layer.problem.scheme.act
    ids, top_k, on_input = inputs.ids.flatten(), problem.top_k, problem.routing.weight_on_input
    device = inputs.x.device
    static: dict[str, Tensor | None] = {"w13": None, "w2": None}
    if act.bits == 8 and not act.dynamic:
        every = layer.canonical(range(problem.local_experts), device)
        static = {role: every[f"{role}_input"].float().max() for role in static}
    x = rounded(inputs.x, problem, static["w13"], inputs.x)
    weights = inputs.weights.flatten().double()[:, None]
    h = torch.zeros(len(ids), problem.dims.intermediate, dtype=inputs.x.dtype, device=device)
    experts = [e for e in ids.unique().tolist() if 0 <= e < problem.local_experts]
    dense = {e: layer.reference(e) for e in experts}
    for e in experts:
        rows = (ids == e).nonzero().flatten()
        first = x[rows // top_k] @ dense[e].w13.to(device).double().T
        first = first * weights[rows] if on_input else first
        bias = dense[e].w13_bias
        first = first if bias is None else first + bias.to(device).double()
        h[rows] = activate(first, problem.activation, problem.rows).to(h.dtype)
    live = (ids >= 0) & (ids < problem.local_experts)
    entering = rounded(h, problem, static["w2"], h[live])
    y = torch.zeros(inputs.x.shape, dtype=torch.float64, device=device)
    for e in experts:
        rows = (ids == e).nonzero().flatten()
        out = entering[rows] @ dense[e].w2.to(device).double().T
        bias = dense[e].w2_bias
        out = out if bias is None else out + bias.to(device).double()
        y.index_add_(0, rows // top_k, out if on_input else out * weights[rows])
    return y


def tight(problem: MoEProblem) -> Tolerance:
    """The tolerance of results against `expected_of`: of plain weights, and some codes of the next value.

    A number of `h` in the middle of two codes goes either way by the order of fp32 sums. If it is the largest
    of what shares a scale, all codes move: of a whole token, for scales by token, or where `h` has one block.
    """
    plain = tolerance_for(replace(problem, scheme=Scheme(BF16)))
    if problem.scheme.act.bits != 8:
        return plain
    columns = problem.scheme.act.block[1]
    whole = columns == FULL or problem.dims.intermediate <= columns
    return replace(plain, max=0.2 if whole else 0.12, rms=1.5e-2 if whole else 1e-2)


def agrees(case: RowCase, device: str) -> None:
    """The result is that of the same rounding of what enters the GEMMs, and on a GPU repeatable."""
    problem = case.problem
    layer = layer_of(problem, device)
    prepared = layer.prepared("moectl", device)
    inputs, launch = call_of(case, device), LAUNCHES[case.launch]
    y = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
    result = check(y, expected_of(layer, inputs), tight(problem))
    assert result.ok, result
    if device == "cuda":
        again = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        assert torch.equal(y.view(torch.int16), again.view(torch.int16)), "not repeatable"


def stays_in_its_row(scheme: str, launch: str, value: float, device: str) -> None:
    """A token that is not finite spoils its own row alone, except by a scale that all tokens share."""
    problem = RowCase(scheme, launch).problem
    prepared: PreparedMoE = layer_of(problem, device).prepared("moectl", device)
    inputs = inputs_of(problem, 6, device=device)
    clean = run_with(prepared, inputs.x, inputs.ids, inputs.weights, LAUNCHES[launch])
    x = inputs.x.clone()
    x[2, 37] = value
    y = run_with(prepared, x, inputs.ids, inputs.weights, LAUNCHES[launch])
    assert not torch.isfinite(y[2]).any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], clean[others])


def rows_of_every_size(columns: int) -> torch.Tensor:
    """Numbers of all magnitudes, zeros, middles of two codes, rows and blocks of zeros."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(40, columns, generator=generator)
    x *= torch.exp2(torch.randint(-14, 14, (40, 1), generator=generator).float())
    x[1], x[2, :128], x[3] = 0, 0, (torch.arange(columns) % 97).float() / 8
    x[4, ::2] *= 2.0**-9
    x[5] = torch.arange(columns).float() * 2.0**-10
    x[5, 0] = 448
    return x


def quantizes_bit_for_bit(form: ActFormat, columns: int, dtype: torch.dtype, device: str) -> None:
    """Codes and scales of tokens, or of their blocks, are those of the reference, infinite ones too.

    INT8 has no code for those: the scale of their token is NaN.
    """
    x = rows_of_every_size(columns)[:37]  # no multiple of what a program has
    x[6], x[6, 1::3] = 2.0**-120, -(2.0**-122)  # scales would be subnormal
    if device == "cuda":  # the interpreter takes subnormal bf16 for zero
        x[9], x[9, 1::3] = 2.0**-133, -(2.0**-128)
    x[7, ::128], x[8], x[8, 5] = float("inf"), -0.0, float("-inf")
    x = x.to(dtype)
    made, right = quantize_rows(x.to(device), form), quantize(x, form)
    codes, scales = made.codes.view(torch.uint8).cpu(), made.scales.view(right.scales.shape).cpu()
    if form == INT8_ACT_TOKEN:
        finite = right.scales.isfinite().flatten()
        assert torch.equal(codes[finite], right.values.view(torch.uint8)[finite])
        spoiled = x.clone()
        spoiled[3, 11] = math.nan
        of_nan = quantize_rows(spoiled.to(device), form).scales.cpu()
        assert of_nan[3].isnan() and torch.equal(of_nan[~finite].isnan(), scales[~finite].flatten().isnan())
        assert scales[~finite].isnan().all() and not finite[7] and not finite[8]
        assert torch.equal(scales[finite], right.scales[finite])
    else:
        assert _same_codes(codes, right.values.view(torch.uint8)) and (codes[7, ::128] & 0x7F == 0x7F).all()
        assert torch.equal(scales, right.scales)


GIVEN_SCALES = (0.037, 3.0, 2.0**-20, 2.0**-70, 1e-40, 3e38, 0.0, math.inf)


def quantizes_by_a_static_scale(scale: float, device: str) -> None:
    """Codes by a given scale are those of the reference, and saturate."""
    x, given = rows_of_every_size(384).half(), torch.tensor([scale])
    made = quantize_rows(x.to(device), FP8_ACT_TENSOR_STATIC, given.to(device))
    right = quantize(x, FP8_ACT_TENSOR_STATIC, given).values.view(torch.uint8)
    assert _same_codes(made.codes.view(torch.uint8).cpu(), right)


def _same_codes(made: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether codes are the same but for the sign of NaN."""
    return torch.equal(*(torch.where(of & 0x7F == 0x7F, 0x7F, of) for of in (made, right)))


def _live_rows(kind: str, count: int, device: str) -> tuple[torch.Tensor, LiveRows]:
    """Which of `count` rows hold tokens of two experts, as a mask and as kernels are told."""
    live, by = torch.ones(count, dtype=torch.bool), None
    if kind == "sorted":
        live, by = torch.arange(count) < count - 9, torch.tensor([0, 7, count - 9], dtype=torch.int32)
    elif kind == "slots":
        by = torch.arange(count, dtype=torch.int32) % 4 - 1
        live = (by >= 0) & (by < 2)
    return live, LiveRows(kind, None if by is None else by.to(device), 2)


each_kind_of_live_rows = pytest.mark.parametrize(
    ("form", "kind", "columns"),
    [
        (form, kind, columns)
        for form in (FP8_ACT_GROUP_128, FP8_ACT_TOKEN, INT8_ACT_TOKEN)
        for kind in ("all", "sorted", "slots")
        for columns in (129, 1536, 4097)
    ],
)


def quantizes_rows_that_live(form: ActFormat, kind: str, columns: int, device: str) -> None:
    """Rows that hold tokens get the codes and scales of the reference, whatever the others hold.

    Programs take turns if some hold none.
    """
    x = rows_of_every_size(columns)[:37].half()
    live, rows = _live_rows(kind, 37, device)
    x[~live] = math.nan
    with patch.object(token_codes, "MOST_PROGRAMS", 3):
        made = quantize_rows(x.to(device), form, None, rows)
    padded = torch.nn.functional.pad(x, (0, -columns % 128))
    right = quantize(padded, form)
    codes = right.values.view(torch.uint8)[:, :columns]
    assert _same_codes(made.codes.view(torch.uint8).cpu()[live], codes[live])
    assert torch.equal(made.scales.view(37, -1).cpu()[live], right.scales.view(37, -1)[live])


def one_scale_of_those_that_live(kind: str, device: str) -> None:
    """The scale of everything is that of rows with tokens, and no other row is read."""
    x = rows_of_every_size(200).half()
    live, rows = _live_rows(kind, len(x), device)
    x[~live] = math.inf
    with patch.object(token_codes, "MOST_PROGRAMS", 3):
        made = quantize_rows(x.to(device), FP8_ACT_TENSOR, None, rows)
    scale = x[live].float().abs().amax() / torch.tensor(448.0)
    assert torch.equal(made.scales.cpu(), scale.view(1))
    right = quantize(x[live], FP8_ACT_TENSOR_STATIC, scale.view(1)).values.view(torch.uint8)
    assert torch.equal(made.codes.view(torch.uint8).cpu()[live], right)

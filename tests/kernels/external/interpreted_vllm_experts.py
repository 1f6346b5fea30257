"""vLLM's experts under Triton's interpreter: quantized rows, orders, and whole layers around GEMMs.

A kernel of the tests' own with the parameters of vLLM's stands in for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moectl.kernels.activation import activate as judge_activate
from moectl.kernels.external import vllm_cutlass
from moectl.kernels.external.fp8_rows import expert_rows, quantize_rows
from moectl.kernels.external.gemm_glue import weighted_sum
from moectl.kernels.quantize_tokens import QuantizedTokens, dequantize, quantize
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem
from moectl.problem.schemes import (
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    ActFormat,
    Scheme,
)
from support import peer_cases as cases
from support.interpreted_layers import computes
from support.kernel_cases import poison_new_memory
from support.random_layers import inputs_of, judged
from support.sampling import every_nth
from support.stand_in_experts import write_experts

UE8M0 = replace(FP8_ACT_GROUP_128, scale_dtype="E8M0")
FORMS = (FP8_ACT_GROUP_128, UE8M0, FP8_ACT_TOKEN, FP8_ACT_TENSOR, FP8_ACT_TENSOR_STATIC)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def problem_of(form: ActFormat, activation: Activation = SILU) -> MoEProblem:
    return replace(cases.INT, scheme=Scheme(FP8_BLOCK, form), activation=activation, dims=Dims(384, 256))


def rows_agree(
    codes: torch.Tensor,
    scales: torch.Tensor,
    wanted: torch.Tensor,
    form: ActFormat,
    static: torch.Tensor | None,
) -> None:
    """Codes and scales are those of `quantize`, but for ties that another division may break."""
    if form == FP8_ACT_TENSOR:
        static = (wanted.abs().amax() / 448).view(1)
    one = static is not None
    judge = quantize(wanted, FP8_ACT_TENSOR_STATIC if one else form, static)
    assert torch.allclose(scales, judge.scales[:1].view(1) if one else judge.scales, rtol=1e-6)
    assert scales.shape == ((1,) if one else judge.scales.shape)
    mine = dequantize(QuantizedTokens(codes, judge.scales, judge.format))
    theirs = dequantize(judge)
    assert torch.allclose(mine, theirs, rtol=0.13, atol=float(judge.scales.max()) * 2.0**-9)
    assert (mine == theirs).float().mean() > 0.995


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form} {form.block}")
def test_tokens_are_quantized_as_the_format_says(form: ActFormat) -> None:
    x = (torch.randn(5, 384) * torch.tensor([1.0, 30.0, 1e-3, 0.0, 5.0])[:, None]).half()
    static = torch.tensor([0.25]) if not form.dynamic else None
    codes, scales = quantize_rows(x, problem_of(form), form, static)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
    rows_agree(codes, scales, x.float(), form, static)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form} {form.block}")
@pytest.mark.parametrize("activation", [SILU, SWIGLU_OAI, Activation("relu2", gated=False)], ids=str)
def test_activations_of_valid_rows_are_quantized(form: ActFormat, activation: Activation) -> None:
    """Rows of skipped assignments are NaN, and neither enter a scale of all rows nor are they written."""
    problem = problem_of(form, activation)
    ids = torch.tensor([0, -1, 3, 99, 6, 1], dtype=torch.int32)
    valid = (ids >= 0) & (ids < problem.local_experts)
    x = torch.randn(6, (2 if activation.gated else 1) * 256).half()
    x[~valid] = float("nan")
    static = torch.tensor([0.01]) if not form.dynamic else None
    codes, scales = quantize_rows(x, problem, form, static, activated=True, ids=ids)
    wanted = judge_activate(x[valid].double(), activation, "concatenated").float()
    by_row = len(scales) == len(ids)
    rows_agree(codes[valid], scales[valid] if by_row else scales, wanted, form, static)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form} {form.block}")
def test_rows_in_the_order_of_experts(form: ActFormat) -> None:
    problem = replace(problem_of(form), top_k=3)
    experts, tokens = problem.local_experts, 7
    ids = cases.ids_of("skipped", 3 * tokens, experts)
    order = expert_rows(ids, experts)
    slots = [slot for expert in range(experts) for slot in torch.nonzero(ids == expert).flatten().tolist()]
    total = len(slots)
    assert 0 < total < len(ids) and order.slots[:total].tolist() == slots
    assert order.starts.tolist() == order.offsets.tolist() and order.starts.dtype == torch.int64
    assert order.starts[-1] == total and order.starts.diff().tolist() == [
        int((ids == e).sum()) for e in range(experts)
    ]
    assert [order.places[slot].item() for slot in slots] == list(range(total))
    x = torch.randn(tokens, 384).half()
    static = torch.tensor([0.02]) if not form.dynamic else None
    codes, scales = quantize_rows(x, problem, form, static, order=order)
    assert len(codes) == len(ids)
    wanted = x[torch.tensor(slots) // 3].float()
    rows_agree(codes[:total], scales[:total] if len(scales) == len(ids) else scales, wanted, form, static)
    gate_up = torch.full((len(ids), 512), float("nan")).half()
    gate_up[:total] = torch.randn(total, 512).half()
    codes, scales = quantize_rows(gate_up, problem, form, static, activated=True, order=order)
    wanted = judge_activate(gate_up[:total].double(), SILU, "concatenated").float()
    rows_agree(codes[:total], scales[:total] if len(scales) == len(ids) else scales, wanted, form, static)


def test_sums_of_placed_rows() -> None:
    experts, top_k, hidden, tokens = 6, 3, 70, 9
    ids, weights = cases.ids_of("skipped", tokens * top_k, experts), torch.rand(tokens * top_k)
    order = expert_rows(ids, experts)
    total = int(order.starts[-1])
    parts = torch.full((len(ids), hidden), float("nan")).bfloat16()
    parts[:total] = torch.randn(total, hidden).bfloat16()
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    weighted_sum(parts, y, ids, experts, weights, order.places)
    wanted = torch.zeros(tokens, hidden)
    for slot in order.slots[:total].tolist():
        wanted[slot // top_k] += weights[slot] * parts[order.places[slot]].float()
    assert torch.allclose(y.float(), wanted, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("name", every_nth(cases.PLAIN, 2))
def test_a_layer_from_a_kernel_with_vllms_parameters(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_experts(tmp_path)
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    for kind in ("skipped", "none") if name in ("bf16", "fp8 blocks, fp8 tokens") else ("skipped",):
        computes(name, kind)


@pytest.mark.parametrize("kind", ["skipped", "none"])
@pytest.mark.parametrize(
    "name", ["fp8 channel, fp8 tokens", "fp8 tensor, one scale of tokens", "fp8 tensor, static scale"]
)
def test_a_layer_from_cutlass_gemms(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(cases.PLAIN[name], dtype="fp16")
    layer = cases.layer_for(problem)
    prepared = layer.prepared("cutlass", "cpu")
    inputs = cases.with_ids(inputs_of(problem, 5), kind, problem.local_experts)

    def sizes(
        starts: torch.Tensor, first: torch.Tensor, second: torch.Tensor, n: int, k: int, swap: bool
    ) -> None:
        assert swap and starts.dtype == torch.int64
        for expert, rows in enumerate(starts.diff().tolist()):
            first[expert] = torch.tensor([2 * n, rows, k])
            second[expert] = torch.tensor([k, rows, n])

    def gemm(**given: Any) -> None:
        assert given.keys() == set(vllm_cutlass.ARGUMENTS[vllm_cutlass.GEMM])
        x, y, w = given["a_tensors"], given["out_tensors"], given["b_tensors"]
        for expert, (n, rows, k) in enumerate(given["problem_sizes"].tolist()):
            assert (n, k) == tuple(w.shape[1:]) and (k, n) == (x.shape[1], y.shape[1])
            assert given["a_strides"][expert] == given["b_strides"][expert] == k == x.stride(0)
            assert given["c_strides"][expert] == n == y.stride(0)
            first = int(given["expert_offsets"][expert])
            mine = slice(first, first + rows)
            scale = given["a_scales"][mine] if given["per_act_token"] else given["a_scales"]
            factor = given["b_scales"][expert].view(1, -1)
            assert factor.shape[1] == (n if given["per_out_ch"] else 1)
            y[mine] = ((x[mine].float() @ w[expert].float().T) * scale * factor).to(y.dtype)

    monkeypatch.setattr(vllm_cutlass, "operators", lambda: vllm_cutlass.CutlassOperators(gemm, sizes))
    y = vllm_cutlass.compute(prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok if kind != "none" else not y.any()

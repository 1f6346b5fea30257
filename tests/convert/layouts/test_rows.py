"""The layouts ``moectl-bf16`` and ``moectl-fp8``: rows as they lie, scales in F32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.convert.layouts.registry import layout_for, layout_named
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from moectl.problem.schemes import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, Scheme, WeightFormat
from support.layout_cases import STATIC, canonical_tensors, stored


def problem_of(weight: WeightFormat, rows: str = "concatenated") -> MoEProblem:
    return MoEProblem(Dims(200, 136), 3, 2, Scheme(weight), SILU, rows=rows, bias=True)


@pytest.mark.parametrize("weight", [BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR], ids=str)
def test_gates_before_ups_are_stored_as_they_lie(weight: WeightFormat) -> None:
    layout = layout_for("moectl", weight)
    assert layout.name == ("moectl-bf16" if weight == BF16 else "moectl-fp8")
    problem = problem_of(weight)
    recipe = layout.recipe(layout.pad(problem))
    assert not any(output.chain.steps or output.values for output in recipe.outputs.values())
    tensors = canonical_tensors(problem)
    made = stored(layout, problem, tensors)
    assert made.keys() == tensors.keys() and all(made[role] is tensors[role] for role in ("w13", "w2"))


def test_pairs_of_gate_and_up_are_taken_apart() -> None:
    problem = problem_of(FP8_CHANNEL, "interleaved")
    tensors = canonical_tensors(problem)
    made = stored(layout_named("moectl-fp8"), problem, tensors)
    for role in ("w13", "w13_scale", "w13_bias"):
        t = tensors[role]
        assert torch.equal(made[role], torch.cat((t[:, 0::2], t[:, 1::2]), 1))


def test_gate_and_up_keep_their_own_scale_per_tensor() -> None:
    problem = replace(problem_of(FP8_TENSOR), scheme=Scheme(FP8_TENSOR, STATIC))
    tensors = canonical_tensors(problem)
    tensors["w13_scale"] = torch.tensor([[0.5, 3.0], [1.0, 1.0], [2.0, 0.25]])[:, :, None]
    tensors["w13_input"] = torch.tensor([[0.1, 0.1], [0.7, 0.2], [0.3, 0.3]])[:, :, None]
    made = stored(layout_named("moectl-fp8"), problem, tensors)
    assert torch.equal(made["w13_scale"], tensors["w13_scale"])
    assert made["w13_input"].shape == () and float(made["w13_input"]) == pytest.approx(0.7)


def test_e8m0_scales_become_the_floats_that_they_are() -> None:
    weight = replace(FP8_BLOCK, scale_dtype="E8M0")
    problem = replace(problem_of(weight), dims=Dims(128 * 16, 128 * 8), experts=1, local_experts=1, top_k=1)
    tensors = canonical_tensors(problem)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    tensors["w13_scale"] = scales
    layout = layout_named("moectl-fp8")
    made = stored(layout, problem, tensors)["w13_scale"]
    assert made.dtype == torch.float32
    exact = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)
    assert torch.equal(made.flatten()[1:255].double(), exact[1:255]) and made.flatten()[0] == 0
    recipe = layout.recipe(problem)
    back = recipe.restore(stored(layout, problem, tensors), 1)
    assert torch.equal(back["w13_scale"], scales)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_16_bit_scales_become_f32(dtype: str) -> None:
    problem = problem_of(replace(FP8_CHANNEL, scale_dtype=dtype))
    tensors = canonical_tensors(problem)
    made = stored(layout_named("moectl-fp8"), problem, tensors)
    assert torch.equal(made["w2_scale"], tensors["w2_scale"].float())

"""Numbers that change on the way: what they become, what is refused, and what does not come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.convert.layouts.registry import layout_named
from moectl.errors import CheckpointError
from moectl.problem.schemes import FP8_TENSOR, MXFP4, NVFP4, int_format
from support.layout_cases import problem_for, same, tensors_for


def refused(name, weight, role, value, message, dtype="bf16"):
    layout = layout_named(name)
    problem = replace(problem_for(layout, weight, "concatenated", 256, 128), dtype=dtype)
    tensors = tensors_for(layout, problem)
    if dtype == "fp16" and weight == MXFP4:
        tensors |= {scale: torch.full_like(tensors[scale], 120) for scale in ("w13_scale", "w2_scale")}
    tensors[role].view(-1)[-1] = value
    recipe = layout.recipe(problem)
    with pytest.raises(CheckpointError, match=message):
        dict(recipe.store(tensors, recipe.update_statistics(tensors, {})))


@pytest.mark.parametrize(
    ("name", "weight", "role", "value", "message", "dtype"),
    [
        ("marlin-fp8", FP8_TENSOR, "w2_scale", 300.0, r"scale of 300 times 2\*\*120", "bf16"),
        ("marlin-fp8", FP8_TENSOR, "w2_scale", 1e5, "too large for F16", "fp16"),
        ("marlin-int4-act-fp8", int_format(4, 32), "w13_scale", 1e38, r"2\*\*9 is beyond", "bf16"),
        ("marlin-mxfp4", MXFP4, "w13_scale", 143, "infinite in fp16", "fp16"),
        ("marlin-mxfp4-act-fp8", MXFP4, "w2_scale", 250, "at most 249 is supported, got 250", "bf16"),
        ("marlin-nvfp4", NVFP4, "w13_scale", 0x80 | 0x38, "negative or NaN scales", "bf16"),
        ("marlin-nvfp4", NVFP4, "w2_scale", 0x7F, "negative or NaN scales", "bf16"),
        ("marlin-int4", int_format(4, 32, zero_point=True), "w2_zero", 16, "4-bit codes .* got 16", "bf16"),
        ("triton-wna16", int_format(4, 32, zero_point=True), "w2_zero", 16, "got 16", "bf16"),
        (
            "marlin-int4-act-fp8",
            int_format(4, 32, zero_point=True),
            "w2_zero",
            16,
            "more than 4 bits",
            "bf16",
        ),
        ("marlin-int4-act-int8", int_format(4, 32), "w13_scale", -1e4, "differ too much for int16", "bf16"),
        ("trtllm-fp8-tensor", FP8_TENSOR, "w13_scale", 9.0, "--requantize", "bf16"),
        ("cutlass-fp8-tensor", FP8_TENSOR, "w13_scale", 9.0, "gate and up have different scales", "bf16"),
    ],
)
def test_numbers_without_a_place_are_refused(name, weight, role, value, message, dtype):
    refused(name, weight, role, value, message, dtype)


def test_scales_below_fp16_become_zero_bytes_and_their_source_is_kept():
    layout = layout_named("marlin-mxfp4")
    problem = replace(problem_for(layout, MXFP4, "interleaved", 256, 128), dtype="fp16")
    tensors = tensors_for(layout, problem)
    for role in ("w13_scale", "w2_scale"):
        tensors[role] = tensors[role] % 143
    recipe = layout.recipe(problem)
    stored = dict(recipe.store(tensors, {}))
    assert recipe.kept == ("w13_scale", "w2_scale")
    assert int((stored["w13_scale"] == 0).sum()) == int((tensors["w13_scale"] < 103).sum())
    assert all(same(t, tensors[role]) for role, t in recipe.restore(stored, problem.experts).items())


@pytest.mark.parametrize("name", ["trtllm-fp8-tensor", "cutlass-fp8-tensor", "plain-fp8"])
def test_weights_are_quantized_again_where_that_is_allowed(name):
    layout = layout_named(name).requantizing()
    problem = problem_for(layout, FP8_TENSOR, "concatenated", 96, 64, experts=3)
    tensors = tensors_for(layout, problem)
    tensors["w13"] %= 0x7F
    tensors["w13_scale"] = torch.tensor([[1.0, 0.5], [0.25, 2.0], [3.0, 3.0]]).unsqueeze(2)
    recipe = layout.recipe(problem)
    stored = dict(recipe.store(tensors, recipe.update_statistics(tensors, {})))
    assert recipe.lossy == ("w13", "w13_scale")
    assert not {"w13", "w13_scale"} & set(recipe.kept)
    assert stored["w13_scale"].tolist() == [1.0, 2.0, 3.0]
    back = recipe.restore(stored, problem.experts)
    before, after = (
        weights["w13"].view(torch.float8_e4m3fn).float().reshape(3, 2, -1) * weights["w13_scale"]
        for weights in (tensors, back)
    )
    assert torch.allclose(before, after, rtol=0.07, atol=2e-3)
    assert torch.equal(before[2], after[2]) and torch.equal(before[0, 0], after[0, 0])
    assert same(back["w2"], tensors["w2"])


def test_single_matrices_have_nothing_to_quantize_again():
    layout = layout_named("trtllm-fp8-tensor").requantizing()
    assert layout.recipe(problem_for(layout, FP8_TENSOR, "single", 96, 64)).lossy == ()

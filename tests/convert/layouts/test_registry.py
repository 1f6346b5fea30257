"""Registering a layout is what tests it: round trips, slices, padding, row order, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import moectl.problem.layouts
import moectl.problem.padding
from moectl.convert.canonical import row_order
from moectl.convert.layouts.registry import LAYOUTS, Chain, layout_for, layout_named
from moectl.convert.recipe.recipe import Recipe, StoredOutput
from moectl.convert.steps.transforms import DTYPES
from moectl.errors import CheckpointError, NoBackend, UsageError
from moectl.problem.moe_problem import Activation, Align, Dims, MoEProblem
from moectl.problem.padding import padding, size_rule
from moectl.problem.schemes import (
    BF16,
    FP8_BLOCK,
    FP8_TENSOR,
    FULL,
    MXFP4,
    NVFP4,
    Scheme,
    WeightFormat,
    int_format,
)
from support.layout_cases import (
    EVERY_LAYOUT,
    LARGEST,
    SIZES,
    as_bytes,
    problem_for,
    same,
    stored,
    tensors_for,
    third_of_layouts,
    unpadded,
)
from support.sampling import every_nth


@pytest.mark.parametrize(("layout", "weight", "rows"), every_nth(EVERY_LAYOUT, 5))
def test_the_way_back_gives_the_same_bytes(layout, weight, rows):
    for hidden, intermediate in SIZES:
        problem = problem_for(layout, weight, rows, hidden, intermediate)
        tensors, recipe = tensors_for(layout, problem), layout.recipe(problem)
        forms = stored(layout, problem, tensors)
        assert {name: (tuple(t.shape), t.dtype) for name, t in forms.items()} == {
            name: (shape, DTYPES[dtype]) for name, (dtype, shape) in recipe.stored.items()
        }
        assert not recipe.lossy
        outputs = {
            name: StoredOutput.from_json(json.loads(json.dumps(output.to_json())), name)
            for name, output in recipe.outputs.items()
        }
        assert outputs == recipe.outputs
        back = Recipe(recipe.shapes, outputs).restore(forms, problem.experts)
        assert set(back) == set(tensors)
        assert all(same(back[role], t) for role, t in tensors.items())


@pytest.mark.parametrize(("layout", "weight", "rows"), third_of_layouts(0))
def test_experts_convert_one_by_one(layout, weight, rows, monkeypatch):
    problem = problem_for(layout, weight, rows, 352, 96, experts=5)
    tensors, recipe = tensors_for(layout, problem), layout.recipe(problem)
    statistics = recipe.update_statistics(tensors, {})
    whole = stored(layout, problem, tensors)
    some = {role: t[1:4] for role, t in tensors.items()}
    first = recipe.update_statistics({role: t[:2] for role, t in tensors.items()}, {})
    assert recipe.update_statistics({role: t[2:] for role, t in tensors.items()}, first) == statistics
    monkeypatch.setattr("moectl.convert.recipe.chain.BLOCK_BYTES", 1)
    per_layer = {name for name, output in recipe.outputs.items() if output.per_layer}
    for name, t in recipe.store(some, statistics):
        assert same(t, whole[name] if name in per_layer else whole[name][1:4])
    cut = {name: t if name in per_layer else t[2:3] for name, t in whole.items()}
    for role, t in recipe.restore(cut, 1).items():
        assert same(t, tensors[role][2:3])


@pytest.mark.parametrize(("layout", "weight", "rows"), third_of_layouts(1))
def test_padded_lanes_are_zero_in_each_half(layout, weight, rows):
    """A layer without a zero, converted with padding, then read back as if the padding were weights."""
    for hidden, intermediate in SIZES:
        problem = problem_for(layout, weight, rows, hidden, intermediate, experts=1)
        recipe, wide = layout.recipe(problem), layout.recipe(unpadded(problem))
        tensors = {
            role: poisoned(shape, dtype, role, weight) for role, (dtype, shape) in recipe.shapes.items()
        }
        statistics = recipe.update_statistics(tensors, {})
        for name, output in recipe.outputs.items():
            poison = replace(output, chain=Chain()).apply(tensors, statistics)
            if output.per_layer or poison.ndim == 1:
                continue
            form, other = output.chain.apply(poison), wide.outputs[name]
            seen = other.chain.undo(form, *other.steps(*wide.shapes[other.role])[-1])
            _only_padding_is_added(problem, name, poison, seen, PAD_BYTES.get((layout.name, name), 0))


PAD_BYTES = {("trtllm-mxfp8", role): 127 for role in ("w13_scale", "w2_scale")}
"""What padded lanes hold, where it is not zero: E8M0 of one."""


def poisoned(shape, dtype, role, weight):
    """The largest value that a role can have, nowhere zero."""
    if dtype != "U8":
        return torch.ones(shape).to(DTYPES[dtype])
    largest = LARGEST.get(role.partition("_")[2], {}).get(weight.name, 255)
    return torch.full(shape, largest, dtype=torch.uint8)


def _only_padding_is_added(problem, name, poison, seen, fill):
    halves = 2 if name.startswith("w13") and problem.activation.gated else 1
    if halves == 2 and row_order(problem, name) == "concatenated":
        seen, poison = (t.reshape(1, 2, t.shape[1] // 2, *t.shape[2:]) for t in (seen, poison))
    kept = tuple(slice(size) for size in poison.shape)
    assert same(seen[kept].contiguous(), poison)
    outside = torch.ones(seen.shape, dtype=torch.bool)
    outside[kept] = False
    assert (as_bytes(seen[outside]) == fill).all()


@pytest.mark.parametrize(("layout", "weight", "rows"), third_of_layouts(2))
def test_nothing_but_zeros_is_added_inside_tiles(layout, weight, rows):
    """Steps move bits, so as many are set as before: F32 biases keep their upper 16 bits."""
    problem = problem_for(layout, weight, rows, 288, 96, experts=1)
    tensors, recipe = tensors_for(layout, problem), layout.recipe(problem)
    statistics = recipe.update_statistics(tensors, {})
    for output in recipe.outputs.values():
        steps = output.chain.to_json()
        if output.per_layer or any(step["step"] in ("xor", "add") or step.get("fill") for step in steps):
            continue
        t = replace(output, chain=Chain()).apply(tensors, statistics)
        assert _ones(output.chain.apply(t)) == _ones(t)


def _ones(t):
    return int(np.unpackbits(as_bytes(t).numpy()).sum())


KEEPS_ROWS = {
    layout.name
    for layout in LAYOUTS
    if layout.target.startswith(("marlin", "humming")) or layout.name == "aiter-mxfp4-act-mxfp4"
} - {"humming-nvfp4-rows"}
"""Layouts that leave gate and up rows in the source's order; their kernels are told which it is."""


@pytest.mark.parametrize(
    "name", [layout.name for layout in LAYOUTS if layout.name not in {*KEEPS_ROWS, "humming-nvfp4-rows"}]
)
@pytest.mark.parametrize(("hidden", "intermediate"), [(352, 96), (256, 256)])
def test_row_order_of_the_source_does_not_matter(name, hidden, intermediate):
    layout = layout_named(name)
    weight = layout.weights[0]
    pairs = problem_for(layout, weight, "interleaved", hidden, intermediate)
    halves = replace(pairs, rows="concatenated")
    interleaved = tensors_for(layout, pairs)
    concatenated = {
        role: torch.cat((t[:, 0::2], t[:, 1::2]), 1)
        if role.startswith("w13") and t.shape[1] == 2 * pairs.dims.intermediate
        else t
        for role, t in interleaved.items()
    }
    one, other = stored(layout, pairs, interleaved), stored(layout, halves, concatenated)
    assert all(same(one[role], other[role]) for role in one if not role.startswith("source."))


@pytest.mark.parametrize("name", sorted(KEEPS_ROWS))
def test_layouts_that_keep_the_row_order_of_the_source(name):
    layout = layout_named(name)
    weight = next(weight for weight in layout.weights if weight.block[0] == 1)
    pairs = problem_for(layout, weight, "interleaved", 256, 128)
    tensors = tensors_for(layout, pairs)
    halves = stored(layout, replace(pairs, rows="concatenated"), tensors)
    assert all(same(form, halves[role]) for role, form in stored(layout, pairs, tensors).items())


REFUSED = [
    ("marlin-int4", {"dims": Dims(2880, 128)}, "hidden size must be a multiple of 128, got 2880"),
    ("marlin-int4", {"dims": Dims(256, 96), "weight": int_format(4, 64)}, "whole number of groups of 64"),
    ("moectl-mtile64", {"weight": int_format(4, 256, zero_point=True)}, "with zero points"),
    ("marlin-int4", {"weight": int_format(4, 16)}, "got int4 group 16"),
    ("marlin-int8", {"weight": int_format(4, 32)}, "got int4 group 32"),
    ("marlin-int4", {"act_order": "group"}, "act order"),
    ("trtllm-mxfp4", {"activation": Activation("relu2", gated=False)}, "not gated"),
    ("trtllm-mxint4", {"dims": Dims(384, 256)}, "hidden size must be a multiple of 256, got 384"),
    ("trtllm-mxint4", {"dims": Dims(256, 384)}, "intermediate size must be a multiple of 256, got 384"),
    ("trtllm-mxint4", {"bias": True}, "expert biases are not supported"),
    ("trtllm-mxint4", {"weight": int_format(4, 32, "F16")}, "BF16 scales, got F16"),
    ("moectl-mtile64", {"weight": int_format(4, 32, "F32")}, "BF16 or F16 scales, got F32"),
    ("marlin-int4", {"weight": int_format(4, 32, "F32")}, "BF16 or F16 scales, got F32"),
    ("moectl-mtile64", {"weight": int_format(8, 16)}, "got int8 group 16"),
    ("trtllm-mxfp4", {"rows": "upside down"}, "interleaved or concatenated"),
    ("cutlass-sm90", {"weight": MXFP4, "dims": Dims(256, 48)}, "whole number of groups of 32"),
    ("humming-int4", {"dims": Dims(256, 12), "weight": int_format(4, FULL)}, "a multiple of 8, got 12"),
    ("humming-int8", {"dims": Dims(96, 128), "weight": int_format(8, FULL, zero_point=True)}, "128, got 96"),
    ("humming-int4-e0m3", {"weight": int_format(4, 32, zero_point=True)}, "with zero points"),
    ("humming-mxfp4-act-fp8", {"dims": Dims(384, 128)}, "hidden size must be a multiple of 256, got 384"),
    ("aiter-bf16", {"dims": Dims(256, 192)}, "intermediate size must be a multiple of 128, got 192"),
    ("aiter-mxfp8", {"dims": Dims(128, 256)}, "hidden size must be a multiple of 256, got 128"),
    ("humming-fp8", {"weight": FP8_BLOCK, "dims": Dims(256, 192)}, "a multiple of 128, got 192"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_a_layer_that_does_not_fit_is_refused_in_one_sentence(name, change, message):
    layout = layout_named(name)
    change = dict(change)
    weight = change.pop("weight", layout.weights[0])
    problem = replace(MoEProblem(Dims(256, 256), 2, 1, Scheme(weight)), **change)
    problem = layout.pad(problem)
    with pytest.raises(NoBackend, match=message):
        layout.chains(problem)


def test_sizes_that_were_not_padded_are_refused():
    problem = MoEProblem(Dims(2880, 2880), 2, 1, Scheme(MXFP4))
    with pytest.raises(NoBackend, match="hidden size 2880 is to be padded to a multiple of 256, got 2880"):
        layout_named("trtllm-mxfp4").chains(problem)


def test_padding_beyond_the_rule_is_kept():
    layout = layout_named("trtllm-mxfp4")
    problem = MoEProblem(Dims(256, 128, 1024, 512), 2, 1, Scheme(MXFP4))
    assert layout.chains(problem)["w13"].stored_type("U8", (2, 256, 128)) == ("U8", (2, 1024, 512))


PADDING = [
    ("marlin-mxfp4", MXFP4, Align(256, 128)),
    ("marlin-int4", int_format(4, 32), Align(1, 64)),
    ("marlin-int4", int_format(4, 128), Align(1, 128)),
    ("marlin-int8", int_format(8, FULL), Align(1, 64)),
    ("trtllm-mxfp4", MXFP4, Align(256, 128)),
    ("trtllm-mxint4", int_format(4, 32), Align(1, 1)),
    ("triton-hopper", MXFP4, Align(1, 64)),
    ("cutlass-sm90", MXFP4, Align(128, 128)),
    ("moectl-mtile64", MXFP4, Align(64, 64)),
    ("moectl-mtile64", int_format(4, 128), Align(128, 128)),
    ("moectl-mtile64", int_format(8, FULL, zero_point=True), Align(64, 64)),
    ("marlin-nvfp4", NVFP4, Align(1, 64)),
    ("trtllm-fp8-tensor", FP8_TENSOR, Align(1, 16)),
    ("cutlass-fp8-tensor", FP8_TENSOR, Align(1, 16)),
    ("trtllm-bf16", BF16, Align(1, 128)),
    ("cpu-amx-mxfp4", MXFP4, Align(32, 32)),
    ("humming-int4", int_format(4, 32), Align(1, 1)),
    ("humming-mxfp4", MXFP4, Align(1, 64)),
    ("aiter-mxfp4", MXFP4, Align(256, 256)),
]


@pytest.mark.parametrize(
    ("act", "gated", "align"),
    [
        (None, True, Align(256, 64)),
        (None, False, Align(256, 128)),
        ("nvfp4", False, Align(256, 128)),
        ("nvfp4-per-token", True, Align(256, 64)),
        ("nvfp4-per-token", False, Align(512, 128)),
    ],
)
def test_activations_scaled_by_token_pad_experts_without_a_gate_further(act, gated, align):
    layout = layout_for("trtllm", NVFP4, "sm100", act)
    assert padding(layout.name, NVFP4, gated) == align
    activation = Activation("silu") if gated else Activation("relu2", gated=False)
    problem = layout.pad(MoEProblem(Dims(1280, 192), 2, 1, Scheme(NVFP4), activation))
    assert problem.dims == align.apply(Dims(1280, 192))
    stored = layout.recipe(problem).stored["w2"].shape
    assert stored == (2, problem.dims.padded_hidden, problem.dims.padded_intermediate // 2)


@pytest.mark.parametrize(("name", "weight", "align"), PADDING)
def test_padding_table(name, weight, align):
    assert padding(name, weight) == layout_named(name).align(weight) == align


def test_unknown_layouts_are_named():
    with pytest.raises(UsageError, match="no weight layout is called 'marlin'; known are marlin-int4"):
        padding("marlin", MXFP4)
    with pytest.raises(CheckpointError, match="no weight layout is called 'swizzled'"):
        layout_named("swizzled")


def test_registry_is_closed_and_complete():
    names = [layout.name for layout in LAYOUTS]
    assert sorted(names) == sorted(moectl.problem.layouts.LAYOUTS) == sorted(moectl.problem.padding.RULES)
    for layout in LAYOUTS:
        assert layout.version >= 1
        assert layout.readers
        for weight in layout.weights:
            assert size_rule(layout.name, weight).align == layout.align(weight)
            for arch in layout.archs:
                assert all(layout_for(layout.target, weight, arch, act) is layout for act in layout.acts)
        usual = moectl.problem.layouts.LAYOUTS[layout.name].instead_of
        if usual:
            known = layout_named(usual)
            assert known.target == layout.target and {*layout.weights} <= {*known.weights}
            assert not set(known.acts) & set(layout.acts)
        else:
            assert all(layout_for(layout.target, weight) is layout for weight in layout.weights)
    assert set(moectl.problem.layouts.TARGETS) == {layout.target for layout in LAYOUTS}


@pytest.mark.parametrize(
    ("target", "weight", "arch", "message"),
    [
        ("swizzle", MXFP4, None, "no target is called 'swizzle'. Choose one of marlin, trtllm"),
        (
            "cutlass-sm90",
            int_format(4, 32),
            None,
            "holds mxfp4, .*; these weights are int4 group 32. .* use one of: marlin, trtllm",
        ),
        ("trtllm", int_format(4, 128), None, "holds int4 group 32; these weights are int4 group 128"),
        ("trtllm", MXFP4, "sm90", "is read on sm100, sm103, got sm90"),
        ("marlin", WeightFormat("int2", 2, (1, 32)), None, "No target holds int2"),
    ],
)
def test_a_target_that_does_not_fit_names_the_choices(target, weight, arch, message):
    with pytest.raises(UsageError, match=message):
        layout_for(target, weight, arch)


@pytest.mark.gpu
def test_the_gpu_gives_the_same_bytes():
    for param in EVERY_LAYOUT:
        layout, weight, rows = param.values
        problem = problem_for(layout, weight, rows, 352, 96)
        tensors = tensors_for(layout, problem)
        forms = stored(layout, problem, tensors)
        recipe, there = layout.recipe(problem), {role: t.cuda() for role, t in tensors.items()}
        on_gpu = dict(recipe.store(there, recipe.update_statistics(there, {})))
        assert all(on_gpu[name].is_cuda and same(on_gpu[name].cpu(), t) for name, t in forms.items())
        back = recipe.restore(on_gpu, problem.experts)
        assert all(same(back[role].cpu(), t) for role, t in tensors.items())

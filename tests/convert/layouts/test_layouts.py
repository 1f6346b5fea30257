"""Registering a layout is what tests it: round trips, slices, padding, row order, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import moectl.padding
import moectl.targets
from moectl.convert.canonical import canonical_shapes
from moectl.convert.layout import LAYOUTS, Chain, layout_for, layout_named
from moectl.convert.transforms import DTYPES
from moectl.errors import CheckpointError, NoBackend, UsageError
from moectl.padding import padding, size_rule
from moectl.problem import Activation, Align, Dims, MoEProblem
from moectl.schemes import FULL, MXFP4, Scheme, WeightFormat, int_format

from .layers import (
    EVERY_LAYOUT,
    SIZES,
    as_bytes,
    back,
    canonical_tensors,
    problem_for,
    same,
    stored,
    unpadded,
)


@pytest.mark.parametrize(("layout", "weight", "rows"), EVERY_LAYOUT)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_the_way_back_gives_the_same_bytes(layout, weight, rows, hidden, intermediate):
    problem = problem_for(layout, weight, rows, hidden, intermediate)
    tensors = canonical_tensors(problem)
    for role, chain in layout.chains(problem).items():
        t = tensors[role]
        form = chain.apply(t)
        shape, dtype = chain.storage_shape(tuple(t.shape), canonical_shapes(problem, 2)[role][1])
        assert (tuple(form.shape), form.dtype) == (shape, DTYPES[dtype])
        assert form.is_contiguous()
        assert same(back(chain, form, t), t)
        written = Chain.from_json(json.loads(json.dumps(chain.to_json())))
        assert written == chain
        assert same(back(written, form, t), t)


@pytest.mark.parametrize(("layout", "weight", "rows"), EVERY_LAYOUT)
def test_experts_convert_one_by_one(layout, weight, rows, monkeypatch):
    monkeypatch.setattr("moectl.convert.chain.BLOCK_BYTES", 1)
    problem = problem_for(layout, weight, rows, 352, 96, experts=5)
    tensors = canonical_tensors(problem)
    whole = {role: chain.apply(tensors[role]) for role, chain in layout.chains(problem).items()}
    monkeypatch.undo()
    for role, chain in layout.chains(problem).items():
        assert same(chain.apply(tensors[role]), whole[role])
        assert same(chain.apply(tensors[role][1:4]), whole[role][1:4])
        assert same(back(chain, whole[role][2:3], tensors[role][2:3]), tensors[role][2:3])
        assert chain.apply(tensors[role][:0]).shape == whole[role][:0].shape


@pytest.mark.parametrize(("layout", "weight", "rows"), EVERY_LAYOUT)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_padded_lanes_are_zero_in_each_half(layout, weight, rows, hidden, intermediate):
    """A layer without a zero, converted with padding, then read back as if the padding were weights."""
    problem = problem_for(layout, weight, rows, hidden, intermediate, experts=2)
    wide = unpadded(problem)
    dims = problem.dims
    for role, chain in layout.chains(problem).items():
        shape, dtype = canonical_shapes(problem, 2)[role]
        poison = (
            torch.ones(shape).to(DTYPES[dtype])
            if dtype != "U8"
            else torch.full(shape, 255, dtype=torch.uint8)
        )
        form = chain.apply(poison)
        wide_shape, _ = canonical_shapes(wide, 2)[role]
        seen = layout.chains(wide)[role].undo(form, wide_shape, dtype)
        if role.startswith("w13") and rows == "concatenated":
            seen, poison = (
                t.reshape(2, 2, n, *t.shape[2:])
                for t, n in ((seen, dims.padded_intermediate), (poison, dims.intermediate))
            )
        kept = tuple(slice(size) for size in poison.shape)
        assert same(seen[kept].contiguous(), poison)
        seen = seen.clone()
        seen[kept] = 0
        assert not as_bytes(seen).any()


@pytest.mark.parametrize(("layout", "weight", "rows"), EVERY_LAYOUT)
def test_nothing_but_zeros_is_added_inside_tiles(layout, weight, rows):
    """Steps move bits, so as many are set as before: F32 biases keep their upper 16 bits."""
    problem = problem_for(layout, weight, rows, 2880, 96, experts=1)
    for role, chain in layout.chains(problem).items():
        if any(step["step"] == "xor" for step in chain.to_json()):
            continue
        t = canonical_tensors(problem)[role]
        assert _ones(chain.apply(t)) == _ones(t)


def _ones(t):
    return int(np.unpackbits(as_bytes(t).numpy()).sum())


KEEPS_ROWS = {"marlin-int4", "marlin-int8", "marlin-mxfp4"}
"""Layouts that leave gate and up rows in the source's order; their kernels are told which it is."""


@pytest.mark.parametrize("name", [layout.name for layout in LAYOUTS if layout.name not in KEEPS_ROWS])
@pytest.mark.parametrize(("hidden", "intermediate"), [(352, 96), (256, 256)])
def test_row_order_of_the_source_does_not_matter(name, hidden, intermediate):
    layout = layout_named(name)
    weight = layout.weights[0]
    pairs = problem_for(layout, weight, "interleaved", hidden, intermediate)
    halves = replace(pairs, rows="concatenated")
    interleaved = canonical_tensors(pairs)
    concatenated = {
        role: torch.cat((t[:, 0::2], t[:, 1::2]), 1) if role.startswith("w13") else t
        for role, t in interleaved.items()
    }
    one, other = stored(layout, pairs, interleaved), stored(layout, halves, concatenated)
    assert all(same(one[role], other[role]) for role in one)


@pytest.mark.parametrize("name", sorted(KEEPS_ROWS))
def test_marlin_keeps_the_row_order_of_the_source(name):
    layout = layout_named(name)
    pairs = problem_for(layout, layout.weights[0], "interleaved", 256, 128)
    tensors = canonical_tensors(pairs)
    halves = stored(layout, replace(pairs, rows="concatenated"), tensors)
    assert all(same(form, halves[role]) for role, form in stored(layout, pairs, tensors).items())


REFUSED = [
    ("marlin-int4", {"dims": Dims(2880, 128)}, "hidden size must be a multiple of 128, got 2880"),
    ("marlin-int4", {"dims": Dims(256, 96), "weight": int_format(4, 64)}, "whole number of groups of 64"),
    ("marlin-int4", {"weight": int_format(4, 32, zero_point=True)}, "with zero points"),
    ("marlin-int4", {"weight": int_format(4, 16)}, "got int4 group 16"),
    ("marlin-int8", {"weight": int_format(4, 32)}, "got int4 group 32"),
    ("marlin-int4", {"act_order": "group"}, "act order"),
    ("marlin-int4", {"activation": Activation("relu2", gated=False)}, "not gated"),
    ("trtllm-mxint4", {"dims": Dims(384, 256)}, "hidden size must be a multiple of 256, got 384"),
    ("trtllm-mxint4", {"dims": Dims(256, 384)}, "intermediate size must be a multiple of 256, got 384"),
    ("trtllm-mxint4", {"bias": True}, "no place for biases"),
    ("trtllm-mxint4", {"weight": int_format(4, 32, "F16")}, "BF16 scales, got F16"),
    ("moectl-mtile64", {"weight": int_format(4, 32, "F16")}, "U8 or BF16 scales, got F16"),
    ("marlin-int4", {"weight": int_format(4, 32, "F32")}, "BF16 or F16 scales, got F32"),
    ("moectl-mtile64", {"weight": int_format(4, FULL)}, "got int4 per channel"),
    ("trtllm-mxfp4", {"rows": "upside down"}, "interleaved or concatenated"),
    ("cutlass-sm90", {"weight": MXFP4, "dims": Dims(256, 48)}, "whole number of groups of 32"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_a_layer_that_does_not_fit_is_refused_in_one_sentence(name, change, message):
    layout = layout_named(name)
    change = dict(change)
    weight = change.pop("weight", layout.weights[0])
    problem = replace(MoEProblem(Dims(256, 256), 2, 1, Scheme(weight)), **change)
    problem = replace(problem, dims=layout.align(weight).apply(problem.dims))
    with pytest.raises(NoBackend, match=message):
        layout.chains(problem)


def test_sizes_that_were_not_padded_are_refused():
    problem = MoEProblem(Dims(2880, 2880), 2, 1, Scheme(MXFP4))
    with pytest.raises(NoBackend, match="hidden size 2880 is to be padded to a multiple of 256, got 2880"):
        layout_named("trtllm-mxfp4").chains(problem)


def test_padding_beyond_the_rule_is_kept():
    layout = layout_named("trtllm-mxfp4")
    problem = MoEProblem(Dims(256, 128, 1024, 512), 2, 1, Scheme(MXFP4))
    assert layout.chains(problem)["w13"].storage_shape((2, 256, 128), "U8") == ((2, 1024, 512), "U8")


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
]


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
    assert sorted(names) == sorted(moectl.targets.LAYOUTS) == sorted(moectl.padding.RULES)
    for layout in LAYOUTS:
        assert layout.version >= 1
        assert layout.readers
        for weight in layout.weights:
            assert size_rule(layout.name, weight).align == layout.align(weight)
            assert all(layout_for(layout.target, weight, arch) is layout for arch in layout.archs)
            others = [x for x in LAYOUTS if x.target == layout.target and weight in x.weights]
            if len(others) == 1:
                assert layout_for(layout.target, weight) is layout
            else:
                with pytest.raises(UsageError, match="--arch"):
                    layout_for(layout.target, weight)
    assert set(moectl.targets.TARGETS) == {layout.target for layout in LAYOUTS}


@pytest.mark.parametrize(
    ("target", "weight", "arch", "message"),
    [
        ("swizzle", MXFP4, None, "no target is called 'swizzle'. Choose one of marlin, trtllm"),
        (
            "cutlass-sm90",
            int_format(4, 32),
            None,
            "holds mxfp4 group 32; .* for them: marlin, trtllm",
        ),
        ("trtllm", int_format(4, 128), None, "these weights are int4 group 128"),
        ("trtllm", MXFP4, "sm90", "is read on sm100, sm103, got sm90"),
        ("marlin", WeightFormat("nvfp4", 4, (1, 16)), None, "Targets for them: none"),
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
        tensors = canonical_tensors(problem)
        for role, chain in layout.chains(problem).items():
            form = chain.apply(tensors[role].cuda())
            assert form.is_cuda
            assert same(form.cpu(), chain.apply(tensors[role]))
            assert same(back(chain, form, tensors[role]).cpu(), tensors[role])

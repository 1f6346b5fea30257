"""CPU layouts element by element, in arithmetic on positions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from moectl.convert.layouts.registry import layout_named
from moectl.convert.recipe.recipe import StoredOutput
from moectl.convert.recipe.weight_sums import CodesAndSums
from moectl.convert.steps.transforms import Rearrange
from moectl.errors import CheckpointError, NoBackend
from moectl.problem.schemes import BF16, FULL, int_format
from support.layout_cases import problem_for, same, stored, tensors_for

INT4 = layout_named("cpu-amx-int4")


def made_of(weight, rows="concatenated", hidden=512, intermediate=256, layout=INT4):
    problem = problem_for(layout, weight, rows, hidden, intermediate)
    tensors = tensors_for(layout, problem)
    return problem, tensors, stored(layout, problem, tensors)


def gates_first(t, rows):
    """Rows of `w13` roles as all gates, then all ups."""
    t = t.float().numpy() if t.is_floating_point() else t.numpy()
    return np.concatenate((t[:, 0::2], t[:, 1::2]), 1) if rows == "interleaved" else t


@pytest.mark.parametrize("rows", ["concatenated", "interleaved"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("group", "columns"), [(32, 32), (64, 64), (128, 128), (256, 128), (FULL, 128)])
def test_int4_blocks_byte_by_byte(group, columns, zeros, rows):
    weight = int_format(4, group, zero_point=zeros)
    layout = replace(INT4, weights=(weight,))
    _, tensors, forms = made_of(weight, rows, layout=layout)
    for matrix in ("w13", "w2"):
        order = rows if matrix == "w13" else "concatenated"
        codes = gates_first(tensors[matrix], order)
        scale = gates_first(tensors[f"{matrix}_scale"], order)
        zero = gates_first(tensors[f"{matrix}_zero"], order) if zeros else np.full(scale.shape, 8)
        e, n, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
        width = k if group == FULL else group
        blocks = forms[matrix].numpy()
        assert blocks.shape == (e, n // 32, k // columns, 32 * (columns // 2 + 4))
        assert forms[f"{matrix}_scale"].shape == forms[f"{matrix}_zero"].shape == (e, n // 32, k // width, 32)
        assert (forms[f"{matrix}_scale"].dtype, forms[f"{matrix}_zero"].dtype) == (torch.float32, torch.int8)
        b, c = np.divmod(np.arange(k), columns)
        for row in range(n):
            block, r = divmod(row, 32)
            byte = 64 * (c // 4) + 32 * (r // 16) + 4 * (r % 8) + c % 4
            code = codes[:, row, np.arange(k) // 2] >> 4 * (np.arange(k) % 2) & 15
            assert (blocks[:, block, b, byte] >> 4 * (r // 8 % 2) & 15 == code).all()
            known = code.astype(np.int64) - zero[:, row, np.arange(k) // width]
            sums = known.reshape(e, -1, columns).sum(2)
            behind = blocks[:, block, :, 16 * columns + 4 * r : 16 * columns + 4 * r + 4]
            assert (np.ascontiguousarray(behind).view("<i4")[..., 0] == sums).all()
            assert (forms[f"{matrix}_scale"][:, block, :, r].numpy() == scale[:, row]).all()
            assert (forms[f"{matrix}_zero"][:, block, :, r].numpy() == zero[:, row]).all()


def test_int4_results_are_those_of_the_stored_codes_and_sums():
    """Activations with a zero of 128: the product of bytes, less 128 times the sums, is the true one."""
    _, tensors, forms = made_of(int_format(4, 64, zero_point=True), hidden=128, intermediate=64)
    x = torch.randint(0, 256, (128,), generator=torch.Generator().manual_seed(1))
    zero = tensors["w13_zero"].int().repeat_interleave(64, 2)
    codes = torch.stack((tensors["w13"] & 15, tensors["w13"] >> 4), -1).flatten(2).int() - zero
    sums = forms["w13"][..., -128:].contiguous().view(torch.int32).sum(2).flatten(1)
    assert torch.equal((codes * x).sum(2) - 128 * sums, (codes * (x - 128)).sum(2))


def test_int4_zeros_that_every_weight_has_are_not_read_back():
    problem, tensors, forms = made_of(int_format(4, 32))
    assert set(forms) == {f"{m}{kind}" for m in ("w13", "w2") for kind in ("", "_scale", "_zero")}
    assert (forms["w13_zero"] == 8).all() and "w13_zero" not in tensors
    assert INT4.recipe(problem).kept == ()


def test_int4_zero_points_beyond_a_signed_byte_are_refused():
    problem, tensors, _ = made_of(int_format(4, 32, zero_point=True))
    recipe = INT4.recipe(problem)
    tensors["w2_zero"][-1, -1, -1] = 128
    with pytest.raises(CheckpointError, match=r"zero points are signed bytes here: .* got 128"):
        dict(recipe.store(tensors, {}))
    tensors["w2_zero"][-1, -1, -1] = 127
    made = dict(recipe.store(tensors, {}))
    assert same(recipe.restore(made, problem.experts)["w2_zero"], tensors["w2_zero"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": (288, 256, 128)}, "hidden size must be a multiple of 128, got 288"),
        ({"dims": (256, 96, 128)}, "whole number of groups of 128|multiple of 128, got 96"),
        ({"bias": True}, "expert biases are not supported"),
    ],
)
def test_int4_layers_that_kernels_do_not_take_are_refused(change, message):
    change = dict(change)
    hidden, intermediate, group = change.pop("dims", (256, 256, 128))
    problem = problem_for(INT4, int_format(4, group), "concatenated", 256, 256)
    dims = replace(problem.dims, hidden=hidden, intermediate=intermediate, padded_hidden=hidden)
    dims = replace(dims, padded_intermediate=intermediate)
    with pytest.raises(NoBackend, match=message):
        INT4.recipe(replace(problem, dims=dims, **change))


@pytest.mark.parametrize(
    ("columns", "codes", "sums", "message"),
    [
        (24, "e n k -> e n k", "e n k -> e n k", "24 columns are not whole words"),
        (48, "e n k -> e n k", "e n k -> e n k", "not packed codes in blocks of 48"),
        (32, "e (a b) k -> e a b k", "e n k -> e n k", "do not fit sums"),
    ],
)
def test_a_manifest_cannot_ask_for_other_blocks(columns, codes, sums, message):
    sizes = {"b": 32} if "(a b)" in codes else {}
    step = {
        "value": "codes_and_sums",
        "zero": "",
        "columns": columns,
        "codes": [{"pattern": codes, "sizes": sizes}],
        "sums": [{"pattern": sums, "sizes": {}}],
    }
    data = {"role": "w2", "values": [step], "chain": [], "per_layer": False}
    with pytest.raises(CheckpointError, match=message):
        StoredOutput.from_json(json.loads(json.dumps(data)), "w2").stored("U8", (1, 64, 32))


@pytest.mark.parametrize("code", [0, 15])
def test_the_largest_blocks_have_the_sums_of_the_largest_codes(code):
    made = CodesAndSums("", 4096, (), (Rearrange("e n k -> e n k"),))
    t = torch.full((1, 2, 4096), 17 * code, dtype=torch.uint8)
    sums = made.apply(t, {}, {})[..., 4096:].contiguous().view(torch.int32)
    assert sums.tolist() == [[[(code - 8) * 4096] * 2] * 2]


def test_sums_need_whole_blocks_in_a_group():
    made = CodesAndSums("w2_zero", 64, (), (Rearrange("e n k -> e n k"),))
    others = {"w2_zero": torch.zeros((1, 32, 3), dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="do not divide into 3 groups of w2_zero"):
        made.apply(torch.zeros((1, 32, 64), dtype=torch.uint8), others, {})


@pytest.mark.parametrize(("name", "pair"), [("cpu-bf16", 2), ("cpu-bf16-vec", 1)])
def test_bf16_weights_element_by_element(name, pair):
    problem, tensors, forms = made_of(BF16, "interleaved", 64, 40, layout_named(name))
    assert problem.dims.padded_intermediate == 64
    for matrix, rows in (("w13", 80), ("w2", 64)):
        source, form = tensors[matrix], forms[matrix].flatten(1)
        full = problem.dims.padded_hidden if matrix == "w13" else problem.dims.padded_intermediate
        for row in range(rows):
            at = (row // 2 + 64 * (row % 2)) if matrix == "w13" else row
            k = np.arange(source.shape[2])
            place = at // 16 * 16 * full + k // pair * 16 * pair + at % 16 * pair + k % pair
            assert torch.equal(form[:, place], source[:, row])

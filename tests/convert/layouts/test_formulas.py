"""Layouts against their index formulas, written out as arithmetic on positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moectl.convert.layouts import marlin, triton_hopper
from moectl.convert.layouts.registry import Chain, layout_named
from moectl.convert.steps.transforms import DtypeView, PackedCodes, Rearrange
from moectl.problem.schemes import FULL, MXFP4, int_format
from support.layout_cases import canonical_tensors, problem_for, random_bytes, same


def codes_of(t: torch.Tensor, bits: int) -> np.ndarray:
    """``[e, n, k]`` codes of canonical bytes, through numpy."""
    data = t.numpy()
    if bits == 8:
        return data
    return np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1)


def interleaved(gate_up: np.ndarray, blocks: int) -> np.ndarray:
    """Concatenated rows as `blocks` gates, `blocks` ups, ..."""
    gate, up = np.split(gate_up, 2, axis=1)
    shape = (gate.shape[0], -1, blocks, *gate.shape[2:])
    return np.stack((gate.reshape(shape), up.reshape(shape)), 2).reshape(gate_up.shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_marlin_weights_lane_by_lane(bits):
    t = random_bytes((2, 128, 64 * bits // 8), "U8")
    code = codes_of(t, bits).astype(np.uint64)
    n_tiles, k_tiles, per = 128 // 64, 64 // 16, 32 // bits
    steps = marlin.WEIGHTS_4BIT if bits == 4 else marlin.WEIGHTS_8BIT
    words = Chain(steps).apply(t).numpy().view(np.uint32).reshape(2, k_tiles, n_tiles, 1024 // per)
    rows4, columns4 = [0, 0, 8, 8, 0, 0, 8, 8], [0, 8, 0, 8, 1, 9, 1, 9]
    for kt in range(k_tiles):
        for nt in range(n_tiles):
            for lane in range(32):
                for w in range(4):
                    k0, n0 = 16 * kt + 2 * (lane % 4), 64 * nt + 16 * w + lane // 4
                    if bits == 4:
                        want = sum(
                            code[:, n0 + rows4[i], k0 + columns4[i]] << np.uint64(4 * i) for i in range(8)
                        )
                        assert (words[:, kt, nt, 4 * lane + w] == want).all()
                        continue
                    for half in range(2):
                        want = sum(
                            code[:, n0 + 8 * half, k0 + [0, 8, 1, 9][i]] << np.uint64(8 * i) for i in range(4)
                        )
                        assert (words[:, kt, nt, 8 * lane + 2 * w + half] == want).all()


def test_marlin_weights_the_slow_way():
    """One code to a byte, one rearrangement, packed again: what the shorter chain must equal."""
    t = random_bytes((2, 192, 40), "U8")
    slow = Chain(
        (
            PackedCodes(4, True),
            Rearrange(
                "e (nt w c h) (kt rh l rl) -> e kt (nt h l w rl c rh)",
                {"w": 4, "c": 2, "h": 8, "rh": 2, "l": 4, "rl": 2},
            ),
            PackedCodes(4, False),
            DtypeView("U8", "I32"),
        )
    )
    assert same(slow.apply(t), Chain(marlin.WEIGHTS_4BIT).apply(t))


@pytest.mark.parametrize("name", ["marlin-int4", "marlin-int8", "marlin-mxfp4"])
@pytest.mark.parametrize("group", [32, FULL])
def test_marlin_scales_and_biases_column_by_column(name, group):
    layout = layout_named(name)
    weight = MXFP4 if name == "marlin-mxfp4" else int_format(int(name[-1]), group)
    problem = problem_for(layout, weight, "concatenated", 256, 128)
    tensors = canonical_tensors(problem)
    for matrix in ("w13", "w2"):
        scale, bias = tensors[f"{matrix}_scale"], tensors[f"{matrix}_bias"]
        columns = torch.arange(scale.shape[1])
        single = 32 * (columns // 32)
        within = columns % 32
        single = single + 2 * (within // 8) + within % 2 + 8 * ((within % 8) // 2)
        block, j = 64 * (columns // 64), columns % 64
        order = block + 8 * (j % 8) + j // 8 if weight.group != FULL else single
        if weight == MXFP4:
            order = order.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
        chains = layout.chains(problem)
        assert same(chains[f"{matrix}_scale"].apply(scale), scale.transpose(1, 2)[:, :, order].contiguous())
        assert same(chains[f"{matrix}_bias"].apply(bias), bias[:, single].contiguous())


def test_scales_are_grouped_when_padding_makes_a_second_group():
    """One group of 32 before padding, two after: the kernel sees two."""
    layout = layout_named("marlin-int4")
    problem = problem_for(layout, int_format(4, 32), "concatenated", 128, 32)
    chain = layout.chains(problem)["w2_scale"]
    assert chain.stored_type("BF16", (1, 128, 1)) == ("BF16", (1, 2, 128))
    assert chain.steps[-1] == marlin.SCALES_GROUPED


def test_each_matrix_counts_its_own_groups():
    layout = layout_named("marlin-int4")
    chains = layout.chains(problem_for(layout, int_format(4, 128), "concatenated", 128, 256))
    assert chains["w13_scale"].steps[-1] == marlin.SCALES_PER_CHANNEL
    assert chains["w2_scale"].steps[-1] == marlin.SCALES_GROUPED


def test_triton_hopper_scales_element_by_element():
    rows, groups = 300, 6
    t = random_bytes((2, rows, groups), "U8")
    for warps in (4, 8):
        out = Chain(triton_hopper.scale_steps(rows, groups, warps)).apply(t)
        block = 32 * warps
        assert tuple(out.shape) == (2, -(-rows // block) * warps, 32 * 8)
        for n in range(rows):
            m, rest = divmod(n, block)
            a, rest = divmod(rest, block // 2)
            w, rest = divmod(rest, 16)
            b, r = divmod(rest, 8)
            for g in range(groups):
                column = 64 * (g // 2) + 32 * a + 4 * r + 2 * (g % 2) + b
                assert (out[:, m * warps + w, column] == t[:, n, g]).all()


def test_trtllm_rows_and_tiles_element_by_element():
    layout = layout_named("trtllm-mxfp4")
    problem = problem_for(layout, MXFP4, "concatenated", 256, 128)
    tensors, chains = canonical_tensors(problem), layout.chains(problem)
    r = torch.arange(256)
    q = r % 32
    shuffled = 32 * (r // 32) + 4 * (q % 8) + q // 8
    for matrix, rows in (
        ("w13", torch.where(shuffled % 2 == 0, 128 + shuffled // 2, shuffled // 2)),
        ("w2", shuffled),
    ):
        assert same(chains[matrix].apply(tensors[matrix]), tensors[matrix][:, rows])
        assert same(
            chains[f"{matrix}_bias"].apply(tensors[f"{matrix}_bias"]),
            tensors[f"{matrix}_bias"][:, rows].float(),
        )
        scale = tensors[f"{matrix}_scale"]
        columns = scale.shape[2]
        flat = chains[f"{matrix}_scale"].apply(scale).reshape(2, -1)
        for c in range(columns):
            at = (r // 128) * 128 * columns + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            assert same(flat[:, at], scale[:, rows, c])

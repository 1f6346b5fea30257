"""AITER's layouts against positions written out as arithmetic, one element at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moectl.convert.layouts.registry import layout_for, layout_named
from moectl.problem.layouts import LAYOUTS
from moectl.problem.schemes import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, MXFP8
from support.layout_cases import problem_for, same, stored, tensors_for


def elements(t: torch.Tensor) -> np.ndarray:
    """``[e, n, k]`` bytes, or 16-bit elements."""
    return (t.view(torch.int16) if t.dtype is torch.bfloat16 else t).numpy()


def gates_first(t: np.ndarray, rows: str) -> np.ndarray:
    return np.concatenate((t[:, ::2], t[:, 1::2]), 1) if rows == "interleaved" else t


def padded_halves(t: np.ndarray, halves: int, rows: int, columns: int, fill: int = 0) -> np.ndarray:
    """Each half with zero rows up to `rows`, and columns up to `columns`."""
    out = []
    for half in np.split(t, halves, 1):
        full = np.full((len(t), rows, columns), fill, dtype=t.dtype)
        full[:, : half.shape[1], : half.shape[2]] = half
        out.append(full)
    return np.concatenate(out, 1)


def tiled(t: np.ndarray, width: int, piece: int, halves: int = 1) -> np.ndarray:
    """Tiles of 16 rows by `width`, in pieces; with `halves`, one tile of each in turn."""
    e, n, k = t.shape
    out = np.empty((e, n * k), dtype=t.dtype)
    for row in range(n):
        half, within = divmod(row, n // halves)
        for column in range(k):
            tile = ((within // 16 * halves + half) * (k // width) + column // width) * 16 * width
            place = (column % width // piece * 16 + within % 16) * piece + column % piece
            out[:, tile + place] = t[:, row, column]
    return out.reshape(t.shape)


def scales_tiled(t: np.ndarray, halves: int = 1) -> np.ndarray:
    """Tiles of 32 rows by 8 groups; the lowest bit is 16 rows further, or the other half."""
    e, n, g = t.shape
    out = np.empty((e, n * g), dtype=t.dtype)
    for row in range(n):
        if halves == 2:
            pair, within = divmod(row, n // 2)
            tile, lane = divmod(within, 16)
        else:
            tile, (pair, lane) = row // 32, divmod(row % 32, 16)
        for group in range(g):
            at = (tile * (g // 8) + group // 8) * 256 + group % 4 * 64 + lane * 4 + group % 8 // 4 * 2 + pair
            out[:, at] = t[:, row, group]
    return out.reshape(t.shape)


@pytest.mark.parametrize("rows", ["interleaved", "concatenated"])
@pytest.mark.parametrize(
    ("name", "weight", "piece"), [("aiter-bf16", BF16, 8), ("aiter-fp8", FP8_CHANNEL, 16)]
)
def test_tiles_of_16_by_32(name, weight, piece, rows):
    layout = layout_named(name)
    problem = problem_for(layout, weight, rows, 96, 128)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    for role in ("w13", "w2"):
        t = elements(tensors[role])
        ordered = gates_first(t, rows) if role == "w13" else t
        assert (elements(forms[role]) == tiled(ordered, 32, piece)).all()


def test_fp8_scales_stay():
    layout = layout_named("aiter-fp8")
    for weight in (FP8_TENSOR, FP8_BLOCK):
        problem = problem_for(layout, weight, "concatenated", 128, 256)
        tensors = tensors_for(layout, problem)
        form = stored(layout, problem, tensors)["w13_scale"]
        scale = tensors["w13_scale"]
        assert same(form, scale[:, 0, 0].float() if weight == FP8_TENSOR else scale)


@pytest.mark.parametrize("rows", ["interleaved", "concatenated"])
def test_mxfp4_with_16_bit_tokens(rows):
    layout = layout_named("aiter-mxfp4")
    problem = problem_for(layout, MXFP4, rows, 160, 96)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    for role, halves, columns in (("w13", 2, 256), ("w2", 1, 256)):
        for name, width in ((role, columns // 2), (f"{role}_scale", columns // 32)):
            t = gates_first(tensors[name].numpy(), rows) if halves == 2 else tensors[name].numpy()
            full = padded_halves(t, halves, 256, width)
            want = scales_tiled(full, halves) if name != role else tiled(full, 64, 16, halves)
            assert (forms[name].numpy() == want).all(), name
    bias = gates_first(tensors["w13_bias"].float().unsqueeze(2).numpy(), rows)
    assert (forms["w13_bias"].numpy() == padded_halves(bias, 2, 256, 1)[:, :, 0]).all()


def test_mxfp4_with_mxfp4_tokens():
    layout = layout_for("aiter", MXFP4, "gfx950", "mxfp4")
    problem = problem_for(layout, MXFP4, "concatenated", 160, 96)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    for role, halves, rows, columns in (("w13", 2, 128, 256), ("w2", 1, 256, 128)):
        full = padded_halves(tensors[role].numpy(), halves, rows, columns // 2)
        assert (forms[role].numpy() == tiled(full, 32, 16)).all()
        scale = padded_halves(tensors[f"{role}_scale"].numpy(), halves, rows, max(columns // 32, 8))
        assert (forms[f"{role}_scale"].numpy() == scales_tiled(scale)).all()


@pytest.mark.parametrize("rows", ["interleaved", "concatenated"])
def test_mxfp8(rows):
    layout = layout_named("aiter-mxfp8")
    problem = problem_for(layout, MXFP8, rows, 256, 64)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    w13, scale = (gates_first(tensors[name].numpy(), rows) for name in ("w13", "w13_scale"))
    assert (forms["w13"].numpy() == tiled(w13, 64, 16, 2)).all()
    assert (forms["w13_scale"].numpy() == scales_tiled(scale, 2)).all()
    assert (forms["w2"].numpy() == tiled(tensors["w2"].numpy(), 64, 16)).all()
    full = padded_halves(tensors["w2_scale"].numpy(), 1, 256, 8)
    assert (forms["w2_scale"].numpy() == scales_tiled(full)).all()


def test_none_is_called_verified():
    assert not any(facts.verified for name, facts in LAYOUTS.items() if facts.target == "aiter")

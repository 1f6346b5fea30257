"""Humming's layouts against positions computed thread by thread, as its repacking kernel assigns them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moectl.convert.layouts.registry import layout_for, layout_named
from moectl.convert.steps.recode import DistanceBytes, FusedCodes, FusedGlobal, FusedScales, SignMagnitude
from moectl.convert.steps.value_steps import VALUE_STEPS
from moectl.errors import CheckpointError, UsageError
from moectl.problem.schemes import FP8_BLOCK, FP8_CHANNEL, FULL, MXFP4, MXFP8, NVFP4, int_format
from support.humming_reference import repacked
from support.layout_cases import canonical_tensors, problem_for, same, stored, tensors_for


def codes_of(t: torch.Tensor, bits: int) -> np.ndarray:
    """``[e, n, k]`` codes of canonical bytes."""
    data = t.numpy()
    return data if bits == 8 else np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1)


def rounded_up(codes: np.ndarray, fill: int = 0) -> np.ndarray:
    """Rows and columns up to 256 and 128, filled with a code."""
    e, n, k = codes.shape
    full = np.full((e, -(-n // 256) * 256, -(-k // 128) * 128), fill, dtype=np.uint64)
    full[:, :n, :k] = codes
    return full


def words_of(t: torch.Tensor) -> np.ndarray:
    return t.numpy().view(np.uint32).astype(np.uint64)


def grouped(scales: np.ndarray) -> np.ndarray:
    """``[e, groups, n]``: place 8 i + j of 64 rows has row i + 8 j."""
    e, n, g = scales.shape
    out = np.zeros((e, g, n), dtype=scales.dtype)
    for row in range(n):
        block, i, j = row // 64, row % 8, row % 64 // 8
        out[:, :, 64 * block + 8 * i + j] = scales[:, row]
    return out


def by_channel(scales: np.ndarray) -> np.ndarray:
    """``[e, groups, n]``: place 8 i + 2 a + b of 32 rows has row 8 a + 2 i + b."""
    e, n, g = scales.shape
    out = np.zeros((e, g, n), dtype=scales.dtype)
    for row in range(n):
        block, a, i, b = row // 32, row % 32 // 8, row % 8 // 2, row % 2
        out[:, :, 32 * block + 8 * i + 2 * a + b] = scales[:, row]
    return out


def rows_added(t: torch.Tensor, n: int, columns: int = 0, fill: int = 0) -> np.ndarray:
    data = t.contiguous().view(torch.int16).numpy() if t.dtype is torch.bfloat16 else t.numpy()
    full = np.full((data.shape[0], n, columns or data.shape[2]), fill, dtype=data.dtype)
    full[:, : data.shape[1], : data.shape[2]] = data
    return full


DISTANCE = {"humming-int4-act-fp8", "humming-int4-act-fp8-sm90", "humming-int8"}
"""Layouts of bf16 models whose codes are sign and distance."""

WEIGHTS = [
    ("humming-int4", int_format(4, 32), 16, {}),
    ("humming-int4", int_format(4, FULL), 16, {}),
    ("humming-int8", int_format(8, 64), 16, {}),
    ("humming-int4-act-fp8", int_format(4, 128), 8, {}),
    ("humming-int4-act-fp8-sm90", int_format(4, 64), 8, {}),
    ("humming-int4-act-fp8-sm90", int_format(4, 128), 8, {"packed_k": True}),
    ("humming-mxfp4", MXFP4, 16, {}),
    ("humming-mxfp4-sm100", MXFP4, 16, {"plain": True}),
    ("humming-mxfp4-act-mxfp8-sm120", MXFP4, 8, {}),
    ("humming-nvfp4", NVFP4, 16, {}),
    ("humming-nvfp4-sm100", NVFP4, 16, {"plain": True}),
    ("humming-fp8", FP8_CHANNEL, 16, {}),
    ("humming-fp8-sm100", FP8_CHANNEL, 16, {"plain": True}),
    ("humming-mxfp8", MXFP8, 16, {}),
    ("humming-mxfp8-sm100", MXFP8, 16, {"plain": True}),
]


@pytest.mark.parametrize(("name", "weight", "act_bits", "how"), WEIGHTS)
def test_codes_thread_by_thread(name, weight, act_bits, how):
    layout = layout_named(name)
    problem = problem_for(layout, weight, "interleaved", 160, 64)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    for role in ("w13", "w2"):
        codes = codes_of(tensors[role], weight.bits).astype(np.int64)
        if name in DISTANCE:
            middle, most = 1 << (weight.bits - 1), (1 << weight.bits) - 1
            codes = np.where(codes >= middle, codes - middle, most - codes)
        fill = (1 << weight.bits) - 1 if name in DISTANCE else 0
        full = rounded_up(codes, fill)
        assert (words_of(forms[role]) == repacked(full, weight.bits, act_bits, **how)).all()


def test_fused_codes_thread_by_thread():
    layout = layout_named("humming-mxfp4-act-fp8")
    problem = problem_for(layout, MXFP4, "concatenated", 256, 128)
    tensors = tensors_for(layout, problem)
    tensors |= {role: t % 40 + 100 for role, t in tensors.items() if role.endswith("_scale")}
    forms = stored(layout, problem, tensors)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for role in ("w13", "w2"):
        scales = tensors[f"{role}_scale"].numpy().astype(np.int64)
        largest = scales.max((1, 2), keepdims=True)
        least = np.maximum(largest - 11, scales.min((1, 2), keepdims=True))
        kept = np.maximum(scales, least)
        assert (forms[f"{role}_scale"].numpy() == grouped((kept - least + 1).astype(np.uint8))).all()
        assert forms[f"{role}_global"].tolist() == [2.0 ** float(x - 128) for x in least.flatten()]
        codes = codes_of(tensors[role], 4)
        raised = np.repeat(kept - scales, 32, -1)
        wanted = values[codes & 7] * 2.0**-raised
        steps = np.abs(wanted[..., None] - values)
        nearest = 7 - np.argmin(steps[..., ::-1], -1)
        fused = np.where(codes == 8, 0, nearest | codes & 8).astype(np.uint64)
        assert (words_of(forms[role]) == repacked(fused, 4, 8, packed_k=True, fused=True)).all()
        assert same(forms[f"source.{role}"], tensors[role])


SCALES = [
    ("humming-int4", int_format(4, 32), 0),
    ("humming-mxfp4", MXFP4, 127),
    ("humming-mxfp8-sm100", MXFP8, 127),
    ("humming-nvfp4", NVFP4, 0),
]


@pytest.mark.parametrize(("name", "weight", "fill"), SCALES)
def test_scales_row_by_row(name, weight, fill):
    layout = layout_named(name)
    problem = problem_for(layout, weight, "concatenated", 160, 192)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    for role, n, k in (("w13_scale", 512, 256), ("w2_scale", 256, 256)):
        want = grouped(rows_added(tensors[role], n, k // weight.group, fill))
        got = forms[role]
        assert (rows_added(got, got.shape[1]) == want).all()
    bias = by_channel(rows_added(tensors["w13_bias"].unsqueeze(2), 512))[:, 0]
    assert (forms["w13_bias"].view(torch.int16).numpy() == bias).all()


def test_zero_points_and_codes_around_them():
    layout, weight = layout_named("humming-int8"), int_format(8, 64, zero_point=True)
    problem = problem_for(layout, weight, "single", 128, 64)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    zero = tensors["w2_zero"]
    assert (forms["w2_zero"].view(torch.uint8).numpy() == grouped(rows_added(zero, 256, 2))).all()
    codes, around = tensors["w2"].int(), zero.int().repeat_interleave(64, -1)
    distance = torch.where(codes >= around, codes - around, 255 - codes)
    assert (words_of(forms["w2"]) == repacked(rounded_up(distance.numpy()), 8, 16)).all()
    plain = stored(layout, replace(problem, dtype="fp16"), tensors)
    assert (words_of(plain["w2"]) == repacked(rounded_up(tensors["w2"].numpy()), 8, 16)).all()


def test_four_bit_zero_points_share_bytes():
    layout, weight = layout_named("humming-int4"), int_format(4, FULL, zero_point=True)
    problem = problem_for(layout, weight, "single", 128, 128)
    tensors = tensors_for(layout, problem)
    want = grouped(rows_added(tensors["w2_zero"], 256))
    stored_zeros = stored(layout, problem, tensors)["w2_zero"].view(torch.uint8).numpy()
    assert (stored_zeros == want[..., ::2] + 16 * want[..., 1::2]).all()


def test_scales_of_mx_tokens():
    for arch, unit in (("sm120", (2, 16)), ("sm100", (4, 128))):
        layout = layout_for("humming-sm100", MXFP4, arch, "mxfp8")
        problem = problem_for(layout, MXFP4, "single", 160, 64)
        tensors = tensors_for(layout, problem)
        forms = stored(layout, problem, tensors)
        scales = rows_added(tensors["w2_scale"], 256, 4, 127)
        words = forms["w2_scale"].numpy().view(np.uint32)
        assert words.shape == ((2, 2, 128) if arch == "sm120" else (2, 1, 256))
        for row in range(256):
            for group in range(4):
                if arch == "sm120":
                    at, byte = row // 16 * 8 + row % 8, 2 * (row % 16 // 8) + group % 2
                else:
                    at, byte = row // 128 * 128 + row % 32 * 4 + row % 128 // 32, group % 4
                got = words[:, group // unit[0], at] >> np.uint32(8 * byte) & 255
                assert (got == scales[:, row, group]).all()
        if arch == "sm100":
            raw = words_of(forms["w2"])
            codes = rounded_up(codes_of(tensors["w2"], 4))
            shifts = np.uint64(4) * np.arange(8, dtype=np.uint64)
            assert (raw[..., None] >> shifts & np.uint64(15) == codes.reshape(*raw.shape, 8)).all()


@pytest.mark.parametrize("weight", [FP8_BLOCK, FP8_CHANNEL])
def test_weights_as_wide_as_tokens_lie_in_chunks_of_columns(weight):
    layout = layout_named("humming-fp8-act-fp8")
    problem = problem_for(layout, weight, "concatenated", 256, 128)
    tensors = tensors_for(layout, problem)
    forms = stored(layout, problem, tensors)
    for role in ("w13", "w2"):
        e, n, k = tensors[role].shape
        words = forms[role]
        assert words.dtype == torch.int32 and words.shape == (e, k // 16, n * 4)
        chunks = words.view(torch.uint8).view(e, k // 16, n, 16)
        for row, column in ((0, 0), (n - 1, 17), (5, k - 1)):
            assert (
                chunks[:, column // 16, row, column % 16].tolist() == tensors[role][:, row, column].tolist()
            )
        scales, got = tensors[f"{role}_scale"], forms[f"{role}_scale"]
        if weight == FP8_BLOCK:
            assert got.dtype == torch.float32 and torch.equal(got, scales.float().transpose(1, 2))
        else:
            want = by_channel(rows_added(scales.bfloat16(), n))
            assert (got.view(torch.int16).numpy() == want).all()


def test_block_scales_are_repeated_for_their_rows():
    layout = layout_named("humming-fp8")
    problem = problem_for(layout, FP8_BLOCK, "concatenated", 256, 128)
    tensors = tensors_for(layout, problem)
    rows = tensors["w13_scale"].repeat_interleave(128, 1).bfloat16()
    assert (
        stored(layout, problem, tensors)["w13_scale"].view(torch.int16).numpy()
        == grouped(rows_added(rows, 256))
    ).all()


def test_gate_and_up_with_global_scales_of_their_own():
    layout, rows = layout_named("humming-nvfp4"), layout_named("humming-nvfp4-rows")
    for order in ("interleaved", "concatenated"):
        problem = problem_for(layout, NVFP4, order, 128, 64)
        tensors = canonical_tensors(problem)
        with pytest.raises(
            CheckpointError, match=r"different global scales.*--to humming-rows has one for every"
        ):
            stored(layout, problem, tensors)
        both = tensors["w13_global"].bfloat16().repeat_interleave(64, 1)
        if order == "interleaved":
            both = both.view(2, 2, 64, 1).transpose(1, 2).reshape(2, 128, 1)
        got = stored(rows, problem, tensors)["w13_global"]
        assert (got.view(torch.int16).numpy() == by_channel(rows_added(both, 256))[:, 0]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_sign_and_magnitude(bits):
    step = SignMagnitude(bits)
    middle = 1 << (bits - 1)
    for value in range(1 - middle, middle):
        code = value + middle
        packed = torch.tensor([[[code | code << 4 if bits == 4 else code]]], dtype=torch.uint8)
        changed = step.apply(packed, {}, {})
        want = abs(value) | (middle if value < 0 else 0)
        assert int(changed) & ((1 << bits) - 1) == want
        assert same(step.undo(changed, "U8", (1, 1, 1), {}), packed)
    for lowest in (0x00, 0x70, 0x07) if bits == 4 else (0x00,):
        with pytest.raises(CheckpointError, match=f"a weight is -{middle}, .*--to humming"):
            step.apply(torch.tensor([[[lowest]]], dtype=torch.uint8), {}, {})


def test_every_distance_comes_back():
    codes = torch.arange(256, dtype=torch.uint8).expand(1, 256, 256).contiguous()
    zeros = {"z": torch.arange(256, dtype=torch.uint8).view(1, 256, 1)}
    step = DistanceBytes("z")
    changed = step.apply(codes, zeros, {})
    assert all(len(set(row)) == 256 for row in changed[0].tolist())
    assert same(step.undo(changed, "U8", tuple(codes.shape), zeros), codes)


def test_exponents_of_fp16_models():
    layout = layout_named("humming-mxfp4")
    problem = replace(problem_for(layout, MXFP4, "single", 32, 64), dtype="fp16", bias=False)
    tensors = canonical_tensors(problem)
    tensors["w2_scale"] = torch.tensor([0, 111, 112, 113, 127, 142, 143, 249], dtype=torch.uint8).repeat(16)
    tensors["w2_scale"] = tensors["w2_scale"].view(2, 32, 2)
    got = stored(layout, problem, tensors)["w2_scale"]
    want = np.clip(rows_added(tensors["w2_scale"], 256, 4, 127).astype(int) - 112, 0, 30) * 8
    assert (got.numpy() == grouped(want.astype(np.uint8))).all()


def test_value_steps_are_in_manifests_by_name():
    names = {"distance_bytes", "sign_magnitude", "e5m0", "one_of_halves", "fused_scales", "fused_global"}
    assert names | {"fused_codes"} <= set(VALUE_STEPS)
    for step in (FusedScales(11), FusedGlobal(11), FusedCodes("w2_scale", 11)):
        assert not step.exact
        assert not step.lossy


@pytest.mark.parametrize(
    ("weight", "arch", "act", "name"),
    [
        (int_format(4, 128), "sm90", None, "humming-int4"),
        (int_format(4, 128), "sm90", "fp8", "humming-int4-act-fp8-sm90"),
        (int_format(4, 128), "sm120", "fp8", "humming-int4-act-fp8"),
        (MXFP4, "sm90", "fp8", "humming-mxfp4-act-fp8"),
        (MXFP4, None, None, "humming-mxfp4"),
    ],
)
def test_choice_by_architecture_and_activations(weight, arch, act, name):
    assert layout_for("humming", weight, arch, act).name == name


def test_layouts_that_differ_by_architecture_need_one():
    with pytest.raises(UsageError, match=r"is read on .*sm90.*got no architecture"):
        layout_for("humming", int_format(4, 128), None, "fp8")
    with pytest.raises(UsageError, match=r"is read on sm75.*got sm100"):
        layout_for("humming", MXFP4, "sm100")

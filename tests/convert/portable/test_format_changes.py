"""Repacks: every value that a matrix has before, by its format's own rules, it has afterwards."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from moectl.checkpoint.config.quantization import parse_quantization
from moectl.convert.execute.convert import convert
from moectl.convert.portable.portable_plan import PortableOptions, plan_portable
from moectl.convert.portable.report_fragments import read_report
from moectl.errors import UsageError
from moectl.problem.schemes import (
    BF16,
    FP8_ACT_GROUP_128,
    FULL,
    MXFP4,
    MXFP8,
    NVFP4,
    WeightFormat,
    int_format,
)
from support.portable_folders import contents, converted, layer_in, random_layer, storage_of, write_folder
from support.stored_layers import EXPERTS, LAYER, judge

INT4, INT4_ZERO = int_format(4, 32), int_format(4, 32, zero_point=True)
INT4_128, INT8 = int_format(4, 128), int_format(8, 64)
FP8_TENSOR = WeightFormat("fp8", 8, (FULL, FULL), "F32")
FP8_BLOCK = WeightFormat("fp8", 8, (128, 128), "F32")
FP8_CHANNEL = WeightFormat("fp8", 8, (1, FULL), "F32")
CT = "compressed-tensors"

REPACKS = (
    # storage, format, leaf; target, container; storage and format of the output
    (("awq", INT4_ZERO, ""), ("int4-g32", None), (CT, INT4_ZERO)),
    (("gptq", INT4, ""), ("int4-g32", None), (CT, INT4)),
    (("gptq", INT4_128, ""), ("int4-g32", None), (CT, INT4)),
    (("gptq", int_format(4, FULL), ""), ("int4-g128", None), (CT, INT4_128)),
    (("gptq", INT8, ""), ("int8", None), (CT, INT8)),
    ((CT, INT4, "packed"), ("int4-g32", "gptq"), ("gptq", INT4)),
    ((CT, INT4_ZERO, "packed"), ("int4-g32", None), (CT, INT4_ZERO)),
    ((CT, INT8, "packed"), ("int8", "gptq"), ("gptq", INT8)),
    ((CT, INT4, "packed"), ("int8", None), (CT, int_format(8, 32))),
    (("awq", INT4_ZERO, ""), ("int8", None), (CT, int_format(8, 32, zero_point=True))),
    (("quark", MXFP4, "weight"), ("mxfp4", None), (CT, MXFP4)),
    (("mxfp4", MXFP4, "proj.scale"), ("mxfp4", None), (CT, MXFP4)),
    ((CT, MXFP4, "packed"), ("mxfp4", "native"), ("mxfp4", MXFP4)),
    ((CT, MXFP4, "packed"), ("bf16", None), ("plain", BF16)),
    ((CT, MXFP8, "weight"), ("bf16", None), ("plain", BF16)),
    ((CT, FP8_TENSOR, "weight"), ("fp8-channel", None), (CT, FP8_CHANNEL)),
    (("modelopt", FP8_TENSOR, "weight"), ("fp8-block", "native"), ("fp8", FP8_BLOCK)),
    (("fp8", FP8_BLOCK, "inv"), ("fp8-block", None), (CT, FP8_BLOCK)),
    ((CT, FP8_BLOCK, "weight"), ("fp8-block", "native"), ("fp8", FP8_BLOCK)),
    ((CT, FP8_CHANNEL, "weight"), ("fp8-channel", None), (CT, FP8_CHANNEL)),
    (("modelopt", NVFP4, "weight"), ("nvfp4", "native"), ("modelopt", NVFP4)),
)


def same(before: np.ndarray, after: np.ndarray, rounding: float = 0.0) -> bool:
    return before.shape == after.shape and bool((abs(before - after) <= rounding * abs(before)).all())


def repack_id(row: object) -> str:
    return "-".join(map(str, row)).replace(" ", "_") if isinstance(row, tuple) else str(row)


@pytest.mark.parametrize("source, asked, result", REPACKS, ids=repack_id)
def test_repacked_values_are_the_same(source, asked, result, tmp_path):
    layer = random_layer(*source)
    out = converted(layer, tmp_path, *asked)
    found = layer_in(out, storage_of(*result), result[1])
    for matrix in ("w1", "w3", "w2"):
        for expert in range(EXPERTS):
            assert same(judge(layer, matrix, expert), judge(found, matrix, expert)), (matrix, expert)
    costs = read_report(out)["layers"]["7"]
    for cost in costs.values():
        unit = next(name for name in ("weights", "blocks") if name in cost)
        assert cost["lossless"] == cost[unit] > 0


def test_modelopt_and_compressed_tensors_nvfp4_differ_by_a_rounded_reciprocal(tmp_path):
    layer = random_layer("modelopt", NVFP4)
    out = converted(layer, tmp_path, "nvfp4")
    found = layer_in(out, storage_of(CT, NVFP4), NVFP4)
    for expert in range(EXPERTS):
        assert same(judge(layer, "w2", expert), judge(found, "w2", expert), rounding=2**-22)
    kept = {"w13": 0, "w2": 0}
    for name, scale in layer.contents().items():
        if name.endswith("weight_scale_2"):
            kept["w2" if "down" in name else "w13"] += int(1 / (1 / scale.float()) == scale)
    costs = read_report(out)["layers"][str(LAYER)]
    one = costs["w2"]["weights"] // EXPERTS
    assert {role: cost["lossless"] for role, cost in costs.items()} == {r: n * one for r, n in kept.items()}
    assert sum(kept.values()) < 3 * EXPERTS


def test_mxfp4_becomes_nvfp4_bit_for_bit(tmp_path):
    layer = random_layer(CT, MXFP4, "packed")
    for role in ("w1_scale", "w2_scale", "w3_scale"):
        layer.tensors[role][:] = [t.clamp(100, 117) for t in layer.tensors[role]]
    out = converted(layer, tmp_path, "nvfp4")
    found = layer_in(out, storage_of(CT, NVFP4), NVFP4)
    for matrix in ("w1", "w3", "w2"):
        for expert in range(EXPERTS):
            assert same(judge(layer, matrix, expert), judge(found, matrix, expert))
    tensors = contents(out)
    for expert in range(EXPERTS):
        module = f"model.layers.7.mlp.experts.{expert}"
        gate, up = (tensors[f"{module}.{name}_proj.weight_global_scale"] for name in ("gate", "up"))
        assert torch.equal(gate, up), "engines take one global scale for both"
    assert read_report(out)["layers"]["7"]["w13"] == {"kind": "repacked", "blocks": 4096, "lossless": 4096}


def test_mxfp4_blocks_out_of_reach_are_counted_and_need_leave(tmp_path):
    layer = random_layer(CT, MXFP4, "packed")
    for role in ("w1_scale", "w2_scale", "w3_scale"):
        layer.tensors[role][:] = [t.clamp(110, 112) for t in layer.tensors[role]]
    # One block 18 powers below its largest, one block of zeros below all.
    layer.tensors["w2_scale"][0][0, 0] = 112 - 18
    layer.tensors["w2"][0][0, :16] = 0x71
    layer.tensors["w2_scale"][0][1, 1] = 1
    layer.tensors["w2"][0][1, 16:32] = 0x80
    with pytest.raises(UsageError, match=r"1 of .* blocks of w2 .* too small"):
        converted(layer, tmp_path / "refused", "nvfp4")
    out = converted(layer, tmp_path / "allowed", "nvfp4", requantize=True)
    found = layer_in(out, storage_of(CT, NVFP4), NVFP4)
    cost = read_report(out)["layers"]["7"]["w2"]
    assert (cost["blocks"], cost["lossless"]) == (2 * 128 * 256 // 32, 2 * 128 * 256 // 32 - 1)
    before, after = judge(layer, "w2", 0), judge(found, "w2", 0)
    different = np.argwhere(before != after)
    assert len(different) and set(different[:, 0]) == {0} and different[:, 1].max() < 32
    # Half a step of the smallest block scale; 6 x 2**-18 is a whole number of steps, 2**-19 is not.
    assert np.all(abs(before - after)[0, :32] <= 2.0 ** (112 - 127 - 17) / 4)


def test_zero_points_that_no_nibble_holds_are_refused(tmp_path):
    layer = random_layer("gptq", INT4_ZERO)
    with pytest.raises(UsageError, match="zero points from 1 to 16; the container holds 0 to 15"):
        converted(layer, tmp_path, "int4-g32")
    other = random_layer("awq", INT4_ZERO)
    with pytest.raises(UsageError, match="zero points from 0 to 15; the container holds 1 to 16"):
        converted(other, tmp_path / "awq", "int4-g32", "gptq")


def test_fused_experts_come_apart(tmp_path):
    layer = random_layer("plain", BF16, arrangement="fused_transposed")
    out = converted(layer, tmp_path, "fp8-channel")
    plain = converted(layer, tmp_path / "plain", "int8")
    for folder, names in ((out, ("weight", "weight_scale")), (plain, ("weight_packed", "weight_scale"))):
        found = contents(folder)
        for name in names:
            assert f"model.layers.7.mlp.experts.1.up_proj.{name}" in found


REFUSED = (
    (("awq", INT4_ZERO, ""), "mxfp4"),
    (("gptq", INT4, ""), "int4-g128"),
    ((CT, MXFP4, "packed"), "int4-g32"),
    (("modelopt", NVFP4, ""), "mxfp4"),
    ((CT, INT8, "packed"), "int4-g32"),
)


@pytest.mark.parametrize("source, target", REFUSED, ids=repack_id)
def test_lossy_steps_on_quantized_weights_need_leave(source, target, tmp_path):
    layer = random_layer(*source)
    with pytest.raises(UsageError, match="cannot be represented exactly"):
        converted(layer, tmp_path / "refused", target)
    assert not (tmp_path / "refused" / "out").exists()
    out = converted(layer, tmp_path / "allowed", target, requantize=True)
    assert read_report(out)["layers"]["7"]["w2"]["snr_db"] > 8


def test_int4_that_bf16_cannot_hold_needs_leave(tmp_path):
    layer = random_layer(CT, INT4, "packed")
    with pytest.raises(UsageError, match="are not representable in BF16"):
        converted(layer, tmp_path / "refused", "bf16")
    converted(layer, tmp_path / "allowed", "bf16", requantize=True)


def test_the_rest_is_kept_and_described(tmp_path):
    layer = random_layer("awq", INT4_ZERO)
    out = converted(layer, tmp_path, "int4-g32")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.7.self_attn.q_proj"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, False)
    before, after = contents(tmp_path / "source"), contents(out)
    for name in ("self_attn.q_proj.weight", "input_layernorm.weight"):
        assert torch.equal(before[f"model.layers.7.{name}"], after[f"model.layers.7.{name}"])
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(after)
    assert replace(layer) == layer


@pytest.mark.parametrize("scale_dtype", ["E8M0", ""])
def test_how_scales_of_tokens_are_rounded_stays_said(scale_dtype, tmp_path):
    layer = random_layer("fp8", FP8_BLOCK, "inv")
    problem = layer.group.problem
    act = replace(FP8_ACT_GROUP_128, scale_dtype=scale_dtype)
    group = replace(layer.group, problem=replace(problem, scheme=replace(problem.scheme, act=act)))
    checkpoint = replace(write_folder(tmp_path / "source", layer), groups=(group,))
    convert(plan_portable(checkpoint, PortableOptions("fp8-block", "native")), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config.get("scale_fmt", "") == ("ue8m0" if scale_dtype else "")
    assert parse_quantization(config).scheme.act.rounds_scales == bool(scale_dtype)

"""Quantized matrices beside the experts: the output describes and stores them so that it stays loadable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moectl.convert.portable.verify_portable import verify_portable
from moectl.errors import UsageError
from moectl.problem.schemes import BF16, MXFP4, NVFP4, WeightFormat, int_format
from support.portable_folders import case_of, contents, converted, random_layer, storage_of
from support.stored_layers import make_layer

INT4, INT4_ZERO = int_format(4, 32), int_format(4, 32, zero_point=True)
FP8_BLOCK = WeightFormat("fp8", 8, (128, 128), "F32")
DENSE = "self_attn.o_proj"
MODULE = f"model.layers.7.{DENSE}"
CT = "compressed-tensors"


def groups(out: Path) -> list[tuple[list[str], dict]]:
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    return [(group["targets"], group["weights"]) for group in config["config_groups"].values()]


@pytest.mark.parametrize(
    "source, asked",
    [
        (("awq", INT4_ZERO), ("int4-g32", None)),
        (("gptq", INT4), ("int4-g32", None)),
        ((CT, INT4, "packed"), ("int4-g32", "gptq")),
        (("quark", MXFP4, "weight"), ("mxfp4", None)),
        ((CT, NVFP4, "packed"), ("nvfp4", "native")),
        (("fp8", FP8_BLOCK, "inv"), ("fp8-block", None)),
    ],
    ids=str,
)
def test_dense_matrices_are_stored_as_the_experts_are(source, asked, tmp_path):
    out = converted(random_layer(*source), tmp_path, *asked, dense=DENSE)
    tensors = contents(out)
    gate = "model.layers.7.mlp.experts.0.gate_proj"
    leaves = {name.removeprefix(gate) for name in tensors if name.startswith(f"{gate}.")}
    assert leaves == {name.removeprefix(MODULE) for name in tensors if name.startswith(f"{MODULE}.")}
    for leaf in leaves:
        assert torch.equal(tensors[gate + leaf], tensors[MODULE + leaf])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    plain = config.get("ignore") or config.get("dynamic")
    assert not any(DENSE.replace(".", r"\.") in name or name == MODULE for name in plain)
    assert any("q_proj" in name for name in plain)
    assert verify_portable(out).ok


def test_fp8_stays_beside_int4_experts(tmp_path):
    out = converted(random_layer("fp8", FP8_BLOCK, "inv"), tmp_path, "int4-g128", dense=DENSE)
    (experts, int4), (others, fp8) = groups(out)
    assert experts == [r"re:model\.layers\.(\d+)\.mlp\.experts\.\d+(\.down_proj|\.gate_proj|\.up_proj)$"]
    assert others == [MODULE]
    assert (int4["num_bits"], fp8["num_bits"], fp8["block_structure"]) == (4, 8, [128, 128])
    before, after = contents(tmp_path / "source"), contents(out)
    assert torch.equal(before[f"{MODULE}.weight"].float(), after[f"{MODULE}.weight"].float())
    assert torch.equal(before[f"{MODULE}.weight_scale_inv"], after[f"{MODULE}.weight_scale"])


def test_a_mix_that_a_container_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"o_proj is also quantized: a gptq container cannot hold .* fp8"):
        converted(random_layer("fp8", FP8_BLOCK, "inv"), tmp_path, "int4-g128", "gptq", dense=DENSE)
    assert not (tmp_path / "out").exists()


def test_dense_matrices_of_the_same_container_are_left_alone(tmp_path):
    out = converted(random_layer(CT, INT4, "packed"), tmp_path, "int8", dense=DENSE)
    (_, int8), (others, int4) = groups(out)
    assert (int8["num_bits"], int4["num_bits"], others) == (8, 4, [MODULE])
    before, after = contents(tmp_path / "source"), contents(out)
    for name in before:
        if name.startswith(MODULE):
            assert torch.equal(before[name], after[name])


def test_decoding_decodes_everything(tmp_path):
    out = converted(random_layer("quark", MXFP4, "weight"), tmp_path, "bf16", dense=DENSE)
    after = contents(out)
    assert after[f"{MODULE}.weight"].dtype == torch.bfloat16
    gate = after["model.layers.7.mlp.experts.0.gate_proj.weight"]
    assert torch.equal(after[f"{MODULE}.weight"], gate)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("target", ["int4-g32", "mxfp4", "nvfp4", "fp8-channel"])
def test_biases_come_along(target, tmp_path):
    case = case_of(storage_of("plain", BF16), BF16)
    layer = make_layer(replace(case, left_out=frozenset()))
    after = contents(converted(layer, tmp_path, target))
    for name, t in layer.contents().items():
        if name.endswith(".bias"):
            assert torch.equal(after[name], t)

"""Dumps of an engine's parameters against directories and layouts: names, types, strides, bytes, damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import moectl
from moectl.errors import CheckpointError, UsageError
from moectl.layer.prepare import load_prepared
from moectl.parity.compare_parameters import compared, role_of
from moectl.parity.parameter_dump import PLACES, live_parameters
from moectl.parity.parameter_sets import dumped, row_major
from support.invoking import moectl as command

VLLM = {
    "w13": "w13_weight_packed",
    "w2": "w2_weight_packed",
    "w13_scale": "w13_weight_scale",
    "w2_scale": "w2_weight_scale",
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}


def engine(folder: Path, layer: int = 0) -> dict[str, torch.Tensor]:
    """The layer as an engine holds it: other names, scales as 8-bit floats."""
    weights = load_prepared(folder, layer, "torch").weights
    prefix = f"model.layers.{layer}.mlp.experts."
    named = {f"{prefix}{VLLM[role]}": t.clone() for role, t in weights.items()}
    for name, t in named.items():
        if name.endswith("weight_scale"):
            named[name] = t.view(torch.float8_e8m0fnu)
    return named


@pytest.fixture
def marlin(tiny_gpt_oss: Path, tmp_path: Path) -> Path:
    moectl.convert(tiny_gpt_oss, tmp_path / "marlin", "marlin")
    return tmp_path / "marlin"


def test_an_engines_layer_is_a_directorys_and_a_checkpoints(
    marlin: Path, tiny_gpt_oss: Path, tmp_path: Path
) -> None:
    module = torch.nn.Module()
    for name, t in engine(marlin).items():
        module.register_buffer(name.replace(".", "_dot_"), t)
    tensors = {name.replace("_dot_", "."): t for name, t in module.named_buffers()}
    dump = moectl.dump_parameters(
        {**tensors, "model.layers.0.mlp.router.weight": torch.ones(2)}, tmp_path / "d.safetensors"
    )
    says = command("parity", marlin, dump, "--layer", 0).stdout
    assert "= model.layers.0.mlp.experts.w13_weight_packed" in says and "6 parameters equal" in says
    assert "only b   model.layers.0.mlp.router.weight" in says
    document = command("parity", tiny_gpt_oss, dump, "--to", "marlin", "--layer", 0, "--json").document
    assert document["ok"] and sum(p["status"] == "equal" for p in document["parameters"]) == 6
    document = command("parity", tiny_gpt_oss, marlin, "--to", "marlin", "--json").document
    assert document["ok"] and len(document["parameters"]) == 12
    document = command("parity", marlin, dump, "--json", code=1).document
    assert not document["ok"]
    missing = [p["a"] for p in document["parameters"] if p["status"] == "only a"]
    assert len(missing) == 6 and all(".layers.1." in name for name in missing)


def test_differences_are_named(marlin: Path, tmp_path: Path) -> None:
    tensors, prefix = engine(marlin), "model.layers.0.mlp.experts."
    tensors[f"{prefix}w2_weight_packed"][3, 1, 5] ^= 1
    tensors[f"{prefix}w2_weight_packed"][4, 0, 0] ^= 8
    tensors[f"{prefix}w13_bias"] = tensors[f"{prefix}w13_bias"].float()
    tensors[f"{prefix}w2_bias"] = tensors[f"{prefix}w2_bias"].T.contiguous().T
    tensors[f"{prefix}w13_weight_scale"] = tensors[f"{prefix}w13_weight_scale"].flatten(1)
    del tensors[f"{prefix}w2_weight_scale"]
    dump = moectl.dump_parameters(tensors, tmp_path / "dump.safetensors")
    document = command("parity", marlin, dump, "--layer", "0", "--json", code=1).document
    rows = {p["a"].removeprefix(prefix): p for p in document["parameters"]}
    packed = rows["w2_weight"]
    assert (packed["first"], packed["count"]) == ([3, 1, 5], 2)
    assert packed["sha256"][0] != packed["sha256"][1]
    assert rows["w13_bias"]["differences"][0] == "dtype BF16, F32"
    assert rows["w2_bias"]["differences"] == ["strides [256, 1], [1, 8]"]
    assert rows["w13_weight_scale"]["differences"][0].startswith("shape [8, 8, ")
    assert rows["w2_weight_scale"]["status"] == "only a" and rows["w13_weight"]["status"] == "equal"
    says = command("parity", marlin, dump, "--layer", "0", code=1).stdout
    assert (
        "2 of" in says
        and "the first at [3, 1, 5]" in says
        and says.rstrip().endswith("1 parameter equal, 5 not")
    )


def test_a_layer_without_a_number_matches_any(marlin: Path, tmp_path: Path) -> None:
    tensors = {name.rpartition(".")[2]: t for name, t in engine(marlin).items()}
    dump = moectl.dump_parameters(tensors, tmp_path / "dump.safetensors")
    assert command("parity", marlin, dump, "--layer", "0").stdout.endswith("6 parameters equal\n")
    assert command("parity", dump, dump).stdout.endswith("6 parameters equal\n")


def test_a_dump_is_plain_safetensors_with_places(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    tensors = {
        "turned": base.view(4, 6).T[1:],
        "scalar": torch.tensor(3.0),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    file = moectl.dump_parameters(torch.nn.Linear(2, 3), tmp_path / "linear.safetensors")
    assert set(dumped(file)) == {"weight", "bias"}
    file = moectl.dump_parameters(tensors, tmp_path / "views.safetensors")
    records = dumped(file)
    assert (records["turned"].stride, records["turned"].offset) == ((1, 6), 1)
    assert torch.equal(records["turned"].read().view(torch.float32).view(5, 4), tensors["turned"])
    assert records["scalar"].shape == () and records["f8"].dtype == "F8_E4M3"
    same = compared(live_parameters(tensors), records)
    assert [pair.status for pair in same] == ["equal"] * 3
    assert row_major((2, 3, 4)) == (12, 4, 1) and row_major(()) == ()
    with pytest.raises(UsageError, match="meta, which safetensors cannot hold"):
        moectl.dump_parameters({"w": torch.ones(2, device="meta")}, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_damaged_dumps_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "dump.safetensors"
    for places in ([["x"], 0], [[1, 2], 0], 5, [[1], "a"]):
        save_file({"w": torch.ones(2)}, file, {PLACES: json.dumps({"w": places})})
        with pytest.raises(CheckpointError, match="strides of w do not fit"):
            dumped(file)
    save_file({"w": torch.ones(2)}, file, {PLACES: "no json"})
    with pytest.raises(CheckpointError):
        dumped(file)
    save_file({"w": torch.ones(2)}, file)
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="has w twice"):
        dumped(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "has no safetensors files" in command("parity", tmp_path / "empty", file, code=4).stderr
    file.write_bytes(file.read_bytes()[:-1])
    command("parity", file, file, code=4)


def test_what_cannot_be_compared_is_said(marlin: Path, tiny_gpt_oss: Path, tmp_path: Path) -> None:
    assert "give --to LAYOUT" in command("parity", tiny_gpt_oss, marlin, code=2).stderr.replace(
        "Give", "give"
    )
    assert "there is no layer 7" in command("parity", marlin, marlin, "--layer", "7", code=2).stderr
    a = moectl.dump_parameters({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    b = moectl.dump_parameters({"y": torch.ones(1)}, tmp_path / "b.safetensors")
    assert "nothing to compare" in command("parity", a, b, code=1).stdout


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"ep_size": 2}, {"tp_size": 2, "ep_size": 2}])
def test_ranks_are_compared_with_a_checkpoints_shares(
    sizes: dict[str, int], tiny_gpt_oss: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ranks"
    moectl.convert(tiny_gpt_oss, out, "marlin", **sizes)
    ranks = sorted(out.glob("rank-*"))
    # A deployment says its sizes itself; every rank's parameters are those that it laid out.
    document = command("parity", tiny_gpt_oss, out, "--to", "marlin", "--json").document
    assert document["ok"] and {row["status"] for row in document["parameters"]} == {"equal"}
    assert [row["rank"] for row in document["parameters"]] == [
        n for n in range(len(ranks)) for _ in range(12)
    ]
    last = len(ranks) - 1
    says = command("parity", out, out, "--layer", 1).stdout
    assert f"equal    rank {last}: model.layers.1." in says and f"{6 * len(ranks)} parameters equal" in says
    # One rank's directory is compared with its own share, not another's.
    document = command("parity", ranks[last], tiny_gpt_oss, "--to", "marlin", "--json").document
    assert document["ok"] and {row["rank"] for row in document["parameters"]} == {last}
    document = command("parity", out, tiny_gpt_oss, "--to", "marlin", "--rank", "0", "--json").document
    assert document["ok"] and len(document["parameters"]) == 12
    # What an engine's process of rank 1 holds, by the sizes that are given.
    dump = moectl.dump_parameters(engine(ranks[1]), tmp_path / "rank-1.safetensors")
    given = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    about = ("--to", "marlin", "--layer", "0", *given)
    assert command("parity", tiny_gpt_oss, dump, *about, "--rank", "1").stdout.endswith(
        "6 parameters equal\n"
    )
    assert "is of one of" in command("parity", tiny_gpt_oss, dump, *about, code=2).stderr
    wrong = command("parity", tiny_gpt_oss, dump, *about, "--rank", "0", "--json", code=1).document
    assert any(row["status"] == "differs" for row in wrong["parameters"])


def test_ranks_of_different_deployments_are_not_compared(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    moectl.convert(tiny_gpt_oss, tmp_path / "tp", "marlin", tp_size=2)
    moectl.convert(tiny_gpt_oss, tmp_path / "whole", "marlin")
    said = command("parity", tmp_path / "tp", tmp_path / "whole", code=2).stderr
    assert "different deployments" in said and "tp 2, ep 1" in said and "tp 1, ep 1" in said
    said = command("parity", tmp_path / "tp", tiny_gpt_oss, "--to", "marlin", "--ep-size", "2", code=2).stderr
    assert "--tp-size and --ep-size: tp 1, ep 2" in said
    pair = (tmp_path / "tp" / "rank-00", tmp_path / "tp" / "rank-01")
    assert "two ranks cannot be compared" in command("parity", *pair, code=2).stderr
    assert "two ranks cannot be" in command("parity", pair[0], pair[0], "--rank", "1", code=2).stderr
    assert (
        "there is no rank 2" in command("parity", tmp_path / "tp", pair[0].parent, "--rank", 2, code=2).stderr
    )
    words = ("--to", "marlin", "--tp-size", "4")
    assert (
        "engines cut intermediate size 192 for 4"
        in command("parity", *[tiny_gpt_oss] * 2, *words, code=2).stderr
    )


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.3.mlp.experts.w13_weight", (3, "w13")),
        ("model.layers.12.mlp.experts.w2_weight_scale_inv", (12, "w2_scale")),
        ("layers.0.block_sparse_moe.experts.w13_qzeros", (0, "w13_zero")),
        ("w2_weight_scale_2", (None, "w2_global")),
        ("model.layers.1.mlp.experts.w13_input_scale", (1, "w13_input")),
        ("model.layers.1.mlp.experts.w13_g_idx", None),
        ("model.layers.1.self_attn.qkv_proj.weight", None),
    ],
)
def test_names_say_layer_and_role(name: str, role: object) -> None:
    assert role_of(name) == role

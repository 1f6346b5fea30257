"""Ranks on the command line: planned, converted one by one or all, run, and refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from moectl import load_prepared
from moectl.checkpoint import open_checkpoint
from moectl.cli.output import size
from moectl.kernels.layer_inputs import make_inputs
from moectl.kernels.reference import moe_reference
from moectl.layer.prepare import checkpoint_layer
from support.invoking import moectl
from support.stream_checkpoints import folder_bytes

CONVERT = ("--to", "moectl", "--tp-size", 2, "--ep-size", 2)


def test_the_plan_of_every_rank(tiny_gpt_oss, tmp_path):
    planned = moectl("convert", tiny_gpt_oss, tmp_path / "out", *CONVERT, "--dry-run", "--json").document
    assert [(rank["rank"], rank["tp_size"], rank["ep_size"]) for rank in planned["ranks"]] == [
        (rank, 2, 2) for rank in range(4)
    ]
    shares = [share for rank in planned["ranks"] for share in rank["shares"]]
    assert [share["experts"] for share in shares] == [[0, 4], [0, 4], [4, 8], [4, 8]]
    assert [share["intermediate"] for share in shares] == [[0, 96], [96, 192]] * 2
    assert {share["padded_intermediate"] for share in shares} == {128}
    shown = moectl("convert", tiny_gpt_oss, tmp_path / "out", *CONVERT, "--dry-run").stdout
    assert "96-191" in shown
    ranks = planned["ranks"]
    written, disk = (sum(rank[key] for rank in ranks) for key in ("bytes_out", "disk_bytes"))
    assert f"all 4 ranks  {size(written)} written, {size(disk)} of disk needed" in shown
    assert "rank 0, moectl-mtile64" in shown
    assert f"{size(ranks[0]['bytes_out'])} out (rank 0's share of them)" in shown
    assert not (tmp_path / "out").exists()


def test_ranks_one_by_one_are_all_of_them(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "all", *CONVERT)
    for rank in (2, 0, 3, 1):
        done = moectl("convert", tiny_gpt_oss, tmp_path / "each", *CONVERT, "--rank", rank)
        missing = {2: "ranks 0-1, 3 of 4", 0: "ranks 1, 3 of 4", 3: "rank 1 of 4"}.get(rank)
        if missing is not None:
            assert f"lacks {missing}; it is completed with" in " ".join(done.stderr.split())
            assert not (tmp_path / "each" / "config.json").exists()
    assert "check it with" in done.stderr
    assert folder_bytes(tmp_path / "each") == folder_bytes(tmp_path / "all")
    assert moectl("verify", tmp_path / "each", "--source", tiny_gpt_oss, "--json").document["compared"]
    assert (
        "slices, round trip matches the source's slices"
        in moectl("verify", tmp_path / "each" / "rank-01").words
    )


def test_the_summary_counts_layers_and_bytes_of_all_ranks_once(tiny_gpt_oss, tmp_path):
    whole = moectl("convert", tiny_gpt_oss, tmp_path / "whole", "--to", "moectl", "--dry-run", "--json")
    layers = len(whole.document["layers"])
    read = size(whole.document["bytes_in"])
    ranks = moectl("convert", tiny_gpt_oss, tmp_path / "out", *CONVERT)
    assert f"{read} of experts ->" in " ".join(ranks.stderr.split())
    assert f"{layers} layers converted in" in ranks.words and "of 4 ranks" in ranks.words
    shutil.rmtree(tmp_path / "out" / "rank-02")
    resumed = moectl("convert", tiny_gpt_oss, tmp_path / "out", *CONVERT, "--resume")
    assert f"{layers} layers converted in" in resumed.words and "finished before" not in resumed.words


def test_parts_fill_the_folders_of_all_ranks(tiny_gpt_oss, tmp_path):
    for name, arguments in {
        "all": [()],
        "parts": [("--part", "2/2"), ("--part", "1/2"), ("--finish",)],
    }.items():
        for more in arguments:
            moectl("convert", tiny_gpt_oss, tmp_path / name, *CONVERT, *more)
    for path in (tmp_path / "all").rglob("*"):
        if path.is_file():
            assert (tmp_path / "parts" / path.relative_to(tmp_path / "all")).read_bytes() == path.read_bytes()
    again = moectl("convert", tiny_gpt_oss, tmp_path / "all", *CONVERT, code=2)
    assert "has rank-00, rank-01, rank-02 already" in " ".join(again.stderr.split())


def test_runs_of_all_ranks_add_up(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "out", *CONVERT)
    run = ("--tokens", 5, "--device", "cpu", "--output")
    moectl("run", tiny_gpt_oss, *run, tmp_path / "whole.safetensors")
    total = 0
    for rank in range(4):
        folder, file = tmp_path / "out" / f"rank-0{rank}", tmp_path / f"{rank}.safetensors"
        done = moectl("run", folder, *run, file, "--json").document
        assert done["partial"].startswith(f"rank {rank} of 4 (tp 2, ep 2) has experts ")
        assert done["relaid"] == ""
        total = total + load_file(file)["y"].float()
    whole = load_file(tmp_path / "whole.safetensors")["y"].float()
    torch.testing.assert_close(total, whole, atol=0.03, rtol=0.03)
    benched = moectl("bench", tmp_path / "out" / "rank-03", "-m", "2", "--device", "cpu")
    assert "the sum over all ranks is the layer's" in benched.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank", 4), "there is no rank 4 among 4"),
        (("--tp-size", 7), "192 has 6 blocks of 32 weights, fewer than 7"),
        (("--ep-size", 9), "8 experts cannot be spread over 9 ranks"),
    ],
)
def test_ranks_that_cannot_be(tiny_gpt_oss, tmp_path, arguments, words):
    done = moectl("convert", tiny_gpt_oss, tmp_path / "out", *CONVERT, *arguments, code=2)
    assert words in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_the_name_of_a_ranks_folder_is_not_that_of_all(tiny_gpt_oss, tmp_path):
    done = moectl("convert", tiny_gpt_oss, tmp_path / "rank-00", *CONVERT, "--rank", 0, code=2)
    assert "has the name of one rank's, expected that of all ranks" in " ".join(done.stderr.split())


def test_the_folder_of_all_ranks_is_no_layer(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "out", *CONVERT)
    done = moectl("run", tmp_path / "out", code=4)
    assert "holds the directories of several ranks" in " ".join(done.stderr.split())
    assert "rank-00" in done.stderr
    done = moectl("unconvert", tmp_path / "out" / "rank-00", tmp_path / "back", code=2)
    assert "is restored from all of them together" in " ".join(done.stderr.split())


@pytest.mark.parametrize("weights", ["bf16", "nvfp4", "fp8-channel"])
def test_other_formats_are_shared_too(tiny_kimi, tmp_path, weights):
    """Formats whose scales a layout changes, and one without scales."""
    plain, source, out = (tmp_path / name for name in ("bf16", weights, "out"))
    moectl("convert", tiny_kimi, plain, "--to", "bf16", "--requantize")
    if weights != "bf16":
        moectl("convert", plain, source, "--to", weights, "--method", "rtn")
    target = ("--to", "trtllm" if weights == "bf16" else "marlin", "--arch", "sm100")
    moectl("convert", source, out, *target, "--tp-size", 2, "--ep-size", 2)
    assert moectl("verify", out, "--source", source, "--json").document["ok"]
    whole = checkpoint_layer(open_checkpoint(source))
    inputs = make_inputs(whole.problem, 5)

    def sum_over(layer, ids):
        return moe_reference(inputs.x, ids, inputs.weights, layer.expert, layer.problem, dtype=torch.float64)

    ranks = [load_prepared(out, rank=rank) for rank in range(4)]
    total = sum(sum_over(layer, layer.local_ids(inputs.ids)) for layer in ranks)
    wanted = sum_over(whole.prepared("torch", "cpu"), inputs.ids)
    assert 0.1 < wanted.abs().max() < 100
    assert (total - wanted).abs().max() < 1e-9

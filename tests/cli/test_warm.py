"""`moectl warm`: what it asks, compiles, shows and carries."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moectl as library
from moectl.convert.rank_slice import RankShard
from moectl.environment import find_device
from moectl.integrations.model_experts import open_experts
from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in
from moectl.layer import background_compile, warm_layers
from moectl.layer.compile_ahead import CompileRequest, CompileResult, remembered
from moectl.layer.kernel_files import INDEX
from moectl.layer.layer_source import CheckpointLayers
from moectl.problem.moe_problem import Parallel
from moectl.run.layer_variants import problem_in_dtype
from support.invoking import moectl
from support.kernelless import without_kernels
from support.sampling import every_nth

GPT = "openai/gpt-oss-20b"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


@pytest.fixture
def requests(monkeypatch):
    """What would be compiled, by layer; nothing is."""
    asked = []

    def compile_binaries(request, binaries, jobs, report):
        asked.append((request, len(binaries), jobs))
        return CompileResult(len(binaries), 1, len(binaries) - 1, 2.5, processes=2)

    monkeypatch.setattr(warm_layers, "compile_binaries", compile_binaries)
    return asked


def test_kernels_are_compiled_and_carried_to_another_machine(cache, tmp_path, monkeypatch):
    here = ("warm", GPT, "--gpu", "a100", "-m", "1", "-j", "1", "--offline")
    document = moectl(*here, "--to", str(tmp_path / "kernels"), "--json").document
    (layer,) = document["layers"]
    assert (layer["kernels"], layer["cached"], layer["compiled"], layer["written"]) == (3, 0, 3, 3)
    assert document["cache"] == str(cache) and layer["failed"] == [] and layer["backend"] == "moectl"
    assert len([*cache.glob("*/*.cubin")]) == len([*(tmp_path / "kernels").glob("*/*.cubin")]) == 3
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    printed = moectl(*here, "--from", str(tmp_path / "kernels")).stdout
    assert "|       3 |      3 |        0 |" in printed and "3 kernels taken from" in printed
    index = tmp_path / "kernels" / INDEX
    index.write_text(index.read_text().replace('"triton": "', '"triton": "0.'))
    said = moectl(*here, "--from", str(tmp_path / "kernels"), "-q")
    assert said.stdout == "0-23\t3\t0\n"
    assert "was written with other versions: triton 0." in moectl(*here, "--from", str(index.parent)).stderr


def test_each_different_layer_of_a_rank_is_compiled(requests, tmp_path):
    printed = moectl("warm", without_kernels(tmp_path / "gelu"), "--gpu", "h200", "--offline")
    assert not requests and "its library compiles its kernels" in printed.stderr and "| -" in printed.stdout
    moectl("warm", "openai/gpt-oss-120b", "--gpu", "h100", "--tp", "4", "--ep", "-m", "8192", "-j", "7")
    moectl("warm", "openai/gpt-oss-120b", "--gpu", "sm120", "--tp", "2", "--batched", "-m", "64")
    (spread, kernels, jobs), (sliced, *_) = requests
    assert (spread.problem.local_experts, spread.problem.dims.intermediate) == (32, 2880)
    assert (spread.tokens, jobs, spread.batched, spread.gpu.arch) == (
        8192,
        7,
        False,
        90,
    ) and 8 <= kernels <= 12
    assert (sliced.problem.local_experts, sliced.problem.dims.intermediate) == (128, 1440)
    assert (sliced.gpu.arch, sliced.batched) == (120, True)
    # Whole blocks of 32 channels: 12 for seven of eight ranks, 6 for the last.
    moectl("warm", "openai/gpt-oss-120b", "--gpu", "h200", "--tp", "8", "-m", "16")
    assert [request.problem.dims.intermediate for request, *_ in requests[2:]] == [384, 192]


def test_converted_directories_are_read_by_their_own_kernels(requests, tiny_kimi, tmp_path):
    library.convert(tiny_kimi, tmp_path / "marlin", "marlin")
    library.convert(tiny_kimi, tmp_path / "moectl", "moectl")
    for name in ("marlin", "moectl"):
        moectl("warm", str(tmp_path / name), "--gpu", "h200", "-m", "128")
    moectl("warm", tiny_kimi, "--gpu", "h200", "-m", "128", "--backend", "moectl_marlin")
    assert [request.backend for request, *_ in requests] == ["moectl_marlin", "moectl", "moectl_marlin"]
    assert len({replace(request, backend="") for request, *_ in requests}) == 1
    error = moectl("warm", str(tmp_path / "moectl"), "--gpu", "h200", "--tp", "2", code=2).stderr
    assert "whose manifest settles --tp" in error


def test_all_ranks_of_a_directory_are_warmed(requests, tiny_gpt_oss, tmp_path):
    library.convert(tiny_gpt_oss, tmp_path / "ranks", "moectl", tp_size=3)
    moectl("warm", str(tmp_path / "ranks"), "--gpu", "h200", "-m", "16")
    moectl("warm", tiny_gpt_oss, "--gpu", "h200", "-m", "16", "--tp", "3")
    directory, checkpoint = requests[:1], requests[1:]
    assert directory == checkpoint and directory[0][0].problem.dims.intermediate == 64


@pytest.mark.parametrize("deployment", every_nth([{"tp": 2, "ep": True}, {"tp": 2}, {}], 3))
def test_a_server_that_starts_after_it_starts_no_process(deployment, tiny_gpt_oss, tmp_path, monkeypatch):
    """Of a checkpoint that was warmed for a named GPU: the first start for it, in a server's words."""
    gpu = OfflineGpu.of(find_device("a100"))
    ep = deployment.get("ep", False)
    sizes = {"ep_size": 2} if ep else {"tp_size": deployment.get("tp", 1)}
    options = [f"--{key}{'' if value is True else f'={value}'}" for key, value in deployment.items()]
    moectl("warm", tiny_gpt_oss, "--gpu", "a100", "-m", "8", "-j", "1", *options)
    library.convert(tiny_gpt_oss, tmp_path / "prepared", "moectl", **sizes)

    def refused(*arguments):
        raise AssertionError("a process was started")

    monkeypatch.setattr(background_compile, "python_process", refused)
    shard = RankShard(**sizes)
    loads = []
    for folder in (tiny_gpt_oss, tmp_path / "prepared"):
        problem = problem_in_dtype(open_experts(folder).problem_of(1, shard), "bf16")
        monkeypatch.setattr(background_compile, "_loads", {})
        with standing_in(replace(gpu, name="A100 as the driver may call it")):
            loads.append(background_compile.start(problem, "moectl", torch.device("cuda"), 6))
    published, prepared = (load.result for load in loads)
    assert published == prepared and published.kernels == published.cached >= 3


def test_records_are_written_where_kernels_are_taken_over(tmp_path, monkeypatch):
    words = ("warm", GPT, "--gpu", "a100", "-m", "1", "-j", "1", "--offline")
    moectl(*words, "--to", str(tmp_path / "kernels"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("MOECTL_CACHE", str(tmp_path / "records"))
    (layer,) = warm_layers.warm_layers(CheckpointLayers(library.open_checkpoint(GPT)), Parallel())
    request = CompileRequest(layer.problem, "moectl", OfflineGpu.of(find_device("a100")), 1)
    assert remembered(request) is None
    moectl(*words, "--from", str(tmp_path / "kernels"))
    assert remembered(request).kernels == 3


def test_the_documented_number_of_kernels_is_that_of_today(requests):
    moectl("warm", GPT, "--gpu", "h200", "--offline")
    ((_, kernels, _),) = requests
    page = (Path(__file__).parents[2] / "docs" / "warm.md").read_text(encoding="utf-8")
    assert f"| moectl  | {kernels:7} |      0 | {kernels:8} |" in page
    assert f"moectl: {kernels} kernels, {kernels} from the cache" in page


def test_a_cache_that_cannot_be_written_is_one_error_before_anything_is_compiled(
    tmp_path, monkeypatch, requests
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    done = moectl("warm", GPT, "--gpu", "h200", "-m", "1", code=3)
    assert f"{tmp_path}/file/triton cannot be written: Not a directory" in done.stderr
    assert "next: Set TRITON_CACHE_DIR" in done.stderr and not requests
    assert "not compiled" not in done.stderr and "kept in" not in done.stdout


def test_failures_are_said(monkeypatch, requests):
    def failing(request, binaries, jobs, report):
        return CompileResult(2, 0, 1, 1.0, ("_k for 8 tokens: RuntimeError: ptxas",), note="no fork")

    monkeypatch.setattr(warm_layers, "compile_binaries", failing)
    said = moectl("warm", GPT, "--gpu", "h200", code=1).stderr
    assert "warning: not compiled: _k for 8 tokens" in said and "compiled in one process, no fork" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "mi300x"], "kernels are compiled for CUDA GPUs"),
        (["--gpu", "v100"], "moectl has no kernels for"),
        (["--gpu", "h200", "--backend", "marlin"], "moectl_marlin"),
        (["--gpu", "h200", "--from", "nowhere"], "has no kernels.json"),
        (["--gpu", "h200", "--tp", "96"], "has 90 blocks of 32 weights, fewer than 96"),
        (["--gpu", "h200", "--tp", "33", "--ep"], "cannot be spread over 33 ranks"),
    ],
)
def test_what_cannot_be_done_is_refused_first(options, said, requests):
    out = moectl("warm", GPT, *options, code=None)
    assert out.code in (2, 4) and said in out.stderr and not requests


WARM = ("--to", "moectl", "--warm", "h200, sm120")


def test_a_conversion_compiles_the_kernels_of_what_it_wrote(requests, tiny_gpt_oss, tmp_path):
    done = moectl("convert", tiny_gpt_oss, tmp_path / "whole", *WARM, "--json").document
    assert [(made["arch"], made["tokens"]) for made in done["warmed"]] == [("sm90", 16384), ("sm120", 16384)]
    (layer,) = done["warmed"][0]["layers"]
    assert layer["layers"] == "0-1" and layer["compiled"] == layer["kernels"] - 1 > 8
    assert [request.gpu.arch for request, *_ in requests] == [90, 120]
    # What `moectl warm` compiles for the directory.
    converted = requests.copy()
    for gpu in ("h200", "sm120"):
        moectl("warm", tmp_path / "whole", "--gpu", gpu)
    assert requests[2:] == converted
    printed = moectl("convert", tiny_gpt_oss, tmp_path / "plain", *WARM)
    assert "2 layers converted" in printed.stdout and "tokens on NVIDIA H200 (sm90)" in printed.stdout
    assert "warmed" not in moectl("convert", tiny_gpt_oss, tmp_path / "cold", *WARM[:2], "--json").document


def test_a_conversion_of_ranks_compiles_the_kernels_of_those_it_wrote(requests, tiny_gpt_oss, tmp_path):
    ranks = (*WARM[:2], "--ep-size", 3, "--warm", "a100")
    done = moectl("convert", tiny_gpt_oss, tmp_path / "all", *ranks, "--json").document
    assert len(done["ranks"]) == 3 and len(done["warmed"]) == 1

    def compiled():
        return [request.problem.local_experts for request, *_ in requests]

    assert compiled() == [3, 2]
    each = (tiny_gpt_oss, tmp_path / "each", *ranks)
    refused = moectl("convert", *each, "--rank", 0, code=2)
    assert "--part, --rank and --dry-run do not write" in refused.stderr and not each[1].exists()
    for rank in range(3):
        moectl("convert", *each[:-2], "--rank", rank)
    moectl("convert", *each, "--finish")
    assert compiled() == [3, 2] * 2


def test_a_conversion_by_parts_compiles_when_it_is_finished(requests, tiny_gpt_oss, tmp_path):
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        moectl("convert", tiny_gpt_oss, out, *WARM[:2], "--part", part)
    refused = moectl("convert", tiny_gpt_oss, out, *WARM, "--part", "2/2", code=2)
    assert "--part, --rank and --dry-run do not write" in refused.stderr and not requests
    moectl("convert", tiny_gpt_oss, out, *WARM, "--finish")
    assert len(requests) == 2 and (out / "READY").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "triton-hopper", "--warm", "h200"], "which read moectl-mtile64, moectl-bf16, moectl-fp8"),
        (["--to", "int4-g32", "--requantize", "--warm", "h200"], "not int4-g32"),
        (["--to", "moectl", "--warm", "h200,v100"], "moectl has no kernels for"),
        (
            ["--to", "moectl", "--warm", "mi300x"],
            "--warm mi300x is AMD Instinct MI300X: kernels are compiled for CUDA GPUs",
        ),
        (["--to", "moectl", "--warm", "h200,"], "--warm takes names separated by commas"),
        (["--to", "moectl", "--warm", "h200", "--dry-run"], "--part, --rank and --dry-run do not write"),
    ],
)
def test_what_a_conversion_cannot_compile_is_refused_before_it(
    options, said, requests, tiny_gpt_oss, tmp_path
):
    out = moectl("convert", tiny_gpt_oss, tmp_path / "out", *options, code=2)
    assert said in " ".join(out.stderr.split()) and not requests and not (tmp_path / "out").exists()


def test_a_kernel_that_does_not_compile_after_a_conversion_is_said(
    monkeypatch, requests, tiny_gpt_oss, tmp_path
):
    def failing(request, binaries, jobs, report):
        return CompileResult(2, 0, 1, 1.0, ("_k for 8 tokens: RuntimeError: ptxas",))

    monkeypatch.setattr(warm_layers, "compile_binaries", failing)
    said = moectl("convert", tiny_gpt_oss, tmp_path / "out", *WARM, code=1).stderr
    assert "warning: not compiled: _k for 8 tokens" in said and (tmp_path / "out" / "READY").exists()

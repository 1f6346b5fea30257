"""`moectl warm`: what it asks, compiles, shows and carries."""

from dataclasses import replace

import pytest

import moectl as library
from moectl.layer import warm_layers
from moectl.layer.compile_ahead import CompileResult
from moectl.layer.kernel_files import INDEX
from support.invoking import moectl

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
    printed = moectl("warm", "moonshotai/Kimi-K3", "--gpu", "h200", "--offline")
    assert not requests and "its library compiles its kernels" in printed.stderr and "| -" in printed.stdout
    moectl("warm", "openai/gpt-oss-120b", "--gpu", "h100", "--tp", "4", "--ep", "-m", "8192", "-j", "7")
    moectl("warm", "openai/gpt-oss-120b", "--gpu", "sm120", "--tp", "2", "--batched", "-m", "64")
    (spread, kernels, jobs), (sliced, *_) = requests
    assert (spread.problem.local_experts, spread.problem.dims.intermediate) == (32, 2880)
    assert (spread.tokens, jobs, spread.batched, spread.gpu.arch) == (8192, 7, False, 90) and kernels > 15
    assert (sliced.problem.local_experts, sliced.problem.dims.intermediate) == (128, 1440)
    assert (sliced.gpu.arch, sliced.batched) == (120, True)


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
        (["--gpu", "h200", "--tp", "7"], "cannot be sliced over 7"),
    ],
)
def test_what_cannot_be_done_is_refused_first(options, said, requests):
    out = moectl("warm", GPT, *options, code=None)
    assert out.code in (2, 4) and said in out.stderr and not requests

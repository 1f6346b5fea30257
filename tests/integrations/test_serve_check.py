"""`moectl serve-check`: what would keep a server from starting, by the facts of its adapter."""

import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import moectl as package
from moectl.environment import find_device
from moectl.integrations import sglang
from moectl.integrations import vllm as vllm_plugin
from moectl.integrations.engine_names import ENGINE_NAMES
from moectl.integrations.model_experts import open_experts
from moectl.integrations.serve_check import ServeRequest, check_serving, weight_bytes
from moectl.integrations.served_engines import SERVED_ENGINES
from moectl.synth import synthesize
from support.invoking import moectl

RELEASES = {"vllm": "0.33.0", "sglang": "0.5.23", "transformers": "5.17.0"}
SERVING = ("vllm", "sglang")


@pytest.fixture(scope="module")
def folders(tiny_gpt_oss, tmp_path_factory):
    out = tmp_path_factory.mktemp("served")
    package.convert(tiny_gpt_oss, out / "whole", "moectl")
    package.convert(tiny_gpt_oss, out / "tp", "moectl", tp_size=2)
    package.convert(tiny_gpt_oss, out / "ep", "moectl", ep_size=2)
    package.convert(tiny_gpt_oss, out / "bare", "moectl", experts_only=True)
    return out


def checked(folder, engine, *options, code=0, gpu="h200", release=None):
    words = ("--release", release or RELEASES[engine], "--gpu", gpu, "--offline", "--json", *options)
    return moectl("serve-check", folder, "--engine", engine, *words, code=code).document


def refused(document):
    return {finding["about"]: finding for finding in document["findings"] if finding["level"] == "refused"}


@pytest.mark.parametrize("engine", SERVING)
def test_what_works_has_its_command(tiny_gpt_oss, folders, engine):
    published, whole = checked(tiny_gpt_oss, engine), checked(folders / "whole", engine)
    assert published["works"] and not published["converted"] and whole["converted"]
    assert "--quantization moectl" in published["serve"] and "--quantization" not in whole["serve"]
    for document, folder in ((published, tiny_gpt_oss), (whole, folders / "whole")):
        assert str(folder) in shlex.split(document["serve"])
        assert document["layers"] == [
            {"layers": [0, 1], "scheme": "mxfp4 group 32, a16 activations", "backend": "moectl"}
        ]


def test_commands_are_the_engines(folders):
    tp, ep = folders / "tp", folders / "ep"
    assert checked(tp, "vllm", "--tp", "2")["serve"] == f"vllm serve {tp} --tensor-parallel-size 2"
    assert checked(ep, "vllm", "--tp", "2", "--ep", "2")["serve"] == (
        f"vllm serve {ep} --tensor-parallel-size 2 --enable-expert-parallel"
    )
    assert checked(ep, "sglang", "--tp", "2", "--ep", "2", "--option", "context-length=4096")["serve"] == (
        f"sglang serve --model-path {ep} --tp-size 2 --ep-size 2 --context-length 4096"
    )
    data = ("--ep", "2", "--option", "data-parallel-size=2")
    assert checked(ep, "vllm", *data)["serve"] == (
        f"vllm serve {ep} --enable-expert-parallel --data-parallel-size 2"
    )


def test_the_command_for_transformers_is_a_program(tiny_gpt_oss, folders):
    for folder, taken in ((tiny_gpt_oss, True), (folders / "whole", False)):
        python, flag, code = shlex.split(checked(folder, "transformers")["serve"])
        compile(code, "serve", "exec")
        assert (python, flag) == ("python", "-c") and ("moectl_config" in code) is taken
    document = checked(tiny_gpt_oss, "transformers", "--tp", "2", code=1)
    assert "run on one rank" in refused(document)["ranks"]["says"]


@pytest.mark.parametrize("engine", SERVING)
def test_ranks_must_be_those_of_the_directory(folders, engine):
    document = checked(folders / "whole", engine, "--tp", "2", code=1)
    assert (
        "was converted for rank 0 of 1 (tp 1, ep 1), this is rank 0 of 2"
        in refused(document)["files"]["says"]
    )
    assert "Convert with --tp-size" in refused(document)["files"]["do"] and document["layers"] == []
    impossible = checked(folders / "whole", engine, "--tp", "3", "--ep", "2", code=1)
    assert "ranks" in refused(impossible)


@pytest.mark.parametrize(
    ("engine", "option", "reason"),
    (
        ("vllm", "enable-eplb", "EPLB"),
        ("vllm", "--enable_lora", "LoRA"),
        ("vllm", "all2all-backend=deepep_low_latency", "batched activations"),
        ("vllm", "load-format=tensorizer", "stored after loading"),
        ("sglang", "enable-eplb", "EPLB"),
        ("sglang", "moe-a2a-backend=deepep", "all-to-all backends"),
        ("sglang", "enable-two-batch-overlap", "two-batch overlap"),
        ("sglang", "enable-memory-saver", "memory saver discards"),
        ("sglang", "dtype=float32", "bfloat16 or float16, not float32"),
        ("vllm", "quantization=fp8", "keeps moectl from computing"),
    ),
)
def test_options_are_refused_as_by_the_adapters(folders, engine, option, reason):
    document = checked(folders / "whole", engine, "--option", option, "--option", "seed=7", code=1)
    assert reason in refused(document)["options"]["says"] and refused(document)["options"]["do"]
    name = "--" + option.split("=")[0].lstrip("-").replace("_", "-")
    assert name not in document["serve"] and document["serve"].endswith("--seed 7")


@pytest.mark.parametrize("engine", SERVING)
def test_a_variable_that_the_engine_would_refuse_is_refused(folders, engine, monkeypatch):
    monkeypatch.setenv("MOECTL_EXPERTS", "kernels")
    assert checked(folders / "whole", engine)["works"]
    monkeypatch.setenv("MOECTL_EXPERTS", "kernel")
    says = refused(checked(folders / "whole", engine, code=1))["options"]["says"]
    assert says == "MOECTL_EXPERTS must be kernels, got kernel"


def test_all_reasons_are_said_at_once(folders):
    options = ("--option", "enable-eplb", "--option", "enable-lora", "--tp", "2")
    document = checked(folders / "whole", "sglang", *options, release="0.4.1", gpu="v100", code=1)
    assert set(refused(document)) == {"engine", "options", "files", "device"}
    assert "EPLB, LoRA" in refused(document)["options"]["says"]
    assert "no adapter for SGLang 0.4.1, only for 0.5.23" in refused(document)["engine"]["says"]


def test_layers_without_a_kernel_are_the_engines_or_an_error(tmp_path, folders):
    source = synthesize(
        "moonshotai/Kimi-K3", tmp_path / "situ", layers=1, experts=8, hidden=256, intermediate=128
    )
    document = checked(source, "vllm")
    assert document["works"] and document["layers"][0]["backend"] == ""
    (left,) = (finding for finding in document["findings"] if finding["level"] == "warning")
    assert "left to vLLM" in left["says"] and left["do"] == "serve it without moectl"
    document = checked(folders / "whole", "vllm", gpu="v100", code=1)
    assert "no kernel for them on" in refused(document)["kernels"]["says"]


def test_a_directory_for_the_engines_own_kernels_needs_their_gpu(tiny_gpt_oss, tmp_path):
    package.convert(tiny_gpt_oss, tmp_path / "marlin", "marlin")
    document = checked(tmp_path / "marlin", "vllm")
    (kernels,) = (finding["says"] for finding in document["findings"] if finding["about"] == "kernels")
    assert kernels.endswith("vLLM's own kernels, on marlin-mxfp4 as it is")
    package.convert(tiny_gpt_oss, tmp_path / "hopper", "triton-hopper")
    refusal = refused(checked(tmp_path / "hopper", "vllm", gpu="a100", code=1))["kernels"]["says"]
    assert "triton-hopper is for sm90, NVIDIA A100-SXM4-80GB is sm80" in refusal
    # SGLang reads moectl's own kernels' layout alone as it is; others are laid out anew while loading.
    assert checked(tmp_path / "marlin", "sglang")["layers"][0]["backend"] == "moectl"


def kernels(document):
    (finding,) = (finding for finding in document["findings"] if finding["about"] == "kernels")
    return finding["level"], finding["says"]


def test_the_backend_that_is_named_is_the_plug_ins(tiny_gpt_oss, folders, tmp_path, monkeypatch):
    marlin = tmp_path / "marlin"
    package.convert(tiny_gpt_oss, marlin, "marlin")
    monkeypatch.setenv("MOECTL_BACKEND", "vllm")
    level, says = kernels(checked(marlin, "vllm"))
    assert level == "fine" and says.endswith("vLLM's own kernels, on marlin-mxfp4 as it is")
    level, says = kernels(checked(tiny_gpt_oss, "vllm"))
    assert level == "warning" and says.endswith("left to vLLM by MOECTL_BACKEND=vllm")
    level, says = kernels(checked(folders / "whole", "vllm", code=1))
    assert level == "refused" and "none of which takes moectl-mtile64 as it is" in says
    # It means nothing to another engine.
    says = refused(checked(folders / "whole", "sglang", code=1))["backend"]
    assert says["says"] == "MOECTL_BACKEND=vllm names no backend in SGLang" and "unset it" in says["do"]
    # A backend of moectl's takes a directory for vLLM's own kernels, too: it lays it out anew.
    monkeypatch.setenv("MOECTL_BACKEND", "moectl")
    assert kernels(checked(marlin, "vllm")) == (
        "fine",
        "layers 0-1 (mxfp4 group 32, a16 activations): moectl's backend moectl",
    )
    monkeypatch.setenv("MOECTL_BACKEND", "moectle")
    document = checked(marlin, "vllm", code=1)
    assert "names no backend in vLLM" in refused(document)["backend"]["says"]
    assert "choose from vllm, moectl, moectl_marlin" in refused(document)["backend"]["do"]
    # A program that imports moectl names the backend itself.
    assert checked(folders / "whole", "transformers")["layers"][0]["backend"] == "moectl"


def test_damage_is_found(folders, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folders / "whole", copy)
    layer = copy / "moectl-layer-00001.experts"
    data = bytearray(layer.read_bytes())
    data[-1] ^= 1
    layer.write_bytes(bytes(data))
    assert checked(copy, "vllm")["works"], "headers and sizes are right"
    assert "hashes" in refused(checked(copy, "vllm", "--verify", code=1))
    layer.write_bytes(bytes(data[:-1]))
    assert "bytes" in refused(checked(copy, "vllm", code=1))["files"]["says"]
    (copy / "READY").unlink()
    assert "READY is missing" in refused(checked(copy, "vllm", code=1))["checkpoint"]["says"]
    assert "has experts only" in refused(checked(folders / "bare", "sglang", code=1))["files"]["says"]
    assert "checkpoint" in refused(checked(tmp_path / "nothing", "vllm", code=1))


def test_the_installed_engine_must_find_moectl(folders, monkeypatch):
    request = ServeRequest(str(folders / "whole"), SERVED_ENGINES["vllm"], find_device("h200"))

    def found():
        return {item.about: item for item in check_serving(request).findings if item.level == "refused"}

    module = "moectl.integrations.serve_check"
    monkeypatch.setattr(f"{module}.distribution_version", lambda *names: None)
    assert "vLLM is not installed here" in found()["engine"].says and "pip install" in found()["engine"].do
    monkeypatch.setattr(f"{module}.distribution_version", lambda *names: "0.33.0")
    monkeypatch.setattr(f"{module}.entry_points", lambda group: ())
    assert "no entry point vllm.general_plugins is called moectl" in found()["plug-in"].says
    points = (SimpleNamespace(name="moectl"),)
    monkeypatch.setattr(f"{module}.entry_points", lambda group: points)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert found()["plug-in"].do == "add moectl to VLLM_PLUGINS"
    monkeypatch.setenv("VLLM_PLUGINS", "other,moectl")
    assert "plug-in" not in found()


def test_too_little_memory_is_refused(folders, monkeypatch):
    monkeypatch.setattr("moectl.integrations.serve_check.weight_bytes", lambda *words: 150 << 30)
    document = checked(folders / "whole", "vllm", code=1)
    assert "weights of 150 GiB per GPU, NVIDIA H200 has 141 GiB" in refused(document)["memory"]["says"]


def test_a_rank_holds_its_share(tiny_gpt_oss, folders):
    whole = SERVED_ENGINES["sglang"].shards(1, 1, {})
    half = SERVED_ENGINES["sglang"].shards(2, 1, {})
    published = open_experts(tiny_gpt_oss)
    total = sum(info.nbytes for info in published.source.checkpoint.tensors.values())
    assert weight_bytes(published, whole, 1) == total
    assert total // 2 - 1 <= weight_bytes(published, half, 2) <= total // 2
    ranks = folders / "tp"
    stored = sum(path.stat().st_size for path in (ranks / "rank-00").glob("moectl-layer-*"))
    rest = sum(path.stat().st_size for path in ranks.glob("moectl-rest-*"))
    assert rest and stored < weight_bytes(open_experts(ranks), half, 2) < stored + rest


def test_names_releases_and_limits_are_the_adapters():
    assert tuple(SERVED_ENGINES) == ENGINE_NAMES
    assert SERVED_ENGINES["vllm"].releases == tuple(vllm_plugin.ADAPTERS)
    assert SERVED_ENGINES["sglang"].releases == tuple(sglang.ADAPTERS)
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'"transformers>=([\d.]+)"', pyproject)
    assert SERVED_ENGINES["transformers"].releases == (f"{oldest}+",)
    refusals = SERVED_ENGINES["sglang"].refusals
    assert (refusals.__module__, refusals.__name__) == (sglang.limits.__name__, "refusals")


def test_text_and_wrong_usage(folders):
    whole = folders / "whole"
    words = ("--engine", "sglang", "--release", "0.5.23", "--gpu", "h200")
    said = moectl("serve-check", whole, *words)
    assert said.stdout.startswith("works") and said.stdout.endswith(f"sglang serve --model-path {whole}\n")
    quiet = moectl("serve-check", whole, *words, "--option", "enable-eplb", "--quiet", code=1)
    assert quiet.stdout == "moectl's experts in SGLang do not support EPLB\n"
    assert "Did you mean vllm" in moectl("serve-check", whole, "--engine", "vlm", code=2).stderr
    twice = ("--option", "a=1", "--option", "a=2")
    assert "each NAME or NAME=VALUE once" in moectl("serve-check", whole, *words, *twice, code=2).stderr


def test_convert_says_how_to_serve(tiny_gpt_oss, tmp_path):
    out = tmp_path / "ep"
    said = moectl("convert", tiny_gpt_oss, out, "--to", "moectl", "--ep-size", "2").stderr
    lines = " ".join(said.replace("moectl:", "").split())
    assert f"serve it with: vllm serve {out} --tensor-parallel-size 2 --enable-expert-parallel" in lines
    assert f"serve it with: sglang serve --model-path {out} --tp-size 2 --ep-size 2" in lines
    for name, options in (
        ("bare", ("--to", "moectl", "--experts-only")),
        ("part", ("--to", "moectl", "--tp-size", "2", "--rank", "0")),
        ("other", ("--to", "cutlass-sm100")),
    ):
        said = moectl("convert", tiny_gpt_oss, tmp_path / name, *options).stderr
        assert "serve it with" not in said, name

"""`moectl serve-check`: what would keep a server from starting, by the facts of its adapter."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import moectl as package
from moectl.environment import find_device
from moectl.integrations import sglang
from moectl.integrations import vllm as vllm_plugin
from moectl.integrations.engine_names import ENGINE_NAMES
from moectl.integrations.model_experts import open_experts
from moectl.integrations.serve_check import check_serving
from moectl.integrations.serve_layers import _relaid, weight_bytes
from moectl.integrations.serve_request import ServeRequest
from moectl.integrations.served_engines import SERVED_ENGINES
from moectl.problem.layouts import OWN_LAYOUTS
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import A16, FULL, INT8_ACT_TOKEN, Scheme, int_format
from moectl.synth import synthesize
from support.invoking import moectl
from support.kernelless import without_kernels

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


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_model_that_is_not_here_is_checked_by_what_is_known_of_it(engine, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    words = ("--engine", engine, "--release", RELEASES[engine], "--gpu", "h100", "--json")
    document = moectl("serve-check", "openai/gpt-oss-120b", *words, "--tp", "1", code=None).document
    (files,) = (finding for finding in document["findings"] if finding["about"] == "files")
    assert files["level"] == "warning" and f"{engine} downloads them when it starts" in files["says"]
    assert document["layers"][0]["backend"] == "moectl" and "memory" not in refused(document)
    offline = moectl("serve-check", "openai/gpt-oss-120b", *words, "--offline", code=1).document
    assert refused(offline)["files"]["says"] == "the weights of openai/gpt-oss-120b are not on this machine"
    assert offline["layers"] == document["layers"]


def test_a_model_that_does_not_fit_is_refused_before_it_is_downloaded(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    words = ("--engine", "vllm", "--release", RELEASES["vllm"], "--gpu", "h100", "--tp", "8", "--json")
    document = moectl("serve-check", "deepseek-ai/DeepSeek-V3", *words, code=1).document
    assert refused(document)["memory"]["says"].startswith("experts of 77.8 GiB per GPU")


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
    assert refused(document)["files"]["do"].startswith("use --tp 1, or convert with --tp-size")
    assert document["layers"] == []
    document = checked(folders / "tp", engine, code=1)
    assert refused(document)["files"]["do"].startswith("use --tp 2, or convert with --tp-size 1")
    document = checked(folders / "ep", engine, "--tp", "2", code=1)
    assert refused(document)["files"]["do"].startswith("use --tp 2 --ep 2, or convert")
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
    document = checked(without_kernels(tmp_path / "gelu"), "vllm")
    assert document["works"] and document["layers"][0]["backend"] == ""
    (left,) = (f for f in document["findings"] if f["level"] == "warning" and f["about"] == "kernels")
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
        "warning",
        "layers 0-1 (mxfp4 group 32, a16 activations): moectl's backend moectl, laid out again while loading "
        "from marlin-mxfp4",
    )
    monkeypatch.setenv("MOECTL_BACKEND", "moectle")
    document = checked(marlin, "vllm", code=1)
    assert "names no backend in vLLM" in refused(document)["backend"]["says"]
    assert "choose from vllm, moectl, moectl_marlin" in refused(document)["backend"]["do"]
    # A program that imports moectl names the backend itself.
    assert checked(folders / "whole", "transformers")["layers"][0]["backend"] == "moectl"


def test_a_named_backend_must_support_the_layers(folders, monkeypatch):
    monkeypatch.setenv("MOECTL_BACKEND", "flashinfer_trtllm")
    document = checked(folders / "whole", "vllm", code=1)
    assert "needs SM100-SM109; this device is SM90" in refused(document)["kernels"]["says"]
    assert checked(folders / "whole", "vllm", gpu="b200")["works"]
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    assert checked(folders / "whole", "sglang")["works"]


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_weights_on_the_input_are_refused(tmp_path, engine):
    source = synthesize(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        tmp_path / "l4",
        layers=1,
        experts=4,
        hidden=256,
        intermediate=256,
    )
    package.convert(source, tmp_path / "out", "moectl")
    for folder in (source, tmp_path / "out"):
        document = checked(folder, engine, code=1)
        assert "router weights are applied to their input" in refused(document)["kernels"]["says"]
        assert refused(document)["kernels"]["do"] == "serve the checkpoint without moectl"
    words = ("--to", "moectl", "--dry-run", "--offline")
    said = moectl("convert", source, tmp_path / "again", *words)
    assert "router weights are applied to their input" in " ".join(said.stderr.split())
    assert "serve it with" not in moectl("convert", source, tmp_path / "third", "--to", "moectl").stderr
    told = moectl("explain", source, "--policy", "moectl", "--gpu", "h200", "--offline").stdout
    assert "moectl run" in told and "--quantization moectl" not in told


@pytest.mark.parametrize(
    ("model", "to", "reason"),
    (
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "humming", "do not take fp8 per tensor"),
        ("amd/Kimi-K2.5-MXFP4", "marlin", "do not take mxfp4 group 32, mxfp4 dynamic activations"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "humming", "computes them with ModelOptNvFp4FusedMoE"),
    ),
)
def test_layouts_of_the_engines_kernels_are_refused_as_by_the_plug_in(tmp_path, model, to, reason):
    source = synthesize(model, tmp_path / "source", layers=2, experts=8, hidden=256, intermediate=256)
    out = tmp_path / "out"
    said = " ".join(moectl("convert", source, out, "--to", to).stderr.replace("moectl:", "").split())
    assert reason in said and "vllm serve" not in said and "in SGLang it is laid out again" in said
    document = checked(out, "vllm", code=1)
    assert reason in refused(document)["kernels"]["says"]
    assert refused(document)["kernels"]["do"].startswith("convert --to moectl")
    level, says = kernels(checked(out, "sglang"))
    assert level == "warning" and "moectl, laid out again while loading" in says


def test_what_is_laid_out_again_is_a_warning_everywhere(tiny_gpt_oss, tmp_path):
    out = tmp_path / "fp8"
    said = " ".join(moectl("convert", tiny_gpt_oss, out, "--to", "marlin", "--act", "fp8").stderr.split())
    assert "in vLLM and SGLang it is laid out again while loading, if moectl has a kernel for it" in said
    package.convert(tiny_gpt_oss, tmp_path / "humming", "humming")
    for folder, engine in ((out, "vllm"), (out, "sglang"), (tmp_path / "humming", "sglang")):
        document = checked(folder, engine)
        level, says = kernels(document)
        assert document["works"] and level == "warning" and "laid out again while loading from" in says
    assert kernels(checked(tmp_path / "humming", "vllm"))[0] == "fine"


def test_the_directory_of_one_rank_is_not_served(folders):
    rank = folders / "tp" / "rank-00"
    document = checked(rank, "vllm", "--tp", "2", code=1)
    assert "one rank's experts alone, and no config.json" in refused(document)["files"]["says"]
    assert refused(document)["files"]["do"] == f"serve {folders / 'tp'}"
    assert document["serve"] == f"vllm serve {folders / 'tp'} --tensor-parallel-size 2"


def test_documents_are_checked(folders, tmp_path):
    for name in ("config.json", "model.safetensors.index.json", "source.config.json"):
        for number, change in enumerate((Path.unlink, lambda path: path.write_text("{}\n"))):
            copy = tmp_path / f"{name}{number}"
            shutil.copytree(folders / "whole", copy)
            change(copy / name)
            document = checked(copy, "vllm", code=1)
            found = refused(document).get("files") or refused(document)["checkpoint"]
            assert name in found["says"]
            assert not any("complete" in finding["says"] for finding in document["findings"])


def test_a_missing_file_of_a_rank_is_converted_again(folders, tmp_path):
    copy = tmp_path / "tp"
    shutil.copytree(folders / "tp", copy)
    next((copy / "rank-01").glob("*.experts")).unlink()
    found = refused(checked(copy, "vllm", "--tp", "2", code=1))["files"]
    assert "cannot be found" in found["says"] and found["do"] == "Fetch or write it again."


@pytest.mark.parametrize("engine", SERVING)
def test_sizes_are_those_of_the_engines_options(folders, engine):
    tp, ep = folders / "tp", folders / "ep"
    size = "--tensor-parallel-size 2" if engine == "vllm" else "--tp-size 2"
    for options in (("tensor-parallel-size=2",), ("tp=2", "seed=7")):
        words = [word for option in options for word in ("--option", option)]
        document = checked(tp, engine, *words)
        assert document["tp"] == 2 and document["serve"].count("2") == 1 + str(tp).count("2")
        assert size in document["serve"]
    spread = "enable-expert-parallel" if engine == "vllm" else "ep-size=2"
    document = checked(ep, engine, "--tp", "2", "--option", spread)
    assert document["ep"] == 2 and document["serve"].count("expert" if engine == "vllm" else "--ep") == 1
    assert "files" in refused(checked(tp, engine, "--tp", "2", "--option", spread, code=1))
    for words in (("--tp", "2", "--option", "tp=4"), ("--option", "tp=many"), ("--option", "tp")):
        found = refused(checked(tp, engine, *words, code=1))["ranks"]
        assert found["do"] == "use --tp and --ep"


def test_vllms_short_options_are_written_out(folders):
    document = checked(folders / "ep", "vllm", "--ep", "2", "--option", "dp=2")
    assert document["serve"].endswith("--enable-expert-parallel --data-parallel-size 2")
    wrong = refused(checked(folders / "ep", "vllm", "--tp", "2", "--option", "ep=2", code=1))["ranks"]
    assert wrong["says"] == "--enable-expert-parallel takes no value, got 2"


@pytest.mark.parametrize(
    ("engine", "option", "left"),
    (
        ("vllm", "cpu-offload-gb=0", "--cpu-offload-gb 0"),
        ("vllm", "offload-group-size=0", "--offload-group-size 0"),
        ("vllm", "enable-lora=false", "--no-enable-lora"),
        ("vllm", "enable-expert-parallel=False", ""),
        ("sglang", "enable-lora=false", ""),
        ("sglang", "cpu-offload-gb=0", "--cpu-offload-gb 0"),
        ("sglang", "trust-remote-code=true", "--trust-remote-code"),
    ),
)
def test_what_switches_off_is_not_refused(folders, engine, option, left):
    document = checked(folders / "whole", engine, "--option", option)
    assert document["works"] and document["serve"].endswith(f"{folders / 'whole'} {left}".rstrip())
    on = option.replace("=0", "=4").replace("=false", "=true")
    if "lora" in on or "=4" in on:
        assert "options" in refused(checked(folders / "whole", engine, "--option", on, code=1))


@pytest.mark.parametrize("engine", SERVING)
def test_ranks_divide_attention_heads(tiny_gpt_oss, engine):
    # 64 heads, and 8 pairs of keys and values.
    found = refused(checked(tiny_gpt_oss, engine, "--tp", "3", code=1))
    assert found["ranks"]["says"] == "3 tensor-parallel ranks do not divide 64 attention heads"
    assert "ranks" not in refused(checked(tiny_gpt_oss, engine, "--tp", "16", code=1))
    config = tiny_gpt_oss / "config.json"
    assert '"num_key_value_heads": 8' in config.read_text()
    served = SERVED_ENGINES["sglang"]
    assert served.attention_ranks(8, {"--enable-dp-attention": True, "--dp-size": "4"}) == 2


def test_slices_are_refused_with_their_reason(tiny_gpt_oss):
    says = refused(checked(tiny_gpt_oss, "vllm", "--tp", "16", code=1))["checkpoint"]["says"]
    assert "has 6 blocks of 32 weights, fewer than 16" in says


def test_experts_alone_are_no_model(tiny_gpt_oss, folders, tmp_path):
    lone = "its layers have no weights but those of experts and routers, and engines need all"

    def warned(folder):
        return [f["says"] for f in checked(folder, "vllm")["findings"] if f["level"] == "warning"]

    assert warned(tiny_gpt_oss) == warned(folders / "whole") == [lone]
    whole = tmp_path / "whole"
    shutil.copytree(tiny_gpt_oss, whole)
    norms = {f"model.layers.{n}.input_layernorm.weight": torch.ones(256) for n in (0, 1)}
    save_file(norms, whole / "model-norms.safetensors")
    if (index := whole / "model.safetensors.index.json").exists():
        document = json.loads(index.read_text())
        document["weight_map"] |= dict.fromkeys(norms, "model-norms.safetensors")
        index.write_text(json.dumps(document))
    else:
        names = [*norms, *load_file(whole / "model.safetensors")]
        places = {n: "model-norms.safetensors" if n in norms else "model.safetensors" for n in names}
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert not warned(whole)


def test_a_stated_gpu_is_not_asked_for_again(folders):
    found = refused(checked(folders / "whole", "vllm", gpu="t4", code=1))["device"]
    assert found["do"] == "serve it without moectl there"
    request = ServeRequest(str(folders / "whole"), SERVED_ENGINES["vllm"], find_device("cpu"))
    (found,) = (item for item in check_serving(request).findings if item.about == "device")
    assert found.do == "state the server's with --gpu"


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
    monkeypatch.setattr("moectl.integrations.serve_layers.weight_bytes", lambda *words: 150 << 30)
    document = checked(folders / "whole", "vllm", code=1)
    assert "weights of 150 GiB per GPU, NVIDIA H200 has 140 GiB" in refused(document)["memory"]["says"]


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


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("act", [A16, INT8_ACT_TOKEN], ids=str)
def test_own_layouts_are_laid_out_again_for_layers_that_are_read_in_another(bits, act):
    weight = int_format(bits, FULL if bits == 8 else 128)
    problem = MoEProblem(Dims(256, 256), 8, 2, Scheme(weight, act))
    own = f"moectl-int{bits}" if act == INT8_ACT_TOKEN else "moectl-mtile64"
    for name in SERVING:
        again = {it: _relaid(SERVED_ENGINES[name], it, "moectl", problem) for it in OWN_LAYOUTS}
        assert [it for it, relaid in again.items() if not relaid] == [own]

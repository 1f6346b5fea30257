"""transformers 5.x: recorded decisions of two releases, and what each release makes of a checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
from devtools.conformance import read_rows
from devtools.transformers_recording.compare import compared

from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device
from moectl.explain import explain
from moectl.explain.explanation import Question
from moectl.oracle import SelectionInputs, decide, engine_named, packages_from
from moectl.oracle.engines.transformers_5.releases import V5_17_0, V5_23_0
from moectl.problem.moe_problem import Parallel
from support.invoking import moectl

DATA = Path(__file__).parents[2] / "data" / "oracle"
RELEASES = ("5.23.0", "5.17.0")
NEWEST = engine_named("transformers")
GPT, FP8, BF16 = "openai/gpt-oss-120b", "Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B"
USUAL = "transformers_usual"


def decision(name, gpu, requested=None, packages="transformers", release="", env=None, **problem):
    engine = engine_named(f"transformers=={release}") if release else NEWEST
    opened = open_checkpoint(name, offline=True)
    inputs = SelectionInputs(
        opened.groups[0].problem.on(Parallel(all2all="none", **problem)),
        find_device(gpu),
        packages_from(packages, env, engine=engine),
        engine.name,
        requested,
        model=opened.model,
    )
    return decide(inputs)


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_decision_agrees(release):
    rows = list(read_rows(DATA / f"transformers-{release}.jsonl.gz"))
    found = [compared(row, f"transformers=={release}") for row in rows]
    assert [(c.cell, c.recorded, c.answer) for c in found if not c.agrees] == []
    assert {row["device"] for row in rows if "device" in row} >= {
        "sm75",
        "sm80",
        "sm90",
        "sm100",
        "xpu",
        "cpu",
    }
    kinds = {c.recorded.prefill for c in found if c.recorded.prefill.endswith("Error")}
    assert kinds >= {"ImportError", "KeyError", "ValueError", "NotImplementedError", "RuntimeError"}
    kernels = {c.recorded.prefill for c in found} - kinds
    assert kernels >= {"torch.grouped_mm", "loop", "deep-gemm", "sonic-moe", "gpt-oss-triton-kernels"}


def explained(packages):
    question = Question(NEWEST.policy, Parallel(all2all="none"))
    machine = packages_from(packages, engine=NEWEST)
    return explain(open_checkpoint(GPT, offline=True), find_device("h200"), machine, question)


def test_gpt_oss_is_dequantized_without_kernels_and_no_longer_fits():
    kept, lost = explained("transformers"), explained(USUAL)
    assert repr(kept.groups[0].decision) == "gpt_oss_triton_kernels" and kept.fits
    group = lost.groups[0]
    assert repr(group.decision) == "grouped_mm" and not lost.fits
    # 4.25 bits with scales become 16; biases stay.
    assert 3.7 < lost.expert_bytes / kept.expert_bytes < 3.8
    assert group.memory.stored == kept.groups[0].memory.padded
    assert (
        group.fallback.kind == "passed" and group.fallback.candidate.engine_name == "gpt-oss-triton-kernels"
    )
    assert "experts are dequantized to bf16 on loading, and take 3.8 times the memory" in group.decision.notes
    # A step reads the weights that are in memory.
    assert group.roofline.decode[0].work.bytes > 3 * kept.groups[0].roofline.decode[0].work.bytes


@pytest.mark.parametrize(
    ("release", "version", "backend"),
    [
        ("5.23.0", "0.18.2", "gpt_oss_triton_kernels"),
        ("5.23.0", "0.17.2", "grouped_mm"),
        ("5.23.0", "0.19.0", "grouped_mm"),
        ("5.17.0", "0.16.2", "gpt_oss_triton_kernels"),
        ("5.17.0", "0.18.2", "grouped_mm"),
    ],
)
def test_each_release_accepts_its_own_versions_of_kernels(release, version, backend):
    found = decision(GPT, "h200", packages=f"transformers,kernels={version}", release=release)
    assert found.require().backend.name == backend
    if backend == "grouped_mm":
        (verdict,) = found.candidates[0].failed
        assert verdict.question == "package kernels" and verdict.offered == f"kernels {version}"


def test_fp8_is_dequantized_before_sm89():
    kept, lost = decision(FP8, "l40s"), decision(FP8, "a100")
    assert (kept.require().engine_name, kept.require().backend.dequantizes) == (
        "finegrained-fp8 matmul_grouped",
        False,
    )
    assert (lost.require().engine_name, lost.require().backend.dequantizes) == ("torch.grouped_mm", True)
    assert "needs" not in kept.error
    failed = decision(FP8, "h200", packages=USUAL)
    assert failed.error_kind == "ImportError" and not failed.usable


@pytest.mark.parametrize(
    ("name", "gpu", "requested", "more", "kind"),
    [
        (BF16, "a100", "deepgemm", {}, "ImportError"),
        (BF16, "h200", "deepgemm", {"packages": "transformers,nvcc=12.2"}, "ImportError"),
        (BF16, "h200", "sonicmoe", {"packages": "transformers,apache_tvm_ffi=0.1.9"}, "ImportError"),
        (BF16, "h200", "sonicmoe", {"env": {"USE_HUB_KERNELS": "NO"}}, "ImportError"),
        (BF16, "h200", "deepgemm_megamoe", {}, "KeyError"),
        (FP8, "h200", "sonicmoe", {}, "KeyError"),
        (FP8, "b200", "deepgemm", {}, "NotImplementedError"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "h200", "sonicmoe", {}, "ValueError"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "h200", "grouped_mm", {}, "ValueError"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "h200", None, {}, "RuntimeError"),
    ],
)
def test_what_fails_names_the_exception(name, gpu, requested, more, kind):
    found = decision(name, gpu, requested, **more)
    assert not found.usable and found.error_kind == kind and found.error


def test_arguments_are_requested_like_backends():
    assert decision(GPT, "h200", "deepgemm").require().engine_name == "gpt-oss-triton-kernels"
    assert decision(GPT, "h200", "dequantize+deepgemm").require().engine_name == "deep-gemm"
    assert decision(GPT, "h200", "use_kernels").require().engine_name == "MegaBlocksMoeMLP"
    assert decision(FP8, "h200", "dequantize").require().backend.dequantizes


def test_weights_that_are_not_read_are_an_error():
    for name, words in (
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", "does not read the experts"),
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "does not read the experts"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "without their scales"),
    ):
        found = decision(name, "h200")
        assert not found.usable and words in found.error and not found.error_kind


def test_releases_differ_in_models_and_in_scales():
    nvfp4 = "RedHatAI/Qwen3-Coder-Next-NVFP4"
    assert decision(nvfp4, "h200").usable
    assert "without their global scales" in decision(nvfp4, "h200", release="5.17.0").error
    unknown = decision("moonshotai/Kimi-K2-Instruct", "h200")
    assert [gate.kind for gate in unknown.gates] == ["model"] and "kimi_k2" in unknown.gates[0].says
    newer, older = V5_23_0.models, V5_17_0.models
    assert older.known < newer.known and "muse_spark" in newer.known - older.known
    assert older.own - newer.own == {"aria", "aria_text"} and newer.own < older.own
    assert (
        newer.normed == {name for name in newer.known if name.startswith("muse_spark")} and not older.normed
    )


def test_a_release_between_two_is_answered_by_the_older_one():
    found = moectl("explain", GPT, "--offline", "--gpu", "h200", "--engine", "transformers==5.20.1")
    assert "transformers 5.17.0" in found.words
    noted = " ".join(found.stderr.split())
    assert "moectl has no rules for transformers 5.20.1: 5.17.0, the last known release before it" in noted


def test_explain_prints_the_call():
    ask = ("explain", FP8, "--offline", "--gpu", "h200", "--engine", "transformers")
    said = moectl(*ask, "--backend", "deepgemm", "--tp", "2").words
    assert (
        f'AutoModelForCausalLM.from_pretrained("{FP8}", '
        'distributed_config=DistributedConfig(tp_size=2), experts_implementation="deepgemm")'
    ) in said
    assert "from source, not recorded: several ranks" in said
    refused = moectl(*ask, "--dp", "2", "--json", code=1).document["groups"][0]["decision"]
    (gate,) = refused["gates"]
    assert "no data parallelism" in gate["says"]


def test_transformers_is_not_imported_and_an_answer_is_quick():
    code = f"""
import sys, time
from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device
from moectl.oracle import SelectionInputs, decide, engine_named, packages_from
engine = engine_named("transformers")
opened = open_checkpoint({GPT!r}, offline=True)
packages = packages_from("transformers", engine=engine)
problem, device = opened.groups[0].problem, find_device("h200")
start = time.process_time()
decide(SelectionInputs(problem, device, packages, engine.name, model=opened.model))
print(time.process_time() - start, "transformers" in sys.modules, "torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *imported = ran.stdout.split()
    assert imported == ["False", "False"] and float(seconds) < 0.5
